package webhook

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

// sent is an attempt that reached a receiver, as "sandbox/number".
type sent struct {
	mu   sync.Mutex // guards list and ids
	list []string
	ids  []string
}

func (s *sent) note(c store.ClaimedDelivery) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, fmt.Sprintf("%s %s/%d", c.Webhook.ID, c.Event.Sandbox, c.Event.Seq))
	s.ids = append(s.ids, c.Delivery.ID)
}

// take gives what was sent since the last call.
func (s *sent) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.list
	s.list = nil
	return out
}

func well(at time.Time) result { return result{at: at, status: 204} }

func busy(at time.Time) result {
	return result{at: at, took: time.Since(at), status: 503, err: "busy"}
}

// never answers: the timeout or the end of the server cuts it off.
func never(ctx context.Context, at time.Time) result {
	<-ctx.Done()
	r := result{at: at, took: time.Since(at), err: "no answer"}
	r.cut = context.Cause(ctx) == errClosed
	return r
}

// start starts a deliverer whose receivers are a function.
func start(t *testing.T, s Storage, l Limits, receive func(ctx context.Context, c store.ClaimedDelivery) result) *Deliverer {
	t.Helper()
	d := New(Config{Store: s, Limits: l})
	d.send = receive
	d.Start(t.Context())
	return d
}

func hook(m *memory, id string) store.Webhook {
	w := store.Webhook{ID: id, Project: "prj_1", URL: "https://" + id + ".example.com/", Secrets: []store.WebhookSecret{{Value: NewSecret()}}}
	m.put(w)
	return w
}

func happen(m *memory, sandbox string) store.Event {
	return m.add(store.Event{Project: "prj_1", Sandbox: sandbox, Type: "sandbox.ready", Actor: "host", At: time.Now()})
}

func (m *memory) statuses() string {
	var out []string
	for _, d := range m.all() {
		out = append(out, string(d.Status))
	}
	return strings.Join(out, " ")
}

func expect(t *testing.T, what string, got, want []string) {
	t.Helper()
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

// A receiver that fails for one sandbox holds up that sandbox only, for 3 days; then the
// delivery is marked and the next one goes.
func TestOrderPerSandbox_H2(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, log := newMemory(), &sent{}
		hook(m, "wh_1")
		d := start(t, m, Limits{}, func(_ context.Context, c store.ClaimedDelivery) result {
			log.note(c)
			if c.Event.Seq == 1 {
				return busy(time.Now())
			}
			return well(time.Now())
		})
		defer d.Close()
		for _, sandbox := range []string{"sbx_1", "sbx_1", "sbx_2", "", "sbx_2", ""} {
			happen(m, sandbox)
		}
		synctest.Wait()
		expect(t, "at once", log.take(), []string{"wh_1 sbx_1/1", "wh_1 sbx_2/3", "wh_1 /4", "wh_1 sbx_2/5", "wh_1 /6"})
		time.Sleep(72*time.Hour - time.Second)
		synctest.Wait()
		again := log.take()
		if len(again) < 17 || slices.ContainsFunc(again, func(s string) bool { return s != "wh_1 sbx_1/1" }) {
			t.Errorf("within 3 days: %q", again)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		expect(t, "after 3 days", log.take(), []string{"wh_1 sbx_1/1", "wh_1 sbx_1/2"})
		if got := m.statuses(); got != "failed delivered delivered delivered delivered delivered" {
			t.Error(got)
		}
		first := m.all()[0]
		if n := len(m.log(first.ID)); n != first.Attempts || first.Error != "busy" || slices.ContainsFunc(log.ids, func(id string) bool { return id == "" }) {
			t.Errorf("%d lines in the log of %+v", n, first)
		}
	})
}

