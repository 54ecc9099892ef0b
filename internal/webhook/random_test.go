package webhook

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

// world is one history: servers that come and die around one store, and receivers whose
// mood changes.
type world struct {
	*testing.T
	*memory

	mu       sync.Mutex // guards all below
	dice     *rand.Rand
	mood     map[string]string   // by webhook
	running  map[string]bool     // by delivery
	reached  map[string]int64    // by lane: the number of the last attempt
	accepted map[string]bool     // by delivery
	ids      map[string]string   // by webhook and number
	at       map[*server]*counts // attempts that run
	repeats  int                 // of what had been accepted
}

type counts struct {
	all     int
	webhook map[string]int
}

var moods = []string{"well", "well", "well", "moody", "moody", "broken", "silent"}

// historyLimits shorten the days to hours, so that a history is over soon.
var historyLimits = Limits{
	Window: 3 * time.Hour, Poll: 5 * time.Minute, PerWebhook: 3, Total: 5,
	Waits: []time.Duration{5 * time.Second, time.Minute, 10 * time.Minute, 30 * time.Minute},
}

// server is a Storage as one server sees it: calls fail before or after they did
// something, and all of them once the server is dead.
type server struct {
	*memory
	w    *world
	dead bool // guarded by w.mu
	d    *Deliverer
}

func (s *server) lost() bool {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	return s.dead || s.w.dice.IntN(40) == 0
}

var errLost = fault.New(fault.Unavailable, "the database does not answer")

// calls makes a call of which the request or the answer may be lost.
func calls[T any](s *server, call func() (T, error)) (T, error) {
	var none T
	if s.lost() {
		return none, errLost
	}
	out, err := call()
	if s.lost() {
		return none, errLost
	}
	return out, err
}

func (s *server) Events(ctx context.Context, f store.EventFilter) ([]store.Event, error) {
	return calls(s, func() ([]store.Event, error) { return s.memory.Events(ctx, f) })
}

func (s *server) WebhookCursor(ctx context.Context) (int64, error) {
	return calls(s, func() (int64, error) { return s.memory.WebhookCursor(ctx) })
}

func (s *server) LastEvent(ctx context.Context) (int64, error) {
	return calls(s, func() (int64, error) { return s.memory.LastEvent(ctx) })
}

func (s *server) EnabledWebhooks(ctx context.Context) ([]store.Webhook, error) {
	return calls(s, func() ([]store.Webhook, error) { return s.memory.EnabledWebhooks(ctx) })
}

func (s *server) AddDeliveries(ctx context.Context, from, to int64, d []store.Delivery) error {
	_, err := calls(s, func() (struct{}, error) { return struct{}{}, s.memory.AddDeliveries(ctx, from, to, d) })
	return err
}

func (s *server) DueWebhooks(ctx context.Context, now time.Time, without []string, limit int) (store.DueWebhooks, error) {
	return calls(s, func() (store.DueWebhooks, error) { return s.memory.DueWebhooks(ctx, now, without, limit) })
}

func (s *server) ClaimDeliveries(ctx context.Context, c store.DeliveryClaim) ([]store.ClaimedDelivery, error) {
	return calls(s, func() ([]store.ClaimedDelivery, error) { return s.memory.ClaimDeliveries(ctx, c) })
}

func (s *server) SettleDelivery(ctx context.Context, d store.DeliverySettlement) error {
	_, err := calls(s, func() (struct{}, error) { return struct{}{}, s.memory.SettleDelivery(ctx, d) })
	return err
}

func (w *world) boot() *server {
	s := &server{memory: w.memory, w: w}
	w.mu.Lock()
	w.at[s] = &counts{webhook: map[string]int{}}
	w.mu.Unlock()
	s.d = start(w.T, s, historyLimits, func(ctx context.Context, c store.ClaimedDelivery) result { return w.receive(ctx, s, c) })
	return s
}

// end ends a server in order, or as a crash does: nothing is written any more.
func (w *world) end(s *server, crash bool) {
	w.mu.Lock()
	s.dead = crash
	w.mu.Unlock()
	s.d.Close()
}

