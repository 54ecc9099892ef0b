package webhook

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/postgres"
	"github.com/hutchrun/hutch/internal/store/postgres/pgtest"
	"github.com/hutchrun/hutch/internal/store/sqlite"
	"github.com/hutchrun/hutch/internal/webhook/webhooktest"
)

func openSQLite(t *testing.T) store.Store {
	t.Helper()
	s, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "hutch.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func openPostgres(t *testing.T, url string) store.Store {
	t.Helper()
	s, err := postgres.Open(t.Context(), url, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestSQLite(t *testing.T) {
	t.Parallel()
	webhooktest.Run(t, func(t *testing.T) webhooktest.Bench { return webhookBench(t, openSQLite(t)) })
}

func TestPostgres(t *testing.T) {
	t.Parallel()
	webhooktest.Run(t, func(t *testing.T) webhooktest.Bench { return webhookBench(t, openPostgres(t, pgtest.URL(t))) })
}

// webhookBench is a store with the project of the suite.
func webhookBench(t *testing.T, s store.Store) webhooktest.Bench {
	t.Helper()
	update := func(t *testing.T, fn func(context.Context, store.Tx) error) {
		t.Helper()
		if err := s.Update(t.Context(), fn); err != nil {
			t.Fatal(err)
		}
	}
	update(t, func(ctx context.Context, tx store.Tx) error {
		return tx.InsertProject(ctx, store.Project{ID: webhooktest.Project, CreatedAt: time.Now()})
	})
	numbered := func(t *testing.T, id string) store.Event {
		t.Helper()
		deadline := time.After(30 * time.Second)
		for {
			next := s.Committed()
			all, err := s.Events(t.Context(), store.EventFilter{})
			if err != nil {
				t.Fatal(err)
			}
			if i := slices.IndexFunc(all, func(e store.Event) bool { return e.ID == id }); i >= 0 {
				return all[i]
			}
			select {
			case <-next:
			case <-deadline:
				t.Fatalf("the event %s gets no number", id)
			}
		}
	}
	n := 0
	add := func(t *testing.T, e store.Event) store.Event {
		t.Helper()
		n++
		e.ID = fmt.Sprintf("ev_test_%d", n)
		update(t, func(ctx context.Context, tx store.Tx) error { return tx.AddEvent(ctx, e) })
		return numbered(t, e.ID)
	}
	return webhooktest.Bench{
		Store: s, AddEvent: add,
		PutWebhook: func(t *testing.T, w store.Webhook) {
			t.Helper()
			update(t, func(ctx context.Context, tx store.Tx) error {
				old, err := tx.ProjectWebhook(ctx, w.Project, w.ID)
				if fault.Is(err, fault.NotFound) {
					return tx.InsertWebhook(ctx, w)
				}
				if err != nil {
					return err
				}
				w.Version = old.Version
				return tx.UpdateWebhook(ctx, &w)
			})
		},
		DeleteWebhook: func(t *testing.T, id string) {
			t.Helper()
			update(t, func(ctx context.Context, tx store.Tx) error { return tx.DeleteWebhook(ctx, webhooktest.Project, id) })
		},
		Attempts: func(t *testing.T, id string) (out []store.DeliveryAttempt) {
			t.Helper()
			err := s.View(t.Context(), func(ctx context.Context, r store.Reader) (err error) {
				out, err = r.Attempts(ctx, id)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			return out
		},
		Events: func(t *testing.T) []store.Event {
			t.Helper()
			add(t, store.Event{Project: webhooktest.Project, Type: "test.last", At: time.Now()}) // those before it have numbers then
			all, err := s.Events(t.Context(), store.EventFilter{})
			if err != nil {
				t.Fatal(err)
			}
			return all
		},
	}
}

// Two servers on one database: no delivery is attempted twice at the same time, a
// sandbox's come in order, and all arrive, also when one server is ended in the middle.
func TestTwoServersOnPostgres_H2(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	dbs := []store.Store{openPostgres(t, url), openPostgres(t, url)}
	bench := webhookBench(t, dbs[0])
	const hooks, boxes, each = 3, 5, 20
	for i := range hooks {
		bench.PutWebhook(t, store.Webhook{
			ID: fmt.Sprint("wh_", i), Project: webhooktest.Project, URL: "https://example.com/", Secrets: []store.WebhookSecret{{Value: NewSecret()}}, CreatedAt: time.Now(), Version: 1,
		})
	}
	var mu sync.Mutex
	running, reached, taken := map[string]bool{}, map[string]int64{}, map[string]int{}
	done := make(chan struct{})
	receive := func(ctx context.Context, c store.ClaimedDelivery) result {
		d := c.Delivery
		lane := d.Webhook + " " + d.Sandbox
		mu.Lock()
		if running[lane] {
			t.Errorf("two of %s are attempted at once", lane)
		}
		running[lane] = true
		if d.Seq < reached[lane] {
			t.Errorf("of %s, %d came after %d", lane, d.Seq, reached[lane])
		}
		reached[lane] = d.Seq
		attempt := taken[d.ID]
		mu.Unlock()
		time.Sleep(time.Millisecond) // as long as an attempt takes
		mu.Lock()
		defer mu.Unlock()
		running[lane] = false
		if attempt == 0 && d.Seq%7 == 0 && d.Tries == 1 {
			return busy(time.Now())
		}
		taken[d.ID]++
		if len(taken) == hooks*boxes*each {
			select {
			case <-done:
			default:
				close(done)
			}
		}
		return well(time.Now())
	}
	begin := func(i int) *Deliverer {
		d := New(Config{Store: dbs[i], Limits: Limits{Waits: []time.Duration{20 * time.Millisecond}, Poll: 50 * time.Millisecond}})
		d.send = receive
		d.Start(t.Context())
		return d
	}
	servers := []*Deliverer{begin(0), begin(1)}
	for n := range each {
		err := dbs[0].Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
			for i := range boxes {
				e := store.Event{ID: fmt.Sprintf("ev_%d_%d", n, i), Project: webhooktest.Project, Sandbox: fmt.Sprint("sbx_", i), Type: "sandbox.ready", At: time.Now()}
				if err := tx.AddEvent(ctx, e); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if n == each/2 {
			servers[1].Close()
			servers[1] = begin(1)
		}
	}
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Error("not all arrived")
	}
	for _, d := range servers {
		d.Close()
	}
	mu.Lock()
	defer mu.Unlock()
	if len(taken) != hooks*boxes*each {
		t.Errorf("%d of %d were taken", len(taken), hooks*boxes*each)
	}
}