// Receivers that never answer take their own places only.
func TestSlowReceivers_H2(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newMemory()
		const slow = 20
		for i := range slow {
			hook(m, fmt.Sprint("wh_slow_", i))
		}
		var mu sync.Mutex
		running, most := map[string]int{}, map[string]int{}
		d := start(t, m, Limits{}, func(ctx context.Context, c store.ClaimedDelivery) result {
			if c.Webhook.ID == "wh_well" {
				return well(time.Now())
			}
			mu.Lock()
			running[c.Webhook.ID]++
			most[c.Webhook.ID] = max(most[c.Webhook.ID], running[c.Webhook.ID])
			mu.Unlock()
			defer func() {
				mu.Lock()
				running[c.Webhook.ID]--
				mu.Unlock()
			}()
			return never(ctx, time.Now())
		})
		defer d.Close()
		for i := range 50 {
			happen(m, fmt.Sprint("sbx_", i))
		}
		synctest.Wait() // the slow ones hold all that they can get
		hook(m, "wh_well")
		for i := range 50 {
			happen(m, fmt.Sprint("sbx_", i))
		}
		before := time.Now()
		synctest.Wait()
		if took := time.Since(before); took != 0 {
			t.Fatalf("time went on by %v", took)
		}
		delivered := 0
		for _, d := range m.all() {
			if d.Webhook == "wh_well" && d.Status == store.DeliveryDelivered {
				delivered++
			}
		}
		if delivered != 50 {
			t.Errorf("%d of 50 deliveries to the receiver that is well", delivered)
		}
		for id, n := range most {
			if n > DefaultLimits.PerWebhook {
				t.Errorf("%s had %d attempts at once", id, n)
			}
		}
		if len(most) != slow {
			t.Errorf("%d of %d slow receivers have places", len(most), slow)
		}
		// After some timeouts a receiver that only fails has one place.
		time.Sleep(10 * time.Minute)
		mu.Lock()
		clear(most)
		mu.Unlock()
		time.Sleep(10 * time.Minute)
		mu.Lock()
		for id, n := range most {
			if n > 1 {
				t.Errorf("%s, which always fails, had %d attempts at once", id, n)
			}
		}
		if len(most) == 0 {
			t.Error("nothing was tried")
		}
		mu.Unlock()
	})
}

func TestGone_H2(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, log := newMemory(), &sent{}
		hook(m, "wh_1")
		d := start(t, m, Limits{}, func(_ context.Context, c store.ClaimedDelivery) result {
			log.note(c)
			return result{at: time.Now(), status: http.StatusGone, err: "gone"}
		})
		defer d.Close()
		happen(m, "sbx_1")
		happen(m, "sbx_1")
		synctest.Wait()
		expect(t, "sent", log.take(), []string{"wh_1 sbx_1/1"})
		w, _ := m.Webhook(t.Context(), "wh_1")
		if w.DisabledAt.IsZero() || !strings.Contains(w.DisabledReason, "410") {
			t.Errorf("%+v", w)
		}
		if e := m.events[2]; e.Type != "webhook.disabled" || e.Project != "prj_1" || !strings.Contains(string(e.Data), `"webhook_id":"wh_1"`) || !strings.HasPrefix(e.ID, "ev_") {
			t.Errorf("the event that tells of it: %+v", e)
		}
		if all := m.all(); m.statuses() != "failed failed" || !strings.Contains(all[1].Error, "disabled") || len(m.log(all[1].ID)) != 0 {
			t.Errorf("%+v", all)
		}
		happen(m, "sbx_1")
		synctest.Wait()
		if got := m.all(); len(got) != 2 {
			t.Errorf("a disabled webhook has a new delivery: %+v", got)
		}
		if _, err := d.Replay(t.Context(), w, 1, 4); !fault.Is(err, fault.FailedPrecondition) {
			t.Errorf("a replay to it: %v", err)
		}
		// Enabled again it goes on with what is new; what it missed can be replayed.
		w.DisabledAt = time.Time{}
		m.put(w)
		happen(m, "sbx_2")
		synctest.Wait()
		expect(t, "enabled again", log.take(), []string{"wh_1 sbx_2/5"})
	})
}

