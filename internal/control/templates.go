package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// Template gives a template by name.
func (c *Control) Template(ctx context.Context, a Actor, name string) (Template, error) {
	var t Template
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		t, err = r.Template(ctx, a.Project, name)
		return err
	})
	if fault.Is(err, fault.NotFound) {
		return t, noTemplate(name)
	}
	return t, err
}

func noTemplate(name string) error {
	return fault.New(fault.NotFound, "there is no template %s; `hutch templates ls` lists those that are", shown(name)).Because("template")
}

// missingTemplate refuses a sandbox whose template is not there, or not yet.
func (w *writer) missingTemplate(ctx context.Context, name string) error {
	active, err := w.ActiveOperations(ctx)
	if err != nil {
		return err
	}
	for _, op := range active {
		var p buildParams
		if op.Kind == sandbox.BuildTemplate && op.Project == w.project && json.Unmarshal(op.Params, &p) == nil && p.Name == name {
			return fault.New(fault.NotFound, "the template %s is being made just now; `hutch operations wait %s` waits for it, then try again",
				shown(name), op.ID).Because("template_building")
		}
	}
	return fault.New(fault.NotFound, "there is no template %s; `hutch templates ls` lists those that are, `hutch templates build` makes one",
		shown(name)).Because("template")
}

// Templates gives a page of templates, in the order of their names.
func (c *Control) Templates(ctx context.Context, a Actor, q PageQuery) (TemplatePage, error) {
	var out TemplatePage
	page, err := c.page(q.Limit, q.Cursor)
	if err != nil {
		return out, err
	}
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		rows, err := r.Templates(ctx, a.Project, page)
		out.Templates, out.NextCursor = cut(page, rows, func(t Template) store.Cursor { return store.Cursor{ID: t.Name} })
		return err
	})
	return out, err
}

// buildParams are the parameters of a build, its Result is a buildResult.
type buildParams struct {
	Name   string         `json:"name"`
	Source TemplateSource `json:"source"`
	// Host builds it: of several servers only the one that the host is connected to
	// looks after the build. "" is any.
	Host string `json:"host,omitempty"`
}

type buildResult struct {
	Template string `json:"template"`
	Digest   string `json:"digest"`
}

// hostPath says whether an image is named by a path on the host, and not by its name in a
// registry, which begins with a letter or a digit.
func hostPath(ref string) bool { return strings.HasPrefix(ref, "/") || strings.HasPrefix(ref, ".") }

// BuildTemplate makes a template, or a new version of one. The operation has no
// sandbox; a build of the same template from the same source that runs already is
// joined. Existing sandboxes keep the version that they were made from.
func (c *Control) BuildTemplate(ctx context.Context, a Actor, r BuildRequest) (sandbox.Operation, error) {
	check := func() error {
		if err := validName("template", r.Name); err != nil {
			return err
		}
		if r.Source.Debian == (r.Source.OCI != "") {
			return invalid("source", "cannot build template %s: give one source, either debian or an OCI image", r.Name)
		}
		if len(r.Source.OCI) > maxPath || !printable(r.Source.OCI) {
			return invalid("source", "%s is no OCI image: give a registry reference, a layout directory or a tar file", shown(r.Source.OCI))
		}
		if hostPath(r.Source.OCI) && !a.Operator() {
			return fault.New(fault.PermissionDenied, "cannot build template %s from %s: files of the server's machine are for the operator's keys; give the name of an image in a registry",
				r.Name, shown(r.Source.OCI)).Because("host_path")
		}
		if len(c.hosts) == 0 {
			return noHost(nil)
		}
		return nil
	}
	again := func(ctx context.Context, rd store.Reader, seen store.Request) (sandbox.Operation, error) {
		return rd.Operation(ctx, seen.Operation)
	}
	op, _, err := once(ctx, c, a, r.Idempotency, check, again, func(ctx context.Context, w *writer) (sandbox.Operation, error) {
		op, err := w.build(ctx, c, buildParams{Name: r.Name, Source: r.Source, Host: c.hostIDs()[0]})
		w.memo.Outcome, w.memo.Operation, w.memo.Resource = string(sandbox.Accept), op.ID, r.Name
		return op, err
	})
	if err != nil {
		return op, err
	}
	if op.Status.Active() && c.mine(op) {
		c.builds.ensure(c, op)
	}
	c.progress.overlay(&op)
	return op, nil
}

