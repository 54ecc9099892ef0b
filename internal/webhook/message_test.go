package webhook

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

func TestMessageID_H2(t *testing.T) {
	t.Parallel()
	e := store.Event{Seq: 7, Type: "sandbox.ready", Sandbox: "sbx_1", At: time.UnixMilli(1700000000123)}
	id := MessageID("wh_1", e)
	if len(id) != 36 {
		t.Errorf("%s has %d characters", id, len(id))
	}
	if strings.ContainsAny(id, ". ,") {
		t.Errorf("%s has a character that the signed text or the header uses between its parts", id)
	}
	same := e
	same.At, same.Data, same.Actor = e.At.In(time.FixedZone("", 3600)), []byte("{}"), "key_1"
	if MessageID("wh_1", same) != id {
		t.Error("the id of one event is not always the same")
	}
	seen := map[string]string{id: "the first"}
	for what, change := range map[string]func(*store.Event){
		"another number": func(e *store.Event) { e.Seq = 8 },
		"another time":   func(e *store.Event) { e.At = e.At.Add(time.Millisecond) }, // the number was given anew
		"another type":   func(e *store.Event) { e.Type = "sandbox.stopped" },
		"another":        func(e *store.Event) { e.Sandbox = "sbx_2" },
	} {
		other := e
		change(&other)
		if was, there := seen[MessageID("wh_1", other)]; there {
			t.Errorf("%s has the id of %s", what, was)
		}
		seen[MessageID("wh_1", other)] = what
	}
	if _, there := seen[MessageID("wh_2", e)]; there {
		t.Error("two webhooks share an id")
	}
}

func TestBody_H1(t *testing.T) {
	t.Parallel()
	e := store.Event{
		ID: "ev_1", Seq: 7, Project: "prj_1", Type: "sandbox.ready", Sandbox: "sbx_1", Operation: "op_1", Actor: "key_1", Key: "k",
		Data: json.RawMessage(`{"from":"waking"}`), At: time.Date(2026, 3, 1, 12, 0, 0, 5e6, time.UTC),
	}
	got, err := body(e)
	want := `{"type":"sandbox.ready","timestamp":"2026-03-01T12:00:00.005Z","data":{"id":"ev_1","seq":7,"type":"sandbox.ready","sandbox":"sbx_1",` +
		`"operation":"op_1","actor":"key_1","key":"k","data":{"from":"waking"},"at":"2026-03-01T12:00:00.005Z"}}`
	if err != nil || string(got) != want {
		t.Errorf("%s, %v, want %s", got, err, want)
	}
	e.Data = nil
	if got, err := body(e); err != nil || !strings.Contains(string(got), `"data":null`) {
		t.Errorf("without data: %s, %v", got, err)
	}
	e.Data = json.RawMessage("{")
	if _, err := body(e); err == nil {
		t.Error("data that is no JSON was encoded")
	}
}