// A receiver that fails on everything is disabled after 5 days, and no more is kept for it
// than the backlog holds; the other webhooks of its project hear of that.
func TestGivenUp_H2(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, log := newMemory(), &sent{}
		hook(m, "wh_1")
		d := start(t, m, Limits{Poll: time.Hour, Tend: time.Hour}, func(_ context.Context, c store.ClaimedDelivery) result {
			log.note(c)
			return busy(time.Now())
		})
		defer d.Close()
		for day := range 7 {
			happen(m, fmt.Sprint("sbx_", day))
			time.Sleep(24 * time.Hour)
			synctest.Wait()
			w, _ := m.Webhook(t.Context(), "wh_1")
			if w.FailingSince.IsZero() || w.FailingError != "busy" {
				t.Errorf("on day %d: %+v", day, w)
			}
			if disabled := !w.DisabledAt.IsZero(); day != 4 && disabled != (day > 4) {
				t.Errorf("on day %d it is disabled: %v", day, disabled)
			}
		}
		log.take()
		time.Sleep(10 * 24 * time.Hour)
		if got := log.take(); len(got) != 0 {
			t.Errorf("disabled it is sent %q", got)
		}
		if got := m.statuses(); strings.Contains(got, "pending") {
			t.Errorf("what waited for it: %s", got)
		}
	})
}

func TestBacklog_H2(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, log := newMemory(), &sent{}
		hook(m, "wh_1")
		hook(m, "wh_2")
		d := start(t, m, Limits{Backlog: 20}, func(_ context.Context, c store.ClaimedDelivery) result {
			if c.Webhook.ID == "wh_1" {
				return busy(time.Now())
			}
			log.note(c)
			return well(time.Now())
		})
		defer d.Close()
		for range 20 {
			happen(m, "sbx_1")
		}
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		if w, _ := m.Webhook(t.Context(), "wh_1"); !w.DisabledAt.IsZero() {
			t.Errorf("with 20 of 20: %+v", w)
		}
		happen(m, "sbx_2")
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		if w, _ := m.Webhook(t.Context(), "wh_1"); w.DisabledAt.IsZero() || !strings.Contains(w.DisabledReason, "more than 20 deliveries wait") {
			t.Errorf("with 21: %+v", w)
		}
		got := log.take()
		if len(got) != 22 || got[21] != "wh_2 /22" || m.events[21].Type != "webhook.disabled" {
			t.Errorf("the other one was sent %q, and the event is %+v", got, m.events[len(m.events)-1])
		}
	})
}

// What nobody wants costs no write, and is not gone through again and again.
func TestUnwanted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, log := newMemory(), &sent{}
		receive := func(_ context.Context, c store.ClaimedDelivery) result { log.note(c); return well(time.Now()) }
		d := start(t, m, Limits{}, receive)
		for range 5 {
			happen(m, "sbx_1")
			time.Sleep(time.Second)
		}
		synctest.Wait()
		if m.cursor != 0 {
			t.Errorf("the cursor is at %d at once", m.cursor)
		}
		time.Sleep(2 * time.Minute)
		if m.cursor != 5 {
			t.Errorf("the cursor is at %d after minutes", m.cursor)
		}
		w := store.Webhook{ID: "wh_1", Project: "prj_1", Types: []string{"key.*"}, After: 5, Secrets: []store.WebhookSecret{{Value: NewSecret()}}}
		m.put(w)
		happen(m, "sbx_1")
		m.add(store.Event{Project: "prj_1", Type: "key.created", At: time.Now()})
		happen(m, "sbx_1")
		synctest.Wait()
		happen(m, "sbx_1")
		synctest.Wait()
		d.Close() // with 9 passed and the cursor at 8
		if m.cursor != 8 {
			t.Errorf("the cursor is at %d", m.cursor)
		}
		d = start(t, m, Limits{}, receive)
		defer d.Close()
		m.add(store.Event{Project: "prj_1", Type: "key.deleted", At: time.Now()})
		synctest.Wait()
		expect(t, "sent", log.take(), []string{"wh_1 /7", "wh_1 /10"})
	})
}

// A test is sent at once, signed, also where the webhook is disabled, and nothing is kept.
func TestTest_H2(t *testing.T) {
	t.Parallel()
	m := newMemory()
	var got store.ClaimedDelivery
	d := New(Config{Store: m})
	d.send = func(_ context.Context, c store.ClaimedDelivery) result { got = c; return busy(time.Now()) }
	w := hook(m, "wh_1")
	w.DisabledAt = time.Now()
	a := d.Test(t.Context(), w)
	if a.Status != 503 || a.Error != "busy" || a.Number != 1 || got.Event.Type != "webhook.test" || string(got.Event.Data) != `{"webhook_id":"wh_1"}` ||
		got.Webhook.ID != "wh_1" || !strings.HasPrefix(got.Delivery.ID, "msg_") {
		t.Errorf("%+v of %+v", a, got)
	}
	if len(m.all()) != 0 || len(m.events) != 0 {
		t.Errorf("it left %+v, %+v", m.all(), m.events)
	}
}

