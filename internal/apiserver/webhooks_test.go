package apiserver

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/webhook"
)

// message is what a receiver got.
type message struct {
	header http.Header
	body   []byte
	event  api.Event
}

// verify checks a message's signature.
func (m message) verify(secret string) error {
	w, err := standardwebhooks.NewWebhook(secret)
	if err != nil {
		return err
	}
	return w.Verify(m.body, m.header)
}

// listen gives the address of a receiver that answers as it is told, and what it gets.
func listen(t *testing.T, answer func(m message) int) (url string, got chan message) {
	t.Helper()
	got = make(chan message, 1000)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m := message{header: r.Header}
		var err error
		if m.body, err = io.ReadAll(r.Body); err != nil {
			return
		}
		var envelope struct {
			Data api.Event `json:"data"`
		}
		if err := json.Unmarshal(m.body, &envelope); err != nil {
			t.Errorf("a message of %q: %v", m.body, err)
		}
		m.event = envelope.Data
		w.WriteHeader(answer(m))
		got <- m
	}))
	t.Cleanup(s.Close)
	return s.URL + "/hook?token=secret", got
}

// next waits for a message of a type, passing over others.
func next(t *testing.T, got chan message, typ string) message {
	t.Helper()
	timer := time.After(deadline)
	for {
		select {
		case m := <-got:
			if m.event.Type == typ {
				return m
			}
		case <-timer:
			t.Fatalf("no %s came", typ)
		}
	}
}