// receive is an attempt, with what must hold while it runs.
func (w *world) receive(ctx context.Context, s *server, c store.ClaimedDelivery) result {
	r, d := result{at: time.Now()}, c.Delivery
	w.arrive(s, c)
	w.mu.Lock()
	mood, takes, code := w.mood[d.Webhook], time.Duration(w.dice.IntN(3000))*time.Millisecond, w.dice.IntN(10)
	w.mu.Unlock()
	if mood == "silent" || mood == "moody" && code == 0 {
		takes = time.Hour
	}
	select {
	case <-time.After(takes):
		r.status = http.StatusOK
	case <-ctx.Done():
		r.cut = context.Cause(ctx) == errClosed
		r.err = "no answer"
	}
	switch {
	case r.status == 0:
	case mood == "gone":
		r.status, r.err = http.StatusGone, "gone"
	case mood == "broken", mood == "moody" && code < 5:
		r.status, r.err = http.StatusInternalServerError, "broken"
	}
	r.took = time.Since(r.at)

	w.mu.Lock()
	defer w.mu.Unlock()
	// Some answers are lost on their way: the receiver has taken it, and nobody knows.
	lost := r.err == "" && w.dice.IntN(20) == 0
	if r.err == "" {
		w.accepted[d.ID] = true
	}
	if lost {
		r.status, r.err = 0, "reset"
	}
	delete(w.running, d.ID)
	w.at[s].all--
	w.at[s].webhook[d.Webhook]--
	return r
}

func (w *world) arrive(s *server, c store.ClaimedDelivery) {
	d := c.Delivery
	before := w.all()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.running[d.ID] {
		w.Errorf("%s has two attempts at once", d.ID)
	}
	w.running[d.ID] = true
	if w.accepted[d.ID] {
		w.repeats++
	}
	lane := d.Webhook + " " + d.Lane
	if d.Seq < w.reached[lane] {
		w.Errorf("%s: %d is sent after %d", lane, d.Seq, w.reached[lane])
	}
	w.reached[lane] = d.Seq
	for _, other := range before {
		if other.Webhook == d.Webhook && other.Lane == d.Lane && other.Seq < d.Seq && other.Status == store.DeliveryPending {
			w.Errorf("%s: %d is sent while %d is pending", lane, d.Seq, other.Seq)
		}
	}
	key := fmt.Sprint(d.Webhook, d.Seq)
	if id := w.ids[key]; id != "" && id != d.ID {
		w.Errorf("event %d has the ids %s and %s for %s", d.Seq, id, d.ID, d.Webhook)
	}
	w.ids[key] = d.ID
	if c.Event.Seq != d.Seq || !Wants(c.Webhook, c.Event) {
		w.Errorf("%s was sent the event %+v", d.Webhook, c.Event)
	}
	at := w.at[s]
	at.all++
	at.webhook[d.Webhook]++
	if at.all > historyLimits.Total || at.webhook[d.Webhook] > historyLimits.PerWebhook {
		w.Errorf("a server has %d attempts at once, %d of them of %s", at.all, at.webhook[d.Webhook], d.Webhook)
	}
}

func (w *world) roll(n int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.dice.IntN(n)
}