// build writes the operation of a build, or finds the one that does the same.
func (w *writer) build(ctx context.Context, c *Control, p buildParams) (sandbox.Operation, error) {
	if err := w.Lock(ctx, "build "+w.project+" "+p.Name); err != nil { // no index refuses a second one
		return sandbox.Operation{}, err
	}
	active, err := w.ActiveOperations(ctx)
	if err != nil {
		return sandbox.Operation{}, err
	}
	for _, op := range active {
		var other buildParams
		if op.Kind != sandbox.BuildTemplate || op.Project != w.project || json.Unmarshal(op.Params, &other) != nil || other.Name != p.Name {
			continue
		}
		if other.Source == p.Source {
			return op, nil
		}
		return op, fault.New(fault.Conflict, "cannot build template %s: the operation %s builds it from something else; wait for it, then try again",
			p.Name, op.ID).Because(op.ID)
	}
	params, err := json.Marshal(p)
	if err == nil {
		params, err = withCall(ctx, params)
	}
	if err != nil {
		return sandbox.Operation{}, err
	}
	op := sandbox.Operation{
		ID: c.newID("op"), Project: w.project, Kind: sandbox.BuildTemplate, Status: sandbox.Pending,
		Params: params, Actor: w.actor, CreatedAt: w.at, Version: 1,
	}
	return op, w.begin(ctx, op)
}

// DeleteTemplate removes a template by name and its image from the hosts. It is
// refused while a sandbox was made from it. An image that another template or an older
// sandbox has too stays.
func (c *Control) DeleteTemplate(ctx context.Context, a Actor, name string, idem Idempotency) error {
	again := func(context.Context, store.Reader, store.Request) (Template, error) { return Template{}, nil }
	t, replayed, err := once(ctx, c, a, idem, nil, again, func(ctx context.Context, w *writer) (Template, error) {
		t, err := w.Template(ctx, a.Project, name)
		if fault.Is(err, fault.NotFound) {
			return t, noTemplate(name)
		}
		if err != nil {
			return t, err
		}
		// It goes first and is looked for after: a creation that has read it has committed
		// by then, and one that comes later does not find it.
		w.memo.Outcome, w.memo.Resource = string(sandbox.Done), name
		if err := w.DeleteTemplate(ctx, a.Project, name); err != nil {
			return t, err
		}
		users, err := w.Sandboxes(ctx, store.SandboxFilter{Project: a.Project, Template: name, Page: store.Page{Limit: 1}})
		if err != nil {
			return t, err
		}
		if len(users) > 0 {
			return t, fault.New(fault.FailedPrecondition, "cannot delete template %s: sandboxes are made from it, %s for one; "+
				"delete them first (`hutch ls --template %s`)", name, users[0].Name, name).Because("template_in_use")
		}
		return t, w.event(ctx, "template.deleted", "", "", buildResult{Template: name, Digest: t.Digest})
	})
	if err == nil && !replayed {
		c.builds.remove(c, t.Digest)
	}
	return err
}

// errBuildCancelled is the cause of the context of a build that a user cancelled.
var errBuildCancelled = errors.New("control: the build was cancelled")

// builds owns the goroutines that build and remove templates, one at a time: they are
// heavy, and so a removal never meets a build of the same image.
type builds struct {
	mu   sync.Mutex
	run  context.Context // nil before start and after its end
	m    map[string]context.CancelCauseFunc
	slot chan struct{}
	done sync.WaitGroup
}

func newBuilds() *builds {
	return &builds{m: map[string]context.CancelCauseFunc{}, slot: make(chan struct{}, 1)}
}

func (b *builds) start(run context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.run = run
}

func (b *builds) wait() {
	b.mu.Lock()
	b.run = nil
	b.mu.Unlock()
	b.done.Wait()
}

// ensure has an operation's build running. It does not wait.
func (b *builds) ensure(c *Control, op sandbox.Operation) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.run == nil || b.m[op.ID] != nil {
		return
	}
	ctx, cancel := context.WithCancelCause(b.run)
	b.m[op.ID] = cancel
	b.done.Go(func() {
		if err := b.build(ctx, c, op); err != nil && !errors.Is(context.Cause(ctx), errClosed) {
			c.log.Error("the end of a template's build could not be written; it is built again", "op", op.ID, "err", err)
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.m, op.ID)
		cancel(nil)
	})
}

// builder gives the host that a build is for.
func (c *Control) builder(p buildParams) (hostproto.Host, error) {
	if p.Host == "" {
		return c.anyHost()
	}
	return c.host(p.Host)
}

// mine says whether a build is this server's to look after.
func (c *Control) mine(op sandbox.Operation) bool {
	var p buildParams
	if err := json.Unmarshal(op.Params, &p); err != nil || p.Host == "" {
		return true // its build says what is wrong with it
	}
	_, here := c.hosts[p.Host]
	return here || !c.shared
}

