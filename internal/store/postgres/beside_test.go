package postgres

import (
	"context"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/postgres/pgtest"
)

// R8: what looks beside the servers reads and cannot write, and brings no schema up to date.
func TestPeek(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	if have, want, err := Schema(t.Context(), url); have != 0 || want < 4 || err != nil {
		t.Errorf("schema %d of %d, %v", have, want, err)
	}
	if _, err := Peek(t.Context(), url); fault.Of(err).Reason != "other_schema" {
		t.Errorf("of an empty database: %v", err)
	}
	s, err := Open(t.Context(), url, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	insert := func(s store.Store, id string) error {
		return s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
			return tx.InsertProject(ctx, store.Project{ID: id, Name: id, CreatedAt: time.Now()})
		})
	}
	if err := insert(s, "p"); err != nil {
		t.Fatal(err)
	}
	p, err := Peek(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	err = p.View(t.Context(), func(ctx context.Context, r store.Reader) error {
		_, err := r.Project(ctx, "p")
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if err := insert(p, "q"); err == nil {
		t.Error("it can write")
	}
}