func TestReplay_H2(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, log := newMemory(), &sent{}
		broken := false
		for range 3 {
			happen(m, "sbx_1")
		}
		m.add(store.Event{Project: "prj_2", Sandbox: "sbx_9", Type: "sandbox.ready", At: time.Now()})
		m.add(store.Event{Project: "prj_1", Type: "key.created", At: time.Now()})
		w := store.Webhook{ID: "wh_1", Project: "prj_1", Types: []string{"sandbox.*"}, After: 2}
		m.put(w)
		d := start(t, m, Limits{Failing: 1000 * time.Hour}, func(_ context.Context, c store.ClaimedDelivery) result {
			log.note(c)
			if broken && c.Event.Seq < 6 {
				return busy(time.Now())
			}
			return well(time.Now())
		})
		defer d.Close()
		synctest.Wait()
		expect(t, "by itself", log.take(), []string{"wh_1 sbx_1/3"})
		id := m.all()[0].ID

		// A range, with what it never had, in order.
		n, err := d.Replay(t.Context(), w, 1, 100)
		synctest.Wait()
		if got := log.take(); n != 3 || err != nil || !slices.Equal(got, []string{"wh_1 sbx_1/1", "wh_1 sbx_1/2", "wh_1 sbx_1/3"}) {
			t.Errorf("%d, %v: %q", n, err, got)
		}
		if all := m.all(); len(all) != 3 || all[2].ID != id || all[2].Attempts != 2 || len(m.log(id)) != 2 {
			t.Errorf("%+v", all)
		}

		// One of them, to a receiver that fails: what happens meanwhile is not held up.
		broken = true
		if err := d.ReplayOne(t.Context(), w, id); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		happen(m, "sbx_1")
		synctest.Wait()
		if got := log.take(); !slices.Equal(got, []string{"wh_1 sbx_1/3", "wh_1 sbx_1/6"}) {
			t.Errorf("%q", got)
		}
		// Again while it waits: at once, and with the 3 days from now.
		time.Sleep(71 * time.Hour)
		synctest.Wait()
		log.take()
		if err := d.ReplayOne(t.Context(), w, id); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		expect(t, "pending and replayed", log.take(), []string{"wh_1 sbx_1/3"})
		time.Sleep(70 * time.Hour)
		if got, _ := m.Delivery(t.Context(), id); got.Status != store.DeliveryPending {
			t.Errorf("%+v", got)
		}
		time.Sleep(3 * time.Hour)
		if got, _ := m.Delivery(t.Context(), id); got.Status != store.DeliveryFailed {
			t.Errorf("%+v", got)
		}
		broken = false
		if err := d.ReplayOne(t.Context(), w, id); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got, _ := m.Delivery(t.Context(), id); got.Status != store.DeliveryDelivered {
			t.Errorf("%+v", got)
		}

		for what, bad := range map[string][2]int64{"from 0": {0, 1}, "backwards": {2, 1}} {
			if _, err := d.Replay(t.Context(), w, bad[0], bad[1]); !fault.Is(err, fault.InvalidArgument) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if err := d.ReplayOne(t.Context(), w, "msg_none"); !fault.Is(err, fault.NotFound) {
			t.Errorf("one that is not there: %v", err)
		}
		if err := d.ReplayOne(t.Context(), hook(m, "wh_2"), id); !fault.Is(err, fault.NotFound) {
			t.Errorf("another webhook's: %v", err)
		}
		m.prune(3)
		if err := d.ReplayOne(t.Context(), w, id); fault.Of(err) == nil || fault.Of(err).Reason != store.ReasonPruned {
			t.Errorf("of an event that is gone: %v", err)
		}
		if _, err := d.Replay(t.Context(), w, 2, 3); fault.Of(err) == nil || fault.Of(err).Reason != store.ReasonPruned {
			t.Errorf("of a range that is gone: %v", err)
		}
	})
}