// cancel ends a build that runs here. One that does not run yet finds in its operation
// that it is cancelled.
func (b *builds) cancel(op string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if cancel := b.m[op]; cancel != nil {
		cancel(errBuildCancelled)
	}
}

// build makes a template and writes what came of it. When the Control closes it leaves
// the operation as it is: the next Start builds again.
func (b *builds) build(ctx context.Context, c *Control, op sandbox.Operation) error {
	var p buildParams
	if err := json.Unmarshal(op.Params, &p); err != nil {
		return fmt.Errorf("control: the parameters of %s: %w", op.ID, err)
	}
	select {
	case b.slot <- struct{}{}:
		defer func() { <-b.slot }()
	case <-ctx.Done():
	}
	// Who asked may have read the operation before an earlier run of it ended.
	over, cancelled := false, false
	if err := c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		now, err := r.Operation(ctx, op.ID)
		over = err == nil && !now.Status.Active()
		cancelled = err == nil && !now.CancelAt.IsZero()
		return err
	}); ctx.Err() == nil && (err != nil || over) {
		return err
	}
	var made hostproto.Template
	h, err := c.builder(p)
	if err == nil && ctx.Err() == nil && !cancelled {
		c.progress.accept(op.ID, c.instant())
		made, err = h.BuildTemplate(ctx, p.Source, func(step string, fraction float64) {
			c.progress.note(op.ID, step, fraction, c.instant())
		})
	}
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errClosed):
		return errClosed
	case errors.Is(cause, errBuildCancelled), cancelled:
		err = fault.New(fault.Cancelled, "the build of template %s was cancelled", p.Name)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.limits.CallTimeout)
	defer cancel()
	return c.store.Update(ctx, func(ctx context.Context, tx store.Tx) error { return c.built(ctx, tx, op.ID, p, made, err) })
}

// built writes the end of a build.
func (c *Control) built(ctx context.Context, tx store.Tx, id string, p buildParams, made hostproto.Template, failed error) error {
	op, err := tx.Operation(ctx, id)
	if err != nil || !op.Status.Active() {
		return err
	}
	c.progress.overlay(&op)
	w := c.writer(tx, op.Project, op.Actor, c.instant())
	op.EndedAt = w.at
	if failed != nil {
		f := fault.Of(failed)
		op.Status, op.Error = sandbox.Errored, &sandbox.OperationError{Code: string(f.Kind), Message: f.Message, Reason: f.Reason}
		if f.Kind == fault.Cancelled {
			op.Status = sandbox.Cancelled
		}
		c.log.Warn("a template was not built", "op", id, "template", p.Name, "err", failed)
		return w.end(ctx, &op)
	}
	source := "debian"
	if p.Source.OCI != "" {
		source = "oci:" + p.Source.OCI
	}
	err = tx.PutTemplate(ctx, store.Template{
		Project: op.Project, Name: p.Name, Digest: made.Digest, Source: source, Bytes: made.Bytes,
		User: made.User, Workdir: made.Workdir, Env: made.Env, CreatedAt: w.at,
	})
	if err != nil {
		return err
	}
	result := buildResult{Template: p.Name, Digest: made.Digest}
	if op.Result, err = json.Marshal(result); err != nil {
		return err
	}
	op.Status, op.Progress = sandbox.Succeeded, 1
	if err := w.event(ctx, "template.built", "", op.ID, result); err != nil {
		return err
	}
	return w.end(ctx, &op)
}

// remove has a template's image removed from the hosts, unless something needs it. It
// does not wait; what a crash leaves behind is bytes and nothing else.
func (b *builds) remove(c *Control, digest string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.run == nil {
		return
	}
	ctx := b.run
	b.done.Go(func() {
		select {
		case b.slot <- struct{}{}:
			defer func() { <-b.slot }()
		case <-ctx.Done():
			return
		}
		needed, err := c.needed(ctx, digest)
		for _, id := range c.hostIDs() {
			if err == nil && !needed {
				err = c.hosts[id].DeleteTemplate(ctx, digest)
			}
		}
		if err != nil && ctx.Err() == nil {
			c.log.Warn("the image of a deleted template was not removed", "digest", digest, "err", err)
		}
	})
}

// needed says whether a template, or a sandbox that has or may get its disk back, has the
// version.
func (c *Control) needed(ctx context.Context, digest string) (bool, error) {
	var needed bool
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		templates, err := r.TemplatesByDigest(ctx, digest)
		if err != nil {
			return err
		}
		users, err := r.Sandboxes(ctx, store.SandboxFilter{Version: digest, HasDisk: true, Page: store.Page{Limit: 1}})
		needed = len(templates)+len(users) > 0
		return err
	})
	return needed, err
}
