package control

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"strconv"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// Get gives a sandbox by id or name, with its active operation. A deleted one is not
// found.
func (c *Control) Get(ctx context.Context, a Actor, ref string) (View, error) {
	var v View
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		v.Sandbox, err = resolve(ctx, r, a, ref)
		if fault.Is(err, fault.NotFound) || err == nil && v.Sandbox.State == sandbox.Deleted {
			return c.deleted(ctx, r, a, ref)
		}
		if err != nil {
			return err
		}
		v.Operation, err = r.ActiveOperation(ctx, v.Sandbox.ID)
		return err
	})
	c.progress.overlay(v.Operation)
	return v, err
}

// GetAny gives a sandbox by its id, also a deleted one.
func (c *Control) GetAny(ctx context.Context, a Actor, id string) (View, error) {
	var v View
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		if v.Sandbox, err = resolve(ctx, r, a, id); err != nil {
			return err
		}
		v.Operation, err = r.ActiveOperation(ctx, id)
		return err
	})
	c.progress.overlay(v.Operation)
	return v, err
}

// List gives a page of sandboxes, in the order of their making. Deleted ones are in it
// only when q.States asks for them.
func (c *Control) List(ctx context.Context, a Actor, q ListQuery) (SandboxPage, error) {
	var out SandboxPage
	if err := validStates(q.States); err != nil {
		return out, err
	}
	page, err := c.page(q.Limit, q.Cursor)
	if err != nil {
		return out, err
	}
	f := store.SandboxFilter{Page: page, Project: a.Project, States: q.States, Labels: q.Labels, Template: q.Template}
	if q.Deleted {
		f.KeptAt = c.instant()
	}
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		rows, err := r.Sandboxes(ctx, f)
		if err != nil {
			return err
		}
		rows, out.NextCursor = cut(page, rows, func(s sandbox.Sandbox) store.Cursor { return store.Cursor{At: s.CreatedAt, ID: s.ID} })
		if len(rows) == 0 {
			return nil
		}
		ids := make([]string, len(rows))
		index := make(map[string]int, len(rows))
		out.Sandboxes = make([]View, len(rows))
		for i, s := range rows {
			ids[i], index[s.ID], out.Sandboxes[i].Sandbox = s.ID, i, s
		}
		active, err := r.ActiveOperations(ctx, ids...)
		for i := range active {
			c.progress.overlay(&active[i])
			out.Sandboxes[index[active[i].Sandbox]].Operation = &active[i]
		}
		return err
	})
	return out, err
}

// Operation gives an operation by id.
func (c *Control) Operation(ctx context.Context, a Actor, id string) (sandbox.Operation, error) {
	var op sandbox.Operation
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		op, err = operation(ctx, r, a, id)
		return err
	})
	c.progress.overlay(&op)
	return op, err
}

func operation(ctx context.Context, r store.Reader, a Actor, id string) (sandbox.Operation, error) {
	op, err := r.Operation(ctx, id)
	if fault.Is(err, fault.NotFound) || err == nil && op.Project != a.Project {
		return sandbox.Operation{}, fault.New(fault.NotFound, "there is no operation %s; `hutch operations ls` lists those that are", shown(id)).Because("operation")
	}
	return op, err
}

// Operations gives a page of operations, newest last.
func (c *Control) Operations(ctx context.Context, a Actor, q OperationQuery) (OperationPage, error) {
	var out OperationPage
	page, err := c.page(q.Limit, q.Cursor)
	if err != nil {
		return out, err
	}
	f := store.OperationFilter{Page: page, Project: a.Project}
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		if q.Sandbox != "" {
			s, err := resolve(ctx, r, a, q.Sandbox)
			if err != nil {
				return err
			}
			f.Sandbox = s.ID
		}
		rows, err := r.Operations(ctx, f)
		out.Operations, out.NextCursor = cut(page, rows, func(op sandbox.Operation) store.Cursor {
			return store.Cursor{At: op.CreatedAt, ID: op.ID}
		})
		return err
	})
	for i := range out.Operations {
		c.progress.overlay(&out.Operations[i])
	}
	return out, err
}

// Identity gives what the last boot, wake or fork did about each thing that no two
// sandboxes may share (F2). It is NotFound before the first.
func (c *Control) Identity(ctx context.Context, a Actor, ref string) ([]IdentityItem, error) {
	var items []IdentityItem
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		s, err := resolve(ctx, r, a, ref)
		if err != nil {
			return err
		}
		raw, err := r.Identity(ctx, s.ID)
		if err != nil {
			return err
		}
		return json.Unmarshal(raw, &items)
	})
	return items, err
}

// page reads a list's limit and cursor. The page has one row more than was asked for,
// to see whether another page follows; cut takes it off again.
func (c *Control) page(limit *int64, cursor string) (store.Page, error) {
	n := c.limits.PageDefault
	if limit != nil {
		n = *limit
	}
	if n < 1 || n > c.limits.PageMax {
		return store.Page{}, invalid("limit", "cannot list %d at a time: the limit is from 1 to %d", n, c.limits.PageMax)
	}
	p := store.Page{Limit: int(n) + 1}
	if cursor == "" {
		return p, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(cursor)
	at, id, ok := strings.Cut(string(b), " ")
	ms, numErr := strconv.ParseInt(at, 10, 64)
	if err != nil || !ok || numErr != nil || id == "" {
		return p, invalid("cursor", "%s is no cursor: use the next_cursor of the page before, or begin without one", shown(cursor))
	}
	p.After = store.Cursor{At: time.UnixMilli(ms).UTC(), ID: id}
	return p, nil
}

// cut gives a page's rows and the cursor of the next page, "" on the last.
func cut[T any](p store.Page, rows []T, place func(T) store.Cursor) ([]T, string) {
	if len(rows) < p.Limit {
		return rows, ""
	}
	rows = rows[:p.Limit-1]
	last := place(rows[len(rows)-1])
	var ms int64
	if !last.At.IsZero() {
		ms = last.At.UnixMilli()
	}
	return rows, base64.RawURLEncoding.EncodeToString([]byte(strconv.FormatInt(ms, 10) + " " + last.ID))
}
