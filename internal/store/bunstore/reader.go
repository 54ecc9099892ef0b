package bunstore

import (
	"context"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"maps"
	"slices"

	"github.com/uptrace/bun"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// reader reads in a transaction, of either kind.
type reader struct {
	db      bun.Tx
	engine  *Engine
	lock    bool    // what is read by id or name stays as it is to the transaction's end
	verdict Verdict // on the last error that was not final
}

// fail keeps what an error means for the transaction and makes it a fault.
func (r *reader) fail(err error, what string) error {
	if err == nil {
		return nil
	}
	if v := r.engine.Judge(err); v != Final {
		r.verdict = v
	}
	return r.engine.wrap(err, what)
}

// held locks the rows of a query against other writers. Rows that refer to them can
// still be added.
func (r *reader) held(q *bun.SelectQuery) *bun.SelectQuery {
	if r.lock {
		q = q.For("NO KEY UPDATE")
	}
	return q
}

// present locks the rows of a query against being changed or deleted, and lets others
// do the same.
func (r *reader) present(q *bun.SelectQuery) *bun.SelectQuery {
	if r.lock {
		q = q.For("SHARE")
	}
	return q
}

// missing says whether a query found no row.
func missing(err error) bool { return errors.Is(err, sql.ErrNoRows) }

// active are the statuses of an operation that has not ended.
var active = []string{string(sandbox.Pending), string(sandbox.Running)}

// after restricts a list that is ordered by creation, then id, to one page.
func after(q *bun.SelectQuery, p store.Page) *bun.SelectQuery {
	q = q.OrderExpr("created_at, id")
	if p.After != (store.Cursor{}) {
		at := millis(p.After.At)
		q = q.Where("created_at > ? OR (created_at = ? AND id > ?)", at, at, text(p.After.ID))
	}
	if p.Limit > 0 {
		q = q.Limit(int64(p.Limit))
	}
	return q
}

// Sandbox implements store.Reader.
func (r *reader) Sandbox(ctx context.Context, id string) (sandbox.Sandbox, error) {
	list, err := r.sandboxes(ctx, func(q *bun.SelectQuery) *bun.SelectQuery { return r.held(q.Where("id = ?", text(id))) })
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if len(list) == 0 {
		return sandbox.Sandbox{}, fault.New(fault.NotFound, "there is no sandbox %s", id)
	}
	return list[0], nil
}

// SandboxByName implements store.Reader.
func (r *reader) SandboxByName(ctx context.Context, project, name string) (sandbox.Sandbox, error) {
	list, err := r.sandboxes(ctx, func(q *bun.SelectQuery) *bun.SelectQuery {
		return r.held(q.Where("project = ? AND name = ? AND deleted_at IS NULL", project, text(name)))
	})
	if err == nil && len(list) == 0 {
		list, err = r.sandboxes(ctx, func(q *bun.SelectQuery) *bun.SelectQuery {
			return r.held(q.Where("project = ? AND name = ? AND deleted_at IS NOT NULL AND state <> ?", project, text(name), sandbox.Deleted).
				OrderExpr("deleted_at DESC, id DESC").Limit(1))
		})
	}
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if len(list) == 0 {
		return sandbox.Sandbox{}, fault.New(fault.NotFound, "there is no sandbox %s", name)
	}
	return list[0], nil
}

// SandboxStates implements store.Reader.
func (r *reader) SandboxStates(ctx context.Context) (map[sandbox.State]int64, error) {
	var rows []struct {
		State string
		N     int64
	}
	err := r.db.NewSelect().Model((*sandboxRow)(nil)).ColumnExpr("state").ColumnExpr("COUNT(*) AS n").
		Where("state <> ?", sandbox.Deleted).Group("state").Scan(ctx, &rows)
	if err != nil {
		return nil, r.fail(err, "count the sandboxes")
	}
	out := map[sandbox.State]int64{}
	for _, row := range rows {
		out[sandbox.State(row.State)] = row.N
	}
	return out, nil
}

// NameHeld implements store.Reader. The index of names has those that are held.
func (r *reader) NameHeld(ctx context.Context, project, name string) (bool, error) {
	held, err := r.db.NewSelect().Table("sandboxes").Where("project = ? AND name = ? AND deleted_at IS NULL", project, text(name)).Exists(ctx)
	return held, r.fail(err, "look for a name")
}

// Sandboxes implements store.Reader.
func (r *reader) Sandboxes(ctx context.Context, f store.SandboxFilter) ([]sandbox.Sandbox, error) {
	return r.sandboxes(ctx, func(q *bun.SelectQuery) *bun.SelectQuery {
		q = after(q, f.Page)
		switch {
		case !f.KeptAt.IsZero():
			q = q.Where("state = ? AND erase_at > ?", sandbox.Deleted, millis(f.KeptAt))
		case len(f.States) > 0:
			q = q.Where("state IN (?)", bun.List(f.States))
		case f.HasDisk:
			q = q.Where("state <> ? OR erase_at IS NOT NULL", sandbox.Deleted)
		default:
			q = q.Where("state <> ?", sandbox.Deleted)
		}
		for _, c := range []struct{ column, value string }{
			{"project", f.Project}, {"name", f.Name}, {"template", f.Template}, {"template_version", f.Version},
			{"host", f.Host}, {"origin_source", f.Source},
		} {
			if c.value != "" {
				q = q.Where("? = ?", bun.Ident(c.column), text(c.value))
			}
		}
		if f.PolicyPending {
			q = q.Where("policy_change <> 0")
		}
		if f.Unmetered {
			q = q.Where("NOT EXISTS (SELECT 1 FROM meters AS m WHERE m.sandbox = s.id)")
		}
		for _, key := range slices.Sorted(maps.Keys(f.Labels)) {
			q = q.Where("EXISTS (SELECT 1 FROM sandbox_labels AS l WHERE l.sandbox = s.id AND l.key = ? AND l.value = ?)", text(key), text(f.Labels[key]))
		}
		return q
	})
}

// listed is how many ids one query names.
const listed = 500

// SandboxNames implements store.Reader.
func (r *reader) SandboxNames(ctx context.Context, ids []string) (map[string]string, error) {
	names := make(map[string]string, len(ids))
	for some := range slices.Chunk(ids, listed) {
		var rows []struct{ ID, Name string }
		q := r.db.NewSelect().Table("sandboxes").Column("id", "name").Where("id IN (?)", bun.List(some))
		if err := q.Scan(ctx, &rows); err != nil {
			return nil, r.fail(err, "read the names of sandboxes")
		}
		for _, row := range rows {
			names[row.ID] = row.Name
		}
	}
	return names, nil
}

// sandboxes reads rows and the labels that belong to them.
func (r *reader) sandboxes(ctx context.Context, where func(*bun.SelectQuery) *bun.SelectQuery) ([]sandbox.Sandbox, error) {
	var rows []sandboxRow
	if err := where(r.db.NewSelect().Model(&rows)).Scan(ctx); err != nil {
		return nil, r.fail(err, "read sandboxes")
	}
	if len(rows) == 0 {
		return nil, nil
	}
	out := make([]sandbox.Sandbox, len(rows))
	ids := make([]string, len(rows))
	index := make(map[string]int, len(rows))
	for i := range rows {
		s, err := rows[i].sandbox()
		if err != nil {
			return nil, err
		}
		s.Labels = map[string]string{}
		out[i], ids[i], index[s.ID] = s, s.ID, i
	}
	var labels []labelRow
	if err := r.db.NewSelect().Model(&labels).Where("sandbox IN (?)", bun.List(ids)).Scan(ctx); err != nil {
		return nil, r.fail(err, "read labels")
	}
	for _, l := range labels {
		out[index[l.Sandbox]].Labels[l.Key] = l.Value
	}
	return out, nil
}

// Operation implements store.Reader.
func (r *reader) Operation(ctx context.Context, id string) (sandbox.Operation, error) {
	list, err := r.operations(ctx, func(q *bun.SelectQuery) *bun.SelectQuery { return r.held(q.Where("id = ?", text(id))) })
	if err != nil {
		return sandbox.Operation{}, err
	}
	if len(list) == 0 {
		return sandbox.Operation{}, fault.New(fault.NotFound, "there is no operation %s", id)
	}
	return list[0], nil
}

// ActiveOperation implements store.Reader.
func (r *reader) ActiveOperation(ctx context.Context, sandboxID string) (*sandbox.Operation, error) {
	list, err := r.operations(ctx, func(q *bun.SelectQuery) *bun.SelectQuery {
		return r.held(q.Where("status IN ('pending', 'running')").Where("sandbox = ?", sandboxID))
	})
	if err != nil || len(list) == 0 {
		return nil, err
	}
	return &list[0], nil
}

// ActiveOperations implements store.Reader.
func (r *reader) ActiveOperations(ctx context.Context, sandboxIDs ...string) ([]sandbox.Operation, error) {
	return r.operations(ctx, func(q *bun.SelectQuery) *bun.SelectQuery {
		// The statuses are written out so that the partial index serves the query.
		q = q.Where("status IN ('pending', 'running')").OrderExpr("created_at, id")
		if len(sandboxIDs) > 0 {
			q = q.Where("sandbox IN (?)", bun.List(sandboxIDs))
		}
		return q
	})
}

// Operations implements store.Reader.
func (r *reader) Operations(ctx context.Context, f store.OperationFilter) ([]sandbox.Operation, error) {
	return r.operations(ctx, func(q *bun.SelectQuery) *bun.SelectQuery {
		q = after(q, f.Page)
		if f.Project != "" {
			q = q.Where("project = ?", f.Project)
		}
		if f.Sandbox != "" {
			q = q.Where("sandbox = ?", text(f.Sandbox))
		}
		return q
	})
}

func (r *reader) operations(ctx context.Context, where func(*bun.SelectQuery) *bun.SelectQuery) ([]sandbox.Operation, error) {
	var rows []operationRow
	if err := where(r.db.NewSelect().Model(&rows)).Scan(ctx); err != nil {
		return nil, r.fail(err, "read operations")
	}
	out := make([]sandbox.Operation, len(rows))
	for i := range rows {
		op, err := rows[i].operation()
		if err != nil {
			return nil, err
		}
		out[i] = op
	}
	return out, nil
}

// Template implements store.Reader.
func (r *reader) Template(ctx context.Context, project, name string) (store.Template, error) {
	list, err := r.templates(ctx, func(q *bun.SelectQuery) *bun.SelectQuery {
		return r.present(q.Where("project = ? AND name = ?", project, text(name)))
	})
	if err != nil {
		return store.Template{}, err
	}
	if len(list) == 0 {
		return store.Template{}, fault.New(fault.NotFound, "there is no template %s", name)
	}
	return list[0], nil
}

// TemplatesByDigest implements store.Reader.
func (r *reader) TemplatesByDigest(ctx context.Context, digest string) ([]store.Template, error) {
	return r.templates(ctx, func(q *bun.SelectQuery) *bun.SelectQuery { return q.Where("digest = ?", digest) })
}

// Templates implements store.Reader.
func (r *reader) Templates(ctx context.Context, project string, p store.Page) ([]store.Template, error) {
	return r.templates(ctx, func(q *bun.SelectQuery) *bun.SelectQuery {
		q = q.Where("project = ?", project)
		if p.After.ID != "" {
			q = q.Where("name > ?", text(p.After.ID))
		}
		if p.Limit > 0 {
			q = q.Limit(int64(p.Limit))
		}
		return q
	})
}

func (r *reader) templates(ctx context.Context, where func(*bun.SelectQuery) *bun.SelectQuery) ([]store.Template, error) {
	var rows []templateRow
	if err := where(r.db.NewSelect().Model(&rows).OrderExpr("project, name")).Scan(ctx); err != nil {
		return nil, r.fail(err, "read templates")
	}
	out := make([]store.Template, len(rows))
	for i := range rows {
		t, err := rows[i].template()
		if err != nil {
			return nil, err
		}
		out[i] = t
	}
	return out, nil
}

// Identity implements store.Reader.
func (r *reader) Identity(ctx context.Context, sandboxID string) (json.RawMessage, error) {
	row := identityRow{Sandbox: sandboxID}
	err := r.db.NewSelect().Model(&row).WherePK().Scan(ctx)
	if missing(err) {
		return nil, fault.New(fault.NotFound, "nothing is recorded about the identity of %s yet", sandboxID)
	}
	return raw(row.Items), r.fail(err, "read the identity")
}

// APIKeyByHash implements store.Reader.
func (r *reader) APIKeyByHash(ctx context.Context, hash []byte) (store.APIKey, error) {
	return r.key(ctx, "there is no such API key", func(q *bun.SelectQuery) *bun.SelectQuery {
		return q.Where("hash = ?", hex.EncodeToString(hash))
	})
}

// APIKey implements store.Reader.
func (r *reader) APIKey(ctx context.Context, project, id string) (store.APIKey, error) {
	return r.key(ctx, "there is no API key "+id, func(q *bun.SelectQuery) *bun.SelectQuery {
		if project != "" {
			q = q.Where("project = ?", text(project))
		}
		return q.Where("id = ?", text(id))
	})
}

func (r *reader) key(ctx context.Context, none string, where func(*bun.SelectQuery) *bun.SelectQuery) (store.APIKey, error) {
	list, err := r.keys(ctx, where)
	if err != nil {
		return store.APIKey{}, err
	}
	if len(list) == 0 {
		return store.APIKey{}, fault.New(fault.NotFound, "%s", none)
	}
	return list[0], nil
}

// APIKeys implements store.Reader.
func (r *reader) APIKeys(ctx context.Context, project string, p store.Page) ([]store.APIKey, error) {
	return r.keys(ctx, func(q *bun.SelectQuery) *bun.SelectQuery { return after(q.Where("project = ?", project), p) })
}

func (r *reader) keys(ctx context.Context, where func(*bun.SelectQuery) *bun.SelectQuery) ([]store.APIKey, error) {
	var rows []keyRow
	if err := where(r.db.NewSelect().Model(&rows)).Scan(ctx); err != nil {
		return nil, r.fail(err, "read API keys")
	}
	out := make([]store.APIKey, len(rows))
	for i := range rows {
		k, err := rows[i].key()
		if err != nil {
			return nil, err
		}
		out[i] = k
	}
	return out, nil
}

// Request implements store.Reader.
func (r *reader) Request(ctx context.Context, project, route, key string) (store.Request, error) {
	row := requestRow{Project: project, Route: text(route), Key: text(key)}
	err := r.db.NewSelect().Model(&row).WherePK().Scan(ctx)
	if missing(err) {
		return store.Request{}, fault.New(fault.NotFound, "the request key %s is not remembered", key)
	}
	if err != nil {
		return store.Request{}, r.fail(err, "read a request key")
	}
	return row.request()
}
