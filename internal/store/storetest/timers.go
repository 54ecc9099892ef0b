package storetest

import (
	"context"
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// dueSandboxes: the first timer of each sandbox of a host, in their order, without those
// that an operation is at work on; an archiving that waits is not among them.
func dueSandboxes(t *testing.T, b *bundle) {
	at := func(s int) time.Time { return b.at.Add(time.Duration(s) * time.Second) }
	rows := map[string]func(*sandbox.Sandbox){
		"none":    func(*sandbox.Sandbox) {},
		"archive": func(s *sandbox.Sandbox) { s.ArchiveAt = at(3) },
		"both":    func(s *sandbox.Sandbox) { s.ArchiveAt, s.DeleteAt = at(5), at(2) },
		"waits":   func(s *sandbox.Sandbox) { s.ArchiveAt, s.ArchiveWaits = at(1), true },
		"later":   func(s *sandbox.Sandbox) { s.DeleteAt, s.TimersFrom = at(60), at(-5) },
		"busy":    func(s *sandbox.Sandbox) { s.DeleteAt = at(1) },
		"foreign": func(s *sandbox.Sandbox) { s.DeleteAt, s.Host = at(1), "elsewhere" },
	}
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		for id, change := range rows {
			s := b.sandbox(id)
			s.ID, s.State, s.Host = "sbx_"+id, sandbox.Stopped, "here"
			change(&s)
			if err := tx.InsertSandbox(ctx, s); err != nil {
				return err
			}
			back, err := tx.Sandbox(ctx, s.ID)
			if err != nil || !reflect.DeepEqual([]any{back.TimersFrom, back.ArchiveAt, back.DeleteAt, back.ArchiveWaits}, []any{s.TimersFrom, s.ArchiveAt, s.DeleteAt, s.ArchiveWaits}) {
				return fmt.Errorf("%s came back as %+v, %w", id, back, err)
			}
		}
		return tx.InsertOperation(ctx, b.operation("sbx_busy", sandbox.Resume))
	})
	for _, c := range []struct {
		until time.Time
		limit int
		want  string
	}{
		{at(2).Add(-time.Millisecond), 10, "[]"},
		{at(2), 10, "[{sbx_both 2}]"},
		{at(59), 10, "[{sbx_both 2} {sbx_archive 3}]"},
		{at(60), 10, "[{sbx_both 2} {sbx_archive 3} {sbx_later 60}]"},
		{at(60), 1, "[{sbx_both 2}]"},
	} {
		b.view(t, func(ctx context.Context, r store.Reader) error {
			list, err := r.DueSandboxes(ctx, "here", c.until, c.limit)
			got := []string{}
			for _, d := range list {
				got = append(got, fmt.Sprintf("{%s %d}", d.Sandbox, int(d.Due.Sub(b.at)/time.Second)))
			}
			if text := fmt.Sprint(got); text != c.want {
				t.Errorf("until %s at most %d: %s, want %s", c.until, c.limit, text, c.want)
			}
			return err
		})
	}
}

// leases: each turn once, by host; turns and sandboxes are forgotten one by one.
func leases(t *testing.T, b *bundle) {
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		for _, id := range []string{"sbx_a", "sbx_b"} {
			s := b.sandbox(id[4:])
			s.ID, s.Host = id, "here"
			if err := tx.InsertSandbox(ctx, s); err != nil {
				return err
			}
			for _, turn := range []string{"t2", "t1", "t1"} {
				if err := tx.PutLease(ctx, id, turn, b.at); err != nil {
					return err
				}
			}
		}
		return nil
	})
	want := func(host string, want map[string][]string) {
		t.Helper()
		b.view(t, func(ctx context.Context, r store.Reader) error {
			got, err := r.Leases(ctx, host)
			if !reflect.DeepEqual(got, want) {
				t.Errorf("the leases of %s are %v, want %v", host, got, want)
			}
			return err
		})
	}
	want("here", map[string][]string{"sbx_a": {"t1", "t2"}, "sbx_b": {"t1", "t2"}})
	want("elsewhere", map[string][]string{})
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		for _, drop := range [][2]string{{"sbx_a", "t1"}, {"sbx_a", "none"}, {"sbx_b", ""}, {"sbx_b", ""}} {
			if err := tx.DropLeases(ctx, drop[0], drop[1]); err != nil {
				return err
			}
		}
		return nil
	})
	want("here", map[string][]string{"sbx_a": {"t2"}})
}