func everyWebhookRoute(t *testing.T, r *rig) {
	var ill atomic.Bool
	url, got := listen(t, func(m message) int {
		if ill.Load() && m.event.Type != "webhook.test" {
			return http.StatusBadGateway
		}
		return http.StatusNoContent
	})
	made := decode[api.WebhookSecret](t, r.do("POST", "/v1/webhooks", fmt.Sprintf(`{"url":%q,"description":"for a test","events":["webhook.*","sandbox.*"]}`, url)), 201)
	hook, secret := made.Webhook, made.Secret
	one := "/v1/webhooks/" + hook.ID
	if hook.Status != api.WebhookStatusEnabled || hook.Secrets != 1 || !strings.HasPrefix(secret, "whsec_") || len(hook.Events) != 2 {
		t.Errorf("made %+v", made)
	}
	m := next(t, got, "webhook.created")
	if err := m.verify(secret); err != nil || m.event.Actor == "" || m.event.ID == "" || m.header.Get("Content-Type") != "application/json" {
		t.Errorf("the first message: %v %s", err, m.body)
	}
	if strings.Contains(string(m.body), "token=secret") {
		t.Errorf("the event tells the URL: %s", m.body)
	}
	list := r.do("GET", "/v1/webhooks?limit=5", "")
	if l := decode[api.WebhookList](t, list, 200); len(l.Webhooks) != 1 || l.Webhooks[0].ID != hook.ID || strings.Contains(string(list.body), secret) {
		t.Errorf("the list is %s", list.body)
	}
	if a := r.do("GET", one, ""); decode[api.Webhook](t, a, 200).URL != url || strings.Contains(string(a.body), secret) {
		t.Errorf("get: %s", a.body)
	}
	rotated := decode[api.WebhookSecret](t, r.do("POST", one+"/rotate-secret", `{"overlap_seconds":600}`), 200)
	m = next(t, got, "webhook.secret_rotated")
	if rotated.Secret == secret || rotated.Webhook.Secrets != 2 || m.verify(secret) != nil || m.verify(rotated.Secret) != nil {
		t.Errorf("after a rotation: %+v, %v, %v", rotated, m.verify(secret), m.verify(rotated.Secret))
	}
	test := decode[api.DeliveryAttempt](t, r.do("POST", one+"/test", ""), 200)
	if m = next(t, got, "webhook.test"); test.Status != 204 || test.Error != "" || m.verify(rotated.Secret) != nil {
		t.Errorf("the test: %+v, %s", test, m.body)
	}
	decode[api.Webhook](t, r.do("PATCH", one, `{"description":"still","events":["webhook.updated"]}`), 200)
	updated := next(t, got, "webhook.updated")
	id := updated.header.Get("webhook-id")
	ended := func(attempts int) (log api.DeliveryLog) {
		until(t, "the attempt is in the log", func() bool {
			log = decode[api.DeliveryLog](t, r.do("GET", one+"/deliveries/"+id, ""), 200)
			return len(log.Attempts) == attempts && log.Delivery.Status == api.DeliveryStatusDelivered
		})
		return log
	}
	ended(1)
	replayed := decode[api.Replayed](t, r.do("POST", one+"/replay", fmt.Sprintf(`{"from":%d}`, updated.event.Seq), "Idempotency-Key: again"), 200)
	m = next(t, got, "webhook.updated")
	if replayed.Deliveries != 1 || m.header.Get("webhook-id") != updated.header.Get("webhook-id") || string(m.body) != string(updated.body) {
		t.Errorf("replayed %d: %v %s", replayed.Deliveries, m.header, m.body)
	}
	if again := decode[api.Replayed](t, r.do("POST", one+"/replay", fmt.Sprintf(`{"from":%d}`, updated.event.Seq), "Idempotency-Key: again"), 200); again.Deliveries != 1 {
		t.Errorf("the repeated call: %+v", again)
	}
	if n := len(got); n != 0 {
		t.Errorf("the repeated call sent %d", n)
	}
	log := ended(2)
	if log.Attempts[0].Status != 204 || log.Delivery.Type != "webhook.updated" || log.Delivery.Attempts != 2 || log.Delivery.EndedAt == nil || log.Delivery.NextAt != nil {
		t.Errorf("the log is %+v", log)
	}
	if n := decode[api.Replayed](t, r.do("POST", one+"/replay", fmt.Sprintf(`{"delivery":%q}`, id)), 200); n.Deliveries != 1 {
		t.Errorf("one replayed: %+v", n)
	}
	next(t, got, "webhook.updated")
	ended(3)
	page := decode[api.DeliveryList](t, r.do("GET", one+"/deliveries?status=delivered&limit=2", ""), 200)
	if len(page.Deliveries) != 2 || page.NextCursor == "" || page.Deliveries[0].Seq <= page.Deliveries[1].Seq {
		t.Errorf("deliveries: %+v", page)
	}
	rest := decode[api.DeliveryList](t, r.do("GET", one+"/deliveries?cursor="+page.NextCursor, ""), 200)
	if len(rest.Deliveries) == 0 || rest.Deliveries[0].Seq >= page.Deliveries[1].Seq {
		t.Errorf("and then: %+v", rest)
	}

	ill.Store(true)
	decode[api.Webhook](t, r.do("PATCH", one, `{"description":"fails"}`), 200)
	next(t, got, "webhook.updated")
	until(t, "it is told to fail", func() bool {
		w := decode[api.Webhook](t, r.do("GET", one, ""), 200)
		return w.Status == api.WebhookStatusFailing && w.FailingSince != nil && strings.Contains(w.LastError, "502") && w.Pending == 1
	})
	off := decode[api.Webhook](t, r.do("PATCH", one, `{"enabled":false}`), 200)
	if off.Status != api.WebhookStatusDisabled || off.DisabledReason != "disabled by hand" || off.DisabledAt == nil {
		t.Errorf("disabled it is %+v", off)
	}
	until(t, "nothing waits for it", func() bool { return decode[api.Webhook](t, r.do("GET", one, ""), 200).Pending == 0 })
	refused(t, r.do("POST", one+"/replay", `{"from":1}`), fault.FailedPrecondition)
	if test := decode[api.DeliveryAttempt](t, r.do("POST", one+"/test", ""), 200); test.Status != 204 {
		t.Errorf("a test of a disabled one: %+v", test)
	}
	ill.Store(false)
	on := decode[api.Webhook](t, r.do("PATCH", one, `{"enabled":true,"events":[]}`), 200)
	if on.Status != api.WebhookStatusEnabled || on.FailingSince != nil || len(on.Events) != 0 {
		t.Errorf("enabled it is %+v", on)
	}
	if m = next(t, got, "webhook.enabled"); m.verify(rotated.Secret) != nil {
		t.Errorf("enabled again it gets %s", m.body)
	}
	if a := r.do("DELETE", one, ""); a.status != 204 {
		t.Errorf("delete: %d %s", a.status, a.body)
	}
	for _, path := range []string{one, one + "/deliveries", one + "/deliveries/" + id} {
		refused(t, r.do("GET", path, ""), fault.NotFound)
	}
	refused(t, r.do("DELETE", one, ""), fault.NotFound)
	refused(t, r.do("POST", one+"/test", ""), fault.NotFound)
}

