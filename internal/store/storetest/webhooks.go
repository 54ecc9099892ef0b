package storetest

import (
	"context"
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

// eventStart is where readers begin who name no number, and what filters select.
func eventStart(t *testing.T, b *bundle) {
	for i, typ := range []string{"sandbox.ready", "sandbox_x.odd", "key.created", "sandbox.stopped", "Sandbox.ready", "sandbox.ready.late"} {
		b.update(t, func(ctx context.Context, tx store.Tx) error {
			e := b.event(typ)
			e.At = b.at.Add(time.Duration(i) * time.Hour)
			if i == 3 {
				e.At = b.at // a clock that was behind for a moment
			}
			if i == 2 {
				e.Project = "p2"
			}
			return tx.AddEvent(ctx, e)
		})
		b.numbered(t, int64(i+1))
	}
	for _, c := range []struct {
		types []string
		want  string
	}{
		{nil, "sandbox.ready sandbox_x.odd key.created sandbox.stopped Sandbox.ready sandbox.ready.late"},
		{[]string{"*"}, "sandbox.ready sandbox_x.odd key.created sandbox.stopped Sandbox.ready sandbox.ready.late"},
		{[]string{"sandbox.ready"}, "sandbox.ready"}, {[]string{"sandbox.*"}, "sandbox.ready sandbox.stopped sandbox.ready.late"},
		{[]string{"key.*", "sandbox.stopped"}, "key.created sandbox.stopped"}, {[]string{"sandbox"}, ""}, {[]string{"%"}, ""}, {[]string{"é.*"}, ""},
	} {
		f := store.EventFilter{Types: c.types}
		all := b.events(t, store.EventFilter{})
		if got := types(b.events(t, f)); got != c.want {
			t.Errorf("%v gives %q, want %q", c.types, got, c.want)
		}
		var selected []store.Event
		for _, e := range all {
			if f.Selects(e) {
				selected = append(selected, e)
			}
		}
		if got := types(selected); got != c.want {
			t.Errorf("%v selects %q, want %q", c.types, got, c.want)
		}
	}
	start := func(f store.EventFilter, since time.Time, tail int) int64 {
		t.Helper()
		n, err := b.s.EventStart(t.Context(), f, since, tail)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for _, c := range []struct {
		f     store.EventFilter
		since time.Time
		tail  int
		want  int64
	}{
		{tail: 0, want: 6}, {tail: 1, want: 5}, {tail: 6, want: 0}, {tail: 100, want: 0}, {f: store.EventFilter{Types: []string{"sandbox.*"}}, tail: 2, want: 3},
		{f: store.EventFilter{Project: "p2"}, tail: 1, want: 2}, {f: store.EventFilter{Sandbox: "none"}, tail: 1, want: 0},
		{since: b.at, want: 0}, {since: b.at.Add(90 * time.Minute), want: 2}, {since: b.at.Add(3 * time.Hour), want: 4}, {since: b.at.Add(100 * time.Hour), want: 6},
	} {
		if got := start(c.f, c.since, c.tail); got != c.want {
			t.Errorf("%+v since %v, the last %d: after %d, want %d", c.f, c.since, c.tail, got, c.want)
		}
	}
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.PruneHistory(ctx, b.at.Add(100*time.Hour)) })
	for _, since := range []time.Time{{}, b.at} {
		if got := start(store.EventFilter{}, since, 0); got != 6 {
			t.Errorf("where nothing is kept it begins after %d", got)
		}
	}
}

// webhooks are the reads and writes of use cases; the suite of the deliverer's is
// webhooktest.
func webhooks(t *testing.T, b *bundle) {
	hook := func(id, project string, n int) store.Webhook {
		return store.Webhook{
			ID: id, Project: project, URL: "https://example.com/" + id, Description: "of " + id, Types: []string{"sandbox.*", "key.created"},
			Secrets: []store.WebhookSecret{{Value: "whsec_a"}, {Value: "whsec_b", Until: b.at}}, After: int64(n), FailingSince: b.at, FailingError: "busy",
			CreatedAt: b.at.Add(time.Duration(n) * time.Minute), Version: 1,
		}
	}
	one, two, other := hook("wh_1", "p1", 1), hook("wh_2", "p1", 2), hook("wh_3", "p2", 3)
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		return errorsOf(tx.InsertWebhook(ctx, one), tx.InsertWebhook(ctx, two), tx.InsertWebhook(ctx, other))
	})
	is(t, b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.InsertWebhook(ctx, one) }), fault.Conflict, store.ReasonExists)
	b.view(t, func(ctx context.Context, r store.Reader) error {
		got, err := r.ProjectWebhook(ctx, "p1", "wh_1")
		if err != nil || !reflect.DeepEqual(got, one) {
			t.Errorf("read %#v, %v, wrote %#v", got, err, one)
		}
		_, err = r.ProjectWebhook(ctx, "p1", "wh_3")
		is(t, err, fault.NotFound, "")
		first, err := r.ProjectWebhooks(ctx, "p1", store.Page{Limit: 1})
		if err != nil || len(first) != 1 || first[0].ID != "wh_1" {
			t.Errorf("the first is %+v, %v", first, err)
		}
		rest, err := r.ProjectWebhooks(ctx, "p1", store.Page{After: store.Cursor{At: one.CreatedAt, ID: one.ID}})
		if err != nil || len(rest) != 1 || rest[0].ID != "wh_2" {
			t.Errorf("then come %+v, %v", rest, err)
		}
		return nil
	})
	stale := one
	one.URL, one.Types, one.FailingSince, one.DisabledAt, one.DisabledReason = "https://example.com/new", nil, time.Time{}, b.at, "by hand"
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.UpdateWebhook(ctx, &one) })
	is(t, b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.UpdateWebhook(ctx, &stale) }), fault.Conflict, store.ReasonStale)
	b.view(t, func(ctx context.Context, r store.Reader) error {
		if got, err := r.ProjectWebhook(ctx, "p1", "wh_1"); err != nil || !reflect.DeepEqual(got, one) || got.Version != 2 {
			t.Errorf("read %#v, %v, wrote %#v", got, err, one)
		}
		return nil
	})
	deliveries(t, b)
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.DeleteWebhook(ctx, "p1", "wh_2") })
	is(t, b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.DeleteWebhook(ctx, "p1", "wh_3") }), fault.NotFound, "")
	_, err := b.s.Delivery(t.Context(), "msg_9")
	is(t, err, fault.NotFound, "")
}