// A server that stops cuts off what has no answer, and the next one repeats it at once
// under the same id.
func TestStopAndGoOn_H2(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, log := newMemory(), &sent{}
		hook(m, "wh_1")
		first := start(t, m, Limits{}, func(ctx context.Context, c store.ClaimedDelivery) result {
			log.note(c)
			return never(ctx, time.Now())
		})
		happen(m, "sbx_1")
		synctest.Wait()
		before := time.Now()
		first.Close()
		first.Close()
		second := start(t, m, Limits{}, func(_ context.Context, c store.ClaimedDelivery) result {
			log.note(c)
			return well(time.Now())
		})
		defer second.Close()
		synctest.Wait()
		if len(log.ids) != 2 || log.ids[0] != log.ids[1] || m.statuses() != "delivered" || time.Since(before) != 0 {
			t.Errorf("%q, %s after %v", log.ids, m.statuses(), time.Since(before))
		}
	})
}

// stubborn is a store that does not answer well all the time.
type stubborn struct {
	*memory
	claims  time.Duration // how long a claim takes
	refuses time.Time     // settlements until then
}

func (s *stubborn) ClaimDeliveries(ctx context.Context, c store.DeliveryClaim) ([]store.ClaimedDelivery, error) {
	out, err := s.memory.ClaimDeliveries(ctx, c)
	time.Sleep(s.claims)
	return out, err
}

func (s *stubborn) SettleDelivery(ctx context.Context, d store.DeliverySettlement) error {
	if time.Now().Before(s.refuses) {
		return fault.New(fault.Unavailable, "not now")
	}
	return s.memory.SettleDelivery(ctx, d)
}

// A server that stood still until its lease was nearly over sends nothing under it.
func TestLeaseNearlyOver_H2(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, log := &stubborn{memory: newMemory(), claims: 50 * time.Second}, &sent{}
		hook(m.memory, "wh_1")
		d := start(t, m, Limits{}, func(_ context.Context, c store.ClaimedDelivery) result {
			log.note(c)
			return well(time.Now())
		})
		defer d.Close()
		happen(m.memory, "sbx_1")
		time.Sleep(5 * time.Minute)
		if got := log.take(); len(got) != 0 || m.statuses() != "pending" {
			t.Errorf("%q, %s", got, m.statuses())
		}
		m.claims = 0
		time.Sleep(5 * time.Minute)
		if got := log.take(); len(got) != 1 || m.statuses() != "delivered" {
			t.Errorf("%q, %s", got, m.statuses())
		}
	})
}

// What came of an attempt is written as soon as the store takes it, without a second
// attempt as long as the lease holds.
func TestStoreAway(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, log := &stubborn{memory: newMemory(), refuses: time.Now().Add(40 * time.Second)}, &sent{}
		hook(m.memory, "wh_1")
		d := start(t, m, Limits{}, func(_ context.Context, c store.ClaimedDelivery) result {
			log.note(c)
			return well(time.Now())
		})
		defer d.Close()
		happen(m.memory, "sbx_1")
		time.Sleep(50 * time.Second)
		if got := log.take(); len(got) != 1 || m.statuses() != "delivered" {
			t.Errorf("%q, %s", got, m.statuses())
		}
		m.refuses = time.Now().Add(90 * time.Second)
		happen(m.memory, "sbx_1")
		time.Sleep(5 * time.Minute)
		if got := log.take(); len(got) != 2 || m.statuses() != "delivered delivered" {
			t.Errorf("away for longer than the lease: %q, %s", got, m.statuses())
		}
	})
}

func TestPruned(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, log := newMemory(), &sent{}
		hook(m, "wh_1")
		receive := func(_ context.Context, c store.ClaimedDelivery) result {
			log.note(c)
			return busy(time.Now())
		}
		d := start(t, m, Limits{}, receive)
		happen(m, "sbx_1")
		synctest.Wait()
		d.Close()
		for range 3 {
			happen(m, "sbx_2")
		}
		m.prune(3) // while no server ran: the pending one's event, and two of which no delivery was made
		d = start(t, m, Limits{}, receive)
		defer d.Close()
		time.Sleep(time.Minute)
		if all := m.all(); len(all) != 2 || all[0].Error != "the event is no longer kept" || all[0].Status != store.DeliveryFailed || all[1].Seq != 4 {
			t.Errorf("%+v", all)
		}
	})
}