func (w *world) live() {
	types := [][]string{nil, {"sandbox.*"}, {"sandbox.ready", "key.*"}}
	for i, filter := range types {
		w.put(store.Webhook{ID: fmt.Sprint("wh_", i), Project: "prj_1", Types: filter})
	}
	servers := []*server{w.boot(), w.boot()}
	for range 60 {
		time.Sleep(time.Duration(w.roll(240)) * time.Second)
		switch n := w.roll(20); {
		case n < 14:
			e := store.Event{Project: "prj_1", Sandbox: fmt.Sprint("sbx_", w.roll(3)), Type: "sandbox.ready", At: time.Now()}
			switch w.roll(5) {
			case 0:
				e.Type = "sandbox.stopped"
			case 1:
				e.Type, e.Sandbox = "key.created", ""
			}
			w.add(e)
		case n < 17:
			id := fmt.Sprint("wh_", w.roll(len(types)))
			mood := moods[w.roll(len(moods))]
			if w.roll(40) == 0 {
				mood = "gone"
			}
			w.mu.Lock()
			w.mood[id] = mood
			w.mu.Unlock()
		default:
			i := w.roll(len(servers))
			w.end(servers[i], n < 19)
			servers[i] = w.boot()
		}
	}
	pending := func() bool {
		cursor, _ := w.memory.WebhookCursor(w.Context())
		for _, d := range w.all() {
			if d.Status == store.DeliveryPending {
				return true
			}
		}
		return cursor < int64(len(w.events)) // nothing adds events any more
	}
	for i := 0; pending(); i++ {
		if i == 1000 {
			w.Errorf("after ten days some are pending: %s", w.statuses())
			break
		}
		time.Sleep(15 * time.Minute)
	}
	for _, s := range servers {
		w.end(s, false)
	}
}

// judge looks at what has become of each event.
func (w *world) judge() {
	got := map[string]store.Delivery{}
	for _, d := range w.all() {
		got[fmt.Sprint(d.Webhook, d.Seq)] = d
	}
	for _, e := range w.events {
		for _, hook := range w.webhooks {
			d, there := got[fmt.Sprint(hook.ID, e.Seq)]
			log := w.log(d.ID)
			switch {
			case !there && Wants(hook, e) && (hook.DisabledAt.IsZero() || e.At.Before(hook.DisabledAt.Add(-time.Hour))):
				w.Errorf("event %d never became a delivery to %s", e.Seq, hook.ID)
			case there && !Wants(hook, e):
				w.Errorf("event %d is not for %s", e.Seq, hook.ID)
			case d.Status == store.DeliveryDelivered && (!w.accepted[d.ID] || len(log) == 0 || log[len(log)-1].Error != ""):
				w.Errorf("%s is marked as delivered, its receiver never took it, or the log says otherwise: %+v", d.ID, log)
			case d.Status == store.DeliveryFailed && hook.DisabledAt.IsZero() &&
				(d.Tries < historyLimits.withDefaults().MinTries || d.EndedAt.Sub(d.Since) < historyLimits.Window || d.Error == ""):
				w.Errorf("%s was given up early: %+v", d.ID, d)
			}
			for i, a := range log {
				if a.Number > d.Attempts || i > 0 && a.Number <= log[i-1].Number {
					w.Errorf("the log of %s has %+v", d.ID, log)
				}
			}
		}
	}
}

// Whatever receivers answer, the network loses and servers die of: each delivery is sent
// at least once or is marked, in its sandbox's order, never twice at once, and always
// under its id.
func TestHistories_H2(t *testing.T) {
	t.Parallel()
	histories := 100
	if testing.Short() {
		histories = 20
	}
	seen := map[store.DeliveryStatus]int{}
	repeats, disabled := 0, 0
	for seed := range histories {
		synctest.Test(t, func(t *testing.T) {
			w := &world{
				T: t, memory: newMemory(), dice: rand.New(rand.NewPCG(uint64(seed), 2)), mood: map[string]string{}, running: map[string]bool{},
				reached: map[string]int64{}, accepted: map[string]bool{}, ids: map[string]string{}, at: map[*server]*counts{},
			}
			w.live()
			w.judge()
			for _, d := range w.all() {
				seen[d.Status]++
			}
			for _, hook := range w.webhooks {
				if !hook.DisabledAt.IsZero() {
					disabled++
				}
			}
			repeats += w.repeats
		})
		if t.Failed() {
			t.Fatalf("in the history of seed %d", seed)
		}
	}
	t.Logf("%v, %d repeats of what had been taken, %d webhooks disabled", seen, repeats, disabled)
	if seen[store.DeliveryDelivered] == 0 || seen[store.DeliveryFailed] == 0 || repeats == 0 || disabled == 0 && !testing.Short() {
		t.Error("the histories are too tame")
	}
}