// until polls for what comes by itself.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(deadline); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it does not come about that %s", what)
		}
	}
}

func TestWebhooksThatAreRefused_H2(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for body, says := range map[string]string{
		`{}`: "url", `{"url":"ftp://example.com"}`: "https://", `{"url":"https://u:p@example.com"}`: "password",
		`{"url":"http://10.0.0.1/hook"}`: "--webhook-allow", `{"url":"http://[::1]/hook"}`: "--webhook-allow",
		`{"url":"http://169.254.169.254/latest"}`: "link-local", `{"url":"https://example.com","events":["Sandbox"]}`: "event type",
		`{"url":"https://example.com","secret":"short"}`: "whsec_", `{"url":"https://example.com","description":"a\nb"}`: "description",
		`{"url":"https://example.com","colour":"red"}`: "colour",
	} {
		if d := refused(t, r.do("POST", "/v1/webhooks", body), fault.InvalidArgument); !strings.Contains(d.Message, says) {
			t.Errorf("%s: %q does not say %s", body, d.Message, says)
		}
	}
	made := decode[api.WebhookSecret](t, r.do("POST", "/v1/webhooks", `{"url":"https://example.com"}`, "Idempotency-Key: k"), 201)
	same := decode[api.WebhookSecret](t, r.do("POST", "/v1/webhooks", `{"url":"https://example.com"}`, "Idempotency-Key: k"), 201)
	if same.Webhook.ID != made.Webhook.ID || same.Secret != made.Secret {
		t.Errorf("the repeated call made %+v", same)
	}
	one := "/v1/webhooks/" + made.Webhook.ID
	for body, says := range map[string]string{
		`{}`: "one of", `{"from":1,"since":"2026-01-01"}`: "one of", `{"delivery":"msg_1","to":3}`: "one of", `{"from":0}`: "from",
		`{"since":"soon"}`: "since",
	} {
		if d := refused(t, r.do("POST", one+"/replay", body), fault.InvalidArgument); !strings.Contains(d.Message, says) {
			t.Errorf("replay %s: %q does not say %s", body, d.Message, says)
		}
	}
	refused(t, r.do("POST", one+"/replay", `{"delivery":"msg_none"}`), fault.NotFound)
	refused(t, r.do("POST", one+"/rotate-secret", `{"overlap_seconds":604801}`), fault.InvalidArgument)
	refused(t, r.do("GET", one+"/deliveries?status=lost", ""), fault.InvalidArgument)
	refused(t, r.do("GET", one+"/deliveries?cursor=x", ""), fault.InvalidArgument)
	for i := range 49 {
		decode[api.WebhookSecret](t, r.do("POST", "/v1/webhooks", fmt.Sprintf(`{"url":"https://example.com/%d"}`, i)), 201)
	}
	refused(t, r.do("POST", "/v1/webhooks", `{"url":"https://example.com"}`), fault.QuotaExceeded)
}