// signalled tells of each settlement.
type signalled struct {
	*memory
	settled chan store.DeliverySettlement
}

func (s *signalled) SettleDelivery(ctx context.Context, d store.DeliverySettlement) error {
	err := s.memory.SettleDelivery(ctx, d)
	s.settled <- d
	return err
}

// Real receivers at once, through all the parts: one that is silent, one that fails and
// then is well, one that is well, and one that redirects to it.
func TestReceiversTogether_H2(t *testing.T) {
	t.Parallel()
	m := &signalled{memory: newMemory(), settled: make(chan store.DeliverySettlement, 1000)}
	var mu sync.Mutex
	calls := map[string][]string{} // receiver: the ids it was sent
	serve := func(name string, answer func(n int, w http.ResponseWriter, r *http.Request)) {
		s := receiver(t, func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			calls[name] = append(calls[name], r.Header.Get("Webhook-Id"))
			n := len(calls[name])
			mu.Unlock()
			answer(n, w, r)
		})
		m.put(store.Webhook{ID: name, Project: "prj_1", URL: s.URL, Secrets: []store.WebhookSecret{{Value: NewSecret()}}})
	}
	serve("silent", func(_ int, _ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	serve("recovers", func(n int, w http.ResponseWriter, r *http.Request) {
		switch n {
		case 1:
			w.WriteHeader(503)
		case 2:
			reset(w, r)
		}
	})
	serve("well", func(_ int, w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	well, _ := m.Webhook(t.Context(), "well")
	serve("redirects", func(_ int, w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, well.URL, http.StatusTemporaryRedirect)
	})
	d := New(Config{Store: m, Policy: loopback, Limits: Limits{
		Timeout: 5 * time.Second, Window: time.Millisecond, MinTries: 4, Waits: []time.Duration{time.Millisecond},
	}})
	const events = 6
	for range events {
		happen(m.memory, "sbx_1")
	}
	d.Start(t.Context())
	t.Cleanup(d.Close)
	ended, silent := map[string]int{}, false
	for deadline := time.After(patience); ended["recovers"] < events || ended["well"] < events || ended["redirects"] < events || !silent; {
		select {
		case s := <-m.settled:
			one, err := m.Delivery(t.Context(), s.ID)
			if err != nil {
				t.Fatal(err)
			}
			silent = silent || one.Webhook == "silent"
			if s.Status != store.DeliveryPending {
				ended[one.Webhook]++
			}
		case <-deadline:
			t.Fatalf("ended: %v", ended)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	for _, one := range m.all() {
		log := m.log(one.ID)
		switch {
		case one.Webhook == "well" && (one.Status != store.DeliveryDelivered || len(log) != 1 || log[0].Status != 200),
			one.Webhook == "recovers" && (one.Status != store.DeliveryDelivered || one.Seq == 1 && (len(log) != 3 || log[0].Status != 503 || log[1].Status != 0 || log[1].Error == "")),
			one.Webhook == "redirects" && (one.Status != store.DeliveryFailed || len(log) != 4 || log[0].Status != 307),
			one.Webhook == "silent" && one.Seq == 1 && log[0].Error != "the receiver did not answer in time",
			one.Webhook == "silent" && one.Seq > 1 && len(log) > 0:
			t.Errorf("%+v: %+v", one, log)
		}
		if one.Webhook == "well" && calls["well"][one.Seq-1] != one.ID {
			t.Errorf("message %d of the receiver that is well has the id %s, want %s", one.Seq, calls["well"][one.Seq-1], one.ID)
		}
	}
	if got := calls["recovers"]; len(got) != events+2 || got[0] != got[1] || got[1] != got[2] || got[2] == got[3] {
		t.Errorf("the one that recovers was sent %q", got)
	}
	if len(calls["well"]) != events {
		t.Errorf("the one that is well was sent %d messages: a redirect was followed, or one was doubled", len(calls["well"]))
	}
}