// The example of the Standard Webhooks specification.
func TestSignKnown_H2(t *testing.T) {
	t.Parallel()
	h := http.Header{}
	secrets := []store.WebhookSecret{{Value: "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}}
	err := sign(h, secrets, "msg_p5jXN8AQM9LWM0D4loKWxJek", time.Unix(1614265330, 0), []byte(`{"test": 2432232314}`))
	if err != nil || h.Get("Webhook-Signature") != "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=" ||
		h.Get("Webhook-Id") != "msg_p5jXN8AQM9LWM0D4loKWxJek" || h.Get("Webhook-Timestamp") != "1614265330" {
		t.Errorf("%v, %v", h, err)
	}
}

// While a secret is changed a receiver with the old one and one with the new one both
// take every message.
func TestRotate_H2(t *testing.T) {
	t.Parallel()
	now := time.Now()
	old, fresh, newest := NewSecret(), NewSecret(), NewSecret()
	takes := func(secrets []store.WebhookSecret, at time.Time, secret string) bool {
		t.Helper()
		h := http.Header{}
		if err := sign(h, secrets, "msg_1", at, []byte("{}")); err != nil {
			t.Fatal(err)
		}
		w, err := standardwebhooks.NewWebhook(secret)
		if err != nil {
			t.Fatal(err)
		}
		return w.VerifyIgnoringTimestamp([]byte("{}"), h) == nil
	}
	first := Rotate(nil, old, now, time.Hour)
	if !takes(first, now, old) || takes(first, now, fresh) {
		t.Error("one secret")
	}
	both := Rotate(first, fresh, now, time.Hour)
	if in := now.Add(time.Hour - 1); !takes(both, in, old) || !takes(both, in, fresh) {
		t.Error("within the overlap one of the two is not signed for")
	}
	if out := now.Add(time.Hour); takes(both, out, old) || !takes(both, out, fresh) {
		t.Error("after the overlap")
	}
	if again := Rotate(both, fresh, now.Add(time.Minute), time.Hour); len(again) != 2 || again[1] != both[1] {
		t.Errorf("the same call twice: %d secrets", len(again))
	}
	third := Rotate(both, newest, now, time.Hour)
	if len(third) != 2 || takes(third, now, old) || !takes(third, now, fresh) || !takes(third, now, newest) {
		t.Error("a third secret")
	}
	if leaked := Rotate(both, newest, now, 0); len(leaked) != 1 || takes(leaked, now, fresh) {
		t.Error("without an overlap the old secret still signs")
	}
	if err := sign(http.Header{}, both[1:], "msg_1", now.Add(2*time.Hour), nil); err == nil {
		t.Error("signed with no secret")
	}
}

func TestSecrets(t *testing.T) {
	t.Parallel()
	a, b := NewSecret(), NewSecret()
	if a == b || CheckSecret(a) != nil {
		t.Errorf("%v", CheckSecret(a))
	}
	for _, bad := range []string{
		"", "whsec_", "hunter2", a[len(secretPrefix):], a + "!", "whsec_c2hvcnQ=", strings.TrimRight(a, "="),
		"whsec_" + strings.Repeat("QUFB", 22), a + "\n", "WHSEC_" + a[len(secretPrefix):],
	} {
		err := CheckSecret(bad)
		if !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("%q: %v", bad, err)
			continue
		}
		if len(bad) > len(secretPrefix) && strings.Contains(err.Error(), bad) {
			t.Errorf("the secret is in %q", err)
		}
	}
	w := store.Webhook{ID: "wh_1", Secrets: []store.WebhookSecret{{Value: a}}}
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		if text := fmt.Sprintf(format, w); strings.Contains(text, a) {
			t.Errorf("%s prints the secret", format)
		}
	}
}

func TestFilter(t *testing.T) {
	t.Parallel()
	e := store.Event{Project: "prj_1", Type: "sandbox.ready"}
	for _, c := range []struct {
		types []string
		want  bool
	}{
		{nil, true},
		{[]string{"*"}, true},
		{[]string{"sandbox.ready"}, true},
		{[]string{"operation.*", "sandbox.*"}, true},
		{[]string{"sandbox"}, false},
		{[]string{"sandbox.read"}, false},
		{[]string{"sandbox.ready.*"}, false},
		{[]string{"sandboxes.*"}, false},
		{[]string{"operation.*", "condition.set"}, false},
	} {
		if err := CheckTypes(c.types); err != nil {
			t.Errorf("%v: %v", c.types, err)
		}
		if got := Wants(store.Webhook{Project: "prj_1", Types: c.types}, e); got != c.want {
			t.Errorf("%v wants %s: %v", c.types, e.Type, got)
		}
	}
	if Wants(store.Webhook{Project: "prj_2"}, e) {
		t.Error("a webhook wants another project's events")
	}
	for _, bad := range []string{"", "sand*", "Sandbox.ready", ".*", "sandbox.", "*.ready", "sandbox.*.x", "a b", strings.Repeat("a", 101)} {
		if err := CheckTypes([]string{bad}); !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if err := CheckTypes(make([]string, maxTypes+1)); !fault.Is(err, fault.InvalidArgument) {
		t.Errorf("too many: %v", err)
	}
}
