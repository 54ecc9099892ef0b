package webhook

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/hutchrun/hutch/internal/store"
)

// A receiver that never answers well is tried for exactly the window, at the pace of the
// schedule, whatever chance says.
func TestWindow_H2(t *testing.T) {
	t.Parallel()
	for _, chance := range []float64{0, 0.5, 0.999} {
		l := Limits{}.withDefaults()
		made := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
		c := store.ClaimedDelivery{Delivery: store.Delivery{ID: "msg_1", Since: made}}
		at, last := made, made
		for {
			c.Delivery.Attempts++
			c.Delivery.Tries++
			s := l.settle(c, result{at: at, status: 500, err: "busy"}, chance)
			if s.ID != "msg_1" || s.Error != "busy" || s.Attempt.Number != c.Delivery.Attempts || s.Disable != nil {
				t.Fatalf("%+v", s)
			}
			if s.Status == store.DeliveryFailed {
				break
			}
			if s.Status != store.DeliveryPending || !s.NextAt.After(at) {
				t.Fatalf("after try %d at %v: %+v", c.Delivery.Tries, at, s)
			}
			if gap := s.NextAt.Sub(at); gap > time.Duration(float64(6*time.Hour)*1.2) {
				t.Fatalf("try %d waits for %v", c.Delivery.Tries, gap)
			}
			last, at = at, s.NextAt
		}
		if got := at.Sub(made); got != 72*time.Hour {
			t.Errorf("the last try is after %v", got)
		}
		if n := c.Delivery.Tries; n < 18 || n > 26 || last.Equal(made) {
			t.Errorf("with chance %v there are %d tries", chance, n)
		}
	}
}

func TestSettle_H2(t *testing.T) {
	t.Parallel()
	l := Limits{}.withDefaults()
	made := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		name   string
		after  time.Duration // since it was made
		tries  int
		r      result
		status store.DeliveryStatus
		next   time.Duration // after the attempt
	}{
		{"well", 0, 1, result{status: 204}, store.DeliveryDelivered, 0},
		{"well, late", 100 * time.Hour, 9, result{status: 200}, store.DeliveryDelivered, 0},
		{"the first fails", 0, 1, result{err: "reset"}, store.DeliveryPending, 5 * time.Second},
		{"the third fails", time.Hour, 3, result{status: 500, err: "busy"}, store.DeliveryPending, 2 * time.Minute},
		{"the last of the schedule repeats", time.Hour, 40, result{status: 500, err: "busy"}, store.DeliveryPending, 6 * time.Hour},
		{"asked to wait", 0, 1, result{status: 429, err: "slow down", retryAfter: time.Minute}, store.DeliveryPending, time.Minute},
		{"asked for less", time.Hour, 3, result{status: 503, err: "busy", retryAfter: time.Second}, store.DeliveryPending, 2 * time.Minute},
		{"asked for a year", 0, 1, result{status: 503, err: "busy", retryAfter: 8760 * time.Hour}, store.DeliveryPending, 6 * time.Hour},
		{"the last try is at the end", 71 * time.Hour, 20, result{err: "reset"}, store.DeliveryPending, time.Hour},
		{"the end", 72 * time.Hour, 20, result{err: "reset"}, store.DeliveryFailed, 0},
		{"waited too long behind another", 100 * time.Hour, 1, result{err: "reset"}, store.DeliveryPending, 5 * time.Second},
		{"and then fails", 100 * time.Hour, 3, result{err: "reset"}, store.DeliveryFailed, 0},
		{"gone", 0, 1, result{status: 410, err: "gone"}, store.DeliveryFailed, 0},
		{"cut off", time.Hour, 9, result{err: "stopped", cut: true}, store.DeliveryPending, 0},
		{"cut off at the end", 100 * time.Hour, 9, result{err: "stopped", cut: true}, store.DeliveryPending, 0},
	} {
		c.r.at, c.r.took = made.Add(c.after-time.Second), time.Second
		s := l.settle(store.ClaimedDelivery{Delivery: store.Delivery{Since: made, Tries: c.tries}}, c.r, 0.5)
		now := made.Add(c.after)
		if s.Status != c.status || !s.At.Equal(now) || s.Status == store.DeliveryPending && !s.NextAt.Equal(now.Add(c.next)) {
			t.Errorf("%s: %s, next in %v", c.name, s.Status, s.NextAt.Sub(now))
		}
		if (s.Disable != nil) != (c.r.status == 410) {
			t.Errorf("%s: disabled for %+v", c.name, s.Disable)
		}
		if want := map[bool]int{true: -1, false: 1}[c.r.err != ""]; !c.r.cut && s.Health != want || c.r.cut && s.Health != 0 {
			t.Errorf("%s: the receiver's health is %d", c.name, s.Health)
		}
		if a := s.Attempt; a.Took != time.Second || a.Status != c.r.status || a.Error != c.r.err || !a.At.Equal(c.r.at) {
			t.Errorf("%s: the log has %+v", c.name, a)
		}
	}
}