// deliveries are the log of wh_2: msg_0 to msg_9 of two sandboxes, the last three pending.
func deliveries(t *testing.T, b *bundle) {
	var made []store.Delivery
	for i := range 10 {
		d := store.Delivery{
			ID: fmt.Sprint("msg_", i), Webhook: "wh_2", Project: "p1", Sandbox: fmt.Sprint("sbx_", i%2), Seq: int64(i + 1), Type: "sandbox.ready",
			Lane: fmt.Sprint("lane_", i), Status: store.DeliveryPending, Since: b.at, NextAt: b.at, CreatedAt: b.at,
		}
		made = append(made, d)
	}
	cursor, err := b.s.WebhookCursor(t.Context())
	if err == nil {
		err = b.s.AddDeliveries(t.Context(), cursor, cursor+10, made)
	}
	if err != nil {
		t.Fatal(err)
	}
	claimed, err := b.s.ClaimDeliveries(t.Context(), store.DeliveryClaim{Webhook: "wh_2", Limit: 7, Now: b.at, Until: b.at.Add(time.Minute), Lease: "l"})
	if err != nil || len(claimed) != 7 {
		t.Fatalf("claimed %d, %v", len(claimed), err)
	}
	for i, c := range claimed {
		at := b.at.Add(time.Duration(i) * time.Hour)
		s := store.DeliverySettlement{ID: c.Delivery.ID, Lease: "l", Status: store.DeliveryDelivered, At: at, Attempt: &store.DeliveryAttempt{Number: 1, At: at, Status: 204}}
		if err := b.s.SettleDelivery(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	ids := func(f store.DeliveryFilter) (out string) {
		t.Helper()
		f.Webhook = "wh_2"
		b.view(t, func(ctx context.Context, r store.Reader) error {
			list, err := r.Deliveries(ctx, f)
			for _, d := range list {
				out += d.ID[len("msg_"):]
			}
			return err
		})
		return out
	}
	for _, c := range []struct {
		f    store.DeliveryFilter
		want string
	}{
		{store.DeliveryFilter{}, "9876543210"}, {store.DeliveryFilter{Limit: 3}, "987"}, {store.DeliveryFilter{Status: store.DeliveryPending}, "987"},
		{store.DeliveryFilter{Before: store.DeliveryCursor{Seq: 5, ID: "msg_4"}}, "3210"}, {store.DeliveryFilter{Sandbox: "sbx_1", Limit: 2}, "97"},
		{store.DeliveryFilter{Status: store.DeliveryFailed}, ""},
	} {
		if got := ids(c.f); got != c.want {
			t.Errorf("%+v gives %q, want %q", c.f, got, c.want)
		}
	}
	pending := func() (n int64) {
		t.Helper()
		b.view(t, func(ctx context.Context, r store.Reader) error {
			all, err := r.PendingDeliveries(ctx, "wh_1", "wh_2")
			if _, there := all["wh_1"]; there {
				t.Errorf("counted %v", all)
			}
			n = all["wh_2"]
			return err
		})
		return n
	}
	if n := pending(); n != 3 {
		t.Errorf("%d are pending", n)
	}
	// What ended goes with what happened then, with its log; what is pending stays.
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.PruneHistory(ctx, b.at.Add(150*time.Minute)) })
	if got := ids(store.DeliveryFilter{}); got != "9876543" {
		t.Errorf("kept are %q", got)
	}
	b.view(t, func(ctx context.Context, r store.Reader) error {
		gone, err := r.Attempts(ctx, "msg_0")
		kept, err2 := r.Attempts(ctx, "msg_3")
		if len(gone) != 0 || len(kept) != 1 {
			t.Errorf("the log has %+v of what is gone, %+v of what is kept", gone, kept)
		}
		return errorsOf(err, err2)
	})
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		return tx.EndDeliveries(ctx, "wh_2", "it was disabled", b.at.Add(time.Hour))
	})
	if n, failed := pending(), ids(store.DeliveryFilter{Status: store.DeliveryFailed}); n != 0 || failed != "987" {
		t.Errorf("%d are pending, %q failed", n, failed)
	}
}
