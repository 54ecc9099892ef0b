package apiserver

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/postgres"
	"github.com/hutchrun/hutch/internal/store/postgres/pgtest"
	"github.com/hutchrun/hutch/internal/store/sqlite"
)

// place is a server of an installation that is started again now and then.
type place struct {
	t    *testing.T
	open func() (store.Store, error)
	url  atomic.Pointer[string] // nil while it is down
	key  string
	stop func()

	mu sync.RWMutex // held for reading by who writes to db
	db store.Store
}

// restart ends the server as a crash does, and starts it again.
func (p *place) restart() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stop()
	p.start()
}

// add writes an event, as a use case of this server does.
func (p *place) add(e store.Event) error {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.db.Update(p.t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.AddEvent(ctx, e) })
}

// start begins anew on the same database, at another address.
func (p *place) start() {
	t := p.t
	t.Helper()
	db, err := p.open()
	if err != nil {
		t.Fatal(err)
	}
	ctl := control.New(control.Config{Store: db, Shared: true})
	if err := ctl.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if p.key == "" {
		if err := ctl.EnsureProject(t.Context(), "default"); err != nil {
			t.Fatal(err)
		}
		if _, p.key, err = ctl.CreateKey(t.Context(), control.Actor{Project: "default", Scopes: control.ScopesProject}, control.CreateKeyRequest{Name: "test"}); err != nil {
			t.Fatal(err)
		}
	}
	handler, err := New(Config{Control: ctl})
	if err != nil {
		t.Fatal(err)
	}
	ts := httptest.NewUnstartedServer(nil)
	ts.Config = HTTPServer(handler, slog.New(slog.DiscardHandler))
	ts.Start()
	p.db = db
	url := ts.URL
	p.url.Store(&url)
	p.stop = func() {
		p.url.Store(nil)
		_ = ts.Config.Close() // as a crash: streams break in the middle
		ts.Close()
		ctl.Close()
		_ = db.Close()
	}
}

// reader follows the events of servers, one after the other, and goes on where it was.
type reader struct {
	last int64 // the id of the last frame
	seen []api.Event
}

// read reads until so many events came or the stream ends.
func (r *reader) read(ctx context.Context, url, key string, most int) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/v1/events", nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+key)
	req.Header.Set("Last-Event-ID", strconv.FormatInt(r.last, 10))
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", res.StatusCode)
	}
	body := bufio.NewReader(res.Body)
	for range most {
		e, err := readSSE(body)
		if err != nil {
			return err
		}
		r.last = e.id
		r.seen = append(r.seen, e.event)
	}
	return nil
}

// H1: a hundred clients that are cut off at random, on servers that are started again, get
// every event once, in order, also of transactions that committed late.
func TestHundredFollowers_H1(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(t *testing.T) (places []*place, late func(ctx context.Context, e string) (commit func() error, err error)){
		"SQLite": func(t *testing.T) ([]*place, func(context.Context, string) (func() error, error)) {
			path := filepath.Join(t.TempDir(), "hutch.db")
			return []*place{{t: t, open: func() (store.Store, error) { return sqlite.Open(t.Context(), path) }}}, nil
		},
		"PostgreSQL": func(t *testing.T) ([]*place, func(context.Context, string) (func() error, error)) {
			url := pgtest.URL(t)
			open := func() (store.Store, error) { return postgres.Open(t.Context(), url, nil) }
			raw, err := sql.Open("pgx", url)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { raw.Close() })
			// A transaction whose event is written, and whose commit is yet to come.
			late := func(ctx context.Context, e string) (func() error, error) {
				tx, err := raw.BeginTx(ctx, nil)
				if err != nil {
					return nil, err
				}
				_, err = tx.ExecContext(ctx, `INSERT INTO event_inbox (uid, project, sandbox, operation, type, actor, key, at)
					VALUES ('ev_late', 'default', 'sbx_late', '', '`+e+`', '', '', 1)`)
				return tx.Commit, err
			}
			return []*place{{t: t, open: open}, {t: t, open: open}}, late
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			places, late := open(t)
			places[0].start()
			for _, p := range places[1:] {
				p.key = places[0].key
				p.start()
			}
			t.Cleanup(func() {
				for _, p := range places {
					p.stop()
				}
			})
			follow(t, places, late)
		})
	}
}