// H2: receivers of every kind at once, through the API, the database and the network: none
// holds up another, and each is told as what it is.
func TestReceivers_H2(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var followed atomic.Int32
	target := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { followed.Add(1) }))
	defer target.Close()
	release := make(chan struct{})
	kinds := map[string]http.HandlerFunc{
		"well": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) },
		"failing": func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "out of order", http.StatusInternalServerError)
		},
		"redirects": func(w http.ResponseWriter, req *http.Request) {
			http.Redirect(w, req, target.URL, http.StatusTemporaryRedirect)
		},
		"gone": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusGone) },
		"slow": func(w http.ResponseWriter, req *http.Request) {
			select {
			case <-release:
			case <-req.Context().Done():
			}
		},
		"huge": func(w http.ResponseWriter, req *http.Request) {
			for line := strings.Repeat("x", 1<<16); req.Context().Err() == nil; {
				if _, err := io.WriteString(w, line); err != nil {
					return
				}
			}
		},
	}
	hooks := map[string]string{}
	for kind, handler := range kinds {
		s := httptest.NewServer(handler)
		t.Cleanup(s.Close)
		made := decode[api.WebhookSecret](t, r.do("POST", "/v1/webhooks", fmt.Sprintf(`{"url":%q,"events":["sandbox.ready"]}`, s.URL)), 201)
		hooks[kind] = "/v1/webhooks/" + made.Webhook.ID
	}
	r.create("box")
	get := func(kind string) (api.Webhook, api.Delivery) {
		list := decode[api.DeliveryList](t, r.do("GET", hooks[kind]+"/deliveries", ""), 200)
		if len(list.Deliveries) != 1 {
			return api.Webhook{}, api.Delivery{}
		}
		return decode[api.Webhook](t, r.do("GET", hooks[kind], ""), 200), list.Deliveries[0]
	}
	for _, kind := range []string{"well", "huge"} {
		until(t, kind+" has it", func() bool {
			w, d := get(kind)
			return w.Status == api.WebhookStatusEnabled && d.Status == api.DeliveryStatusDelivered && d.Attempts == 1
		})
	}
	for kind, says := range map[string]string{"failing": "status 500: out of order", "redirects": "never followed"} {
		until(t, kind+" is tried again", func() bool {
			w, d := get(kind)
			return w.Status == api.WebhookStatusFailing && strings.Contains(w.LastError, says) && strings.Contains(d.Error, says) &&
				d.Status == api.DeliveryStatusPending && d.NextAt != nil
		})
	}
	until(t, "who is gone is disabled", func() bool {
		w, d := get("gone")
		return w.Status == api.WebhookStatusDisabled && strings.Contains(w.DisabledReason, "410") && d.Status == api.DeliveryStatusFailed
	})
	until(t, "an event tells of it", func() bool {
		list := decode[api.EventList](t, r.do("GET", "/v1/events?type=webhook.disabled", "", "Accept: application/json"), 200)
		return len(list.Events) == 1 && strings.Contains(string(list.Events[0].Data), strings.TrimPrefix(hooks["gone"], "/v1/webhooks/"))
	})
	if _, d := get("slow"); d.Status != api.DeliveryStatusPending || d.Attempts != 1 {
		t.Errorf("who is slow is at %+v", d)
	}
	close(release)
	until(t, "who is slow has it", func() bool { _, d := get("slow"); return d.Status == api.DeliveryStatusDelivered })
	if n := followed.Load(); n != 0 {
		t.Errorf("a redirect was followed %d times", n)
	}
}

// H2: a name that leads to this machine is refused when it is dialled.
func TestNameThatLeadsInside_H2(t *testing.T) {
	t.Parallel()
	r := newRigWith(t, webhook.Policy{HTTP: true})
	var reached atomic.Int32
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached.Add(1) }))
	defer s.Close()
	port := s.URL[strings.LastIndex(s.URL, ":"):]
	refused(t, r.do("POST", "/v1/webhooks", fmt.Sprintf(`{"url":%q}`, s.URL)), fault.InvalidArgument)
	made := decode[api.WebhookSecret](t, r.do("POST", "/v1/webhooks", fmt.Sprintf(`{"url":"http://localhost%s/"}`, port)), 201)
	a := decode[api.DeliveryAttempt](t, r.do("POST", "/v1/webhooks/"+made.Webhook.ID+"/test", ""), 200)
	if !strings.Contains(a.Error, "not a public one (loopback)") || !strings.Contains(a.Error, "--webhook-allow") || strings.Contains(a.Error, "127.") {
		t.Errorf("the test says %q", a.Error)
	}
	until(t, "its first delivery fails", func() bool {
		return decode[api.Webhook](t, r.do("GET", "/v1/webhooks/"+made.Webhook.ID, ""), 200).Status == api.WebhookStatusFailing
	})
	if n := reached.Load(); n != 0 {
		t.Errorf("it was reached %d times", n)
	}
}