// A receiver that took nothing for 5 days is given up as a whole, unless it had nothing to
// fail on: then it has its least number of tries first.
func TestHopeless_H2(t *testing.T) {
	t.Parallel()
	l := Limits{}.withDefaults()
	since := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		name  string
		since time.Time
		after time.Duration
		tries int
		r     result
		want  bool
	}{
		{"not failing before", time.Time{}, 0, 9, result{err: "reset"}, false},
		{"almost", since, 5*24*time.Hour - time.Second, 9, result{err: "reset"}, false},
		{"for 5 days", since, 5 * 24 * time.Hour, 9, result{status: 500, err: "busy"}, true},
		{"after a quiet month, the first", since, 30 * 24 * time.Hour, 1, result{err: "reset"}, false},
		{"and the third", since, 30 * 24 * time.Hour, 3, result{err: "reset"}, true},
		{"well again", since, 30 * 24 * time.Hour, 3, result{status: 200}, false},
		{"cut off", since, 30 * 24 * time.Hour, 3, result{err: "stopped", cut: true}, false},
	} {
		c.r.at = since.Add(c.after)
		s := l.settle(store.ClaimedDelivery{
			Delivery: store.Delivery{Since: c.r.at, Tries: c.tries}, Webhook: store.Webhook{FailingSince: c.since},
		}, c.r, 0.5)
		if (s.Disable != nil) != c.want {
			t.Errorf("%s: %+v", c.name, s.Disable)
		}
		if d := s.Disable; d != nil && (!d.Failing.Equal(since) || !strings.Contains(d.Reason, "nothing was delivered since 2026-03-01T12:00:00Z") || !strings.HasSuffix(d.Reason, c.r.err)) {
			t.Errorf("%s: %+v", c.name, d)
		}
	}
}

func TestWait(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := Limits{}.withDefaults()
		tries, chance := rapid.IntRange(0, 1000).Draw(t, "tries"), rapid.Float64Range(0, 0.9999).Draw(t, "chance")
		asked := time.Duration(rapid.Int64Min(0).Draw(t, "asked"))
		got := l.wait(tries, asked, chance)
		plain := l.Waits[min(max(tries, 1), len(l.Waits))-1]
		low, high := time.Duration(0.79*float64(plain)), time.Duration(1.21*float64(plain))
		if asked < low && (got < low || got > high) || got < min(asked, 6*time.Hour) || got > max(high, 6*time.Hour) {
			t.Fatalf("%v", got)
		}
	})
}

// However slow or broken receivers are, the next one finds a place, as long as there are
// fewer of them than a quarter of all places.
func TestShare(t *testing.T) {
	t.Parallel()
	l := Limits{}.withDefaults()
	if got := l.share(0, l.Total); got != l.PerWebhook {
		t.Errorf("a receiver that is well and alone has %d places", got)
	}
	if got := l.share(100, l.Total); got != 1 {
		t.Errorf("one that always fails has %d", got)
	}
	if got := l.share(3, l.Total); got != l.PerWebhook {
		t.Errorf("one that failed thrice has %d", got)
	}
	free := l.Total
	for n := range l.Total / 4 {
		take := l.share(0, free)
		if take < 1 || free < take {
			t.Fatalf("receiver %d has %d of %d", n, take, free)
		}
		free -= take
	}
	if free == 0 {
		t.Error("nothing is left")
	}
}

func TestDeliveries(t *testing.T) {
	t.Parallel()
	now := time.Now()
	hooks := []store.Webhook{
		{ID: "wh_all", Project: "prj_1"}, {ID: "wh_late", Project: "prj_1", After: 2},
		{ID: "wh_some", Project: "prj_1", Types: []string{"key.*"}}, {ID: "wh_other", Project: "prj_2"},
	}
	events := []store.Event{
		{Seq: 2, Project: "prj_1", Sandbox: "sbx_1", Type: "sandbox.ready"}, {Seq: 3, Project: "prj_1", Type: "key.created"},
		{Seq: 4, Project: "prj_1", Type: "key.deleted"}, {Seq: 5, Project: "prj_3", Type: "key.created"},
	}
	var got []string
	lanes := map[string]bool{}
	for _, d := range deliveries(hooks, events, now) {
		got = append(got, d.Webhook+" "+d.Type)
		lanes[d.Webhook+d.Lane] = true
		if d.Status != store.DeliveryPending || !d.NextAt.Equal(now) || !d.Since.Equal(now) || d.Lane == "" || d.ID == "" || d.Project != "prj_1" {
			t.Errorf("%+v", d)
		}
	}
	want := []string{
		"wh_all sandbox.ready", "wh_all key.created", "wh_late key.created", "wh_some key.created",
		"wh_all key.deleted", "wh_late key.deleted", "wh_some key.deleted",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if len(lanes) != len(want) {
		t.Errorf("events of no sandbox share a lane: %v", lanes)
	}
}

func TestClip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		got := clip(string(rapid.SliceOf(rapid.Byte()).Draw(t, "text")))
		if len(got) > maxErrorText || strings.ContainsAny(got, "\n\r\t\x00\x1b\u202e") || clip(got) != got {
			t.Fatalf("%q", got)
		}
	})
	if got := clip(strings.Repeat("ä", 1000)); len(got) > maxErrorText || !strings.HasSuffix(got, "ä…") {
		t.Errorf("%q", got)
	}
}

func TestRetryAfter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for header, want := range map[string]time.Duration{
		"": 0, "7": 7 * time.Second, "-7": 0, "soon": 0, "99999999999999999999": 0, "4294967295": 4294967295 * time.Second,
		"Sun, 01 Mar 2026 12:01:00 GMT": time.Minute, "Sun, 01 Mar 2026 11:00:00 GMT": 0,
	} {
		if got := retryAfter(header, now); got != want {
			t.Errorf("%q is %v, want %v", header, got, want)
		}
	}
}

func TestDescribeUnknown(t *testing.T) {
	t.Parallel()
	if got := describe(errors.New("odd")); got != "the request failed: odd" {
		t.Error(got)
	}
}