func follow(t *testing.T, places []*place, late func(context.Context, string) (func() error, error)) {
	const clients, writers, each = 100, 4, 40
	total := writers*each + 1 // and the key
	if late != nil {
		total += 2 * each
	}
	var all sync.WaitGroup
	for w := range writers {
		all.Go(func() {
			for i := range each {
				err := places[w%len(places)].add(store.Event{
					ID: fmt.Sprintf("ev_%d_%d", w, i), Project: "default", Sandbox: fmt.Sprint("sbx_", w), Type: fmt.Sprint("test.n", i), At: time.Now(),
				})
				if err != nil {
					t.Errorf("write: %v", err)
					return
				}
				if i == each/2 && w < len(places) { // a server dies in the middle
					places[w].restart()
				}
			}
		})
	}
	if late != nil {
		all.Go(func() {
			for i := range each {
				commit, err := late(t.Context(), fmt.Sprint("test.n", i))
				if err != nil {
					t.Errorf("a late transaction: %v", err)
					return
				}
				// Others commit, get numbers and are read meanwhile.
				if err := places[0].add(store.Event{ID: fmt.Sprint("ev_before_", i), Project: "default", Type: "test.meanwhile", At: time.Now()}); err != nil {
					t.Errorf("write: %v", err)
					return
				}
				if err := commit(); err != nil {
					t.Errorf("a late commit: %v", err)
				}
			}
		})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	readers := make([]reader, clients)
	for i := range readers {
		all.Go(func() {
			r := &readers[i]
			for len(r.seen) < total && ctx.Err() == nil {
				url := places[rand.IntN(len(places))].url.Load()
				if url == nil {
					time.Sleep(5 * time.Millisecond)
					continue
				}
				_ = r.read(ctx, *url, places[0].key, min(1+rand.IntN(total/2), total-len(r.seen))) // it comes again
			}
		})
	}
	all.Wait()
	for i := range readers {
		seen := readers[i].seen
		if len(seen) != total {
			t.Errorf("client %d saw %d of %d events", i, len(seen), total)
			continue
		}
		next := map[string]int{}
		for n, e := range seen {
			if e.Seq != int64(n+1) || e.ID != readers[0].seen[n].ID {
				t.Fatalf("client %d: the event after %d has number %d: a gap or a repeat", i, n, e.Seq)
			}
			if e.Sandbox != "" {
				if want := fmt.Sprint("test.n", next[e.Sandbox]); e.Type != want {
					t.Fatalf("client %d: of %s came %s, want %s", i, e.Sandbox, e.Type, want)
				}
				next[e.Sandbox]++
			}
		}
	}
}

// H1: filters, and where to begin.
func TestWhereEventsBegin_H1(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	box := r.create("box")
	r.create("other")
	list := func(query string) []api.Event {
		t.Helper()
		return decode[api.EventList](t, r.do("GET", "/v1/events?"+query, "", "Accept: application/json"), 200).Events
	}
	all := list("limit=1000")
	pick := func(keep func(api.Event) bool) (out []int64) {
		for _, e := range all {
			if keep(e) {
				out = append(out, e.Seq)
			}
		}
		return out
	}
	last := func(n int, list []int64) []int64 { return list[max(0, len(list)-n):] }
	ready := pick(func(e api.Event) bool { return e.Type == "sandbox.ready" })
	if len(ready) != 2 {
		t.Fatalf("the events are %+v", all)
	}
	now := time.Now().Add(time.Hour).UTC().Format(time.RFC3339)
	for query, want := range map[string][]int64{
		"type=sandbox.ready":                    ready,
		"type=sandbox.ready&type=key.*":         pick(func(e api.Event) bool { return e.Type == "sandbox.ready" || strings.HasPrefix(e.Type, "key.") }),
		"type=sandbox.*&sandbox=box":            pick(func(e api.Event) bool { return strings.HasPrefix(e.Type, "sandbox.") && e.Sandbox == box.ID }),
		"tail=3":                                last(3, pick(func(api.Event) bool { return true })),
		"tail=1&type=sandbox.ready":             ready[1:],
		"tail=1000":                             pick(func(api.Event) bool { return true }),
		"tail=0":                                nil,
		"since=2026-01-01":                      pick(func(api.Event) bool { return true }),
		"since=" + now:                          nil,
		"after=" + fmt.Sprint(ready[0]):         pick(func(e api.Event) bool { return e.Seq > ready[0] }),
		"tail=3&cursor=" + fmt.Sprint(ready[0]): pick(func(e api.Event) bool { return e.Seq > ready[0] }),
	} {
		var got []int64
		for _, e := range list(query + "&limit=1000") {
			got = append(got, e.Seq)
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s gives %v, want %v", query, got, want)
		}
	}
	at := all[len(all)-1].At
	got := list("limit=1000&since=" + at.Format(time.RFC3339Nano))
	if len(got) == 0 || got[len(got)-1].Seq != all[len(all)-1].Seq || got[0].At.Before(at.Time) {
		t.Errorf("since the last: %+v", got)
	}
	decode[api.Change](t, r.do("DELETE", "/v1/sandboxes/box?wait=20s", ""), 200)
	for query, want := range map[string]int{"sandbox=" + box.ID: 5, "sandbox=" + box.ID + "&type=sandbox.deleted": 1} {
		if got := list(query + "&limit=1000"); len(got) < want || got[len(got)-1].Sandbox != box.ID {
			t.Errorf("%s of one that is deleted: %+v", query, got)
		}
	}
	all = list("limit=1000")
	// A stream without anything of its own says how far it has looked.
	res := r.open("GET", "/v1/events?type=none.at.all", nil)
	defer res.Body.Close()
	line, err := bufio.NewReader(res.Body).ReadString('\n')
	if want := fmt.Sprintf("id: %d\n", all[len(all)-1].Seq); err != nil || line != want {
		t.Errorf("a quiet stream begins with %q, %v, want %q", line, err, want)
	}
}

// H1: from a number whose events are no longer kept: 410, with the oldest that is.
func TestPrunedEvents_H1(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	last, err := r.control.LastEvent(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// Its writes are not over when the verb is: what is kept begins behind them all.
	until(t, "nothing happens any more", func() bool {
		before := last
		last, err = r.control.LastEvent(t.Context())
		return err == nil && last == before
	})
	err = r.db.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.PruneHistory(ctx, time.Now().Add(time.Hour)) })
	if err != nil {
		t.Fatal(err)
	}
	for _, accept := range []string{"application/json", "text/event-stream"} {
		a := r.do("GET", "/v1/events?after=1", "", "Accept: "+accept)
		e := decode[api.Error](t, a, http.StatusGone).Error
		if e.Code != "failed_precondition" || e.Reason != "pruned" || !strings.Contains(e.Message, fmt.Sprintf("the oldest is %d, begin there", last+1)) {
			t.Errorf("%s: %+v", accept, e)
		}
	}
	r.create("next")
	page := decode[api.EventList](t, r.do("GET", fmt.Sprintf("/v1/events?after=%d", last), "", "Accept: application/json"), 200)
	if len(page.Events) == 0 || page.Events[0].Seq != last+1 || page.Seen < page.Events[len(page.Events)-1].Seq {
		t.Errorf("from the oldest: %+v", page)
	}
}
