package control

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// boss is the operator.
var boss = Actor{Project: "default", KeyID: "key_boss", Scopes: ScopeOperator}

// edit changes a project.
func (b *bench) edit(id string, s ProjectSettings) ProjectView {
	b.t.Helper()
	return must(b.EditProject(b.t.Context(), boss, id, s))(b.t)
}

// TestProjects_P1: the operator makes, lists and changes projects; anybody else sees its own,
// and another one is as unknown as one that never was.
func TestProjects_P1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	trial, ttl := "trial", 30*time.Minute
	idem := keyed("POST /v1/projects", "k1", `{"name":"web"}`)
	p := must(b.CreateProject(ctx, boss, "web", ProjectSettings{Idempotency: idem, Plan: &trial, TTL: &ttl, Quotas: &Quotas{Running: 3}}))(t)
	if p.ID != "web" || p.Plan != sandbox.PlanTrial || p.Quotas.Running != 3 || p.TTL != ttl || p.Use != (store.Use{}) {
		t.Errorf("the project is %+v", p)
	}
	if again := must(b.CreateProject(ctx, boss, "web", ProjectSettings{Idempotency: idem}))(t); again.ID != "web" || again.Plan != sandbox.PlanTrial {
		t.Errorf("the same call again gives %+v", again)
	}
	_, err := b.CreateProject(ctx, boss, "web", ProjectSettings{})
	wantFault(t, err, fault.Conflict, store.ReasonExists)
	_, err = b.CreateProject(ctx, boss, "Web", ProjectSettings{})
	wantFault(t, err, fault.InvalidArgument, "name")
	ours := Actor{Project: "web", KeyID: "key_w", Scopes: ScopesProject}
	_, err = b.CreateProject(ctx, ours, "mine", ProjectSettings{})
	wantFault(t, err, fault.PermissionDenied, "scope")

	if list := must(b.Projects(ctx, boss, PageQuery{}))(t); len(list.Projects) != 3 {
		t.Errorf("the operator sees %+v", list.Projects)
	}
	if list := must(b.Projects(ctx, ours, PageQuery{}))(t); len(list.Projects) != 1 || list.Projects[0].ID != "web" || list.NextCursor != "" {
		t.Errorf("a project sees %+v", list.Projects)
	}
	for _, id := range []string{"", "web"} {
		if p := must(b.GetProject(ctx, ours, id))(t); p.ID != "web" {
			t.Errorf("get %q gives %s", id, p.ID)
		}
	}
	for _, id := range []string{"default", "none", "No!"} {
		_, err := b.GetProject(ctx, ours, id)
		foreign := wantFault(t, err, fault.NotFound, "project")
		_, err = b.EditProject(ctx, ours, id, ProjectSettings{Plan: &trial})
		if f := wantFault(t, err, fault.NotFound, "project"); f.Message != foreign.Message {
			t.Errorf("a change of %s says %q, a look %q", id, f.Message, foreign.Message)
		}
	}
	_, err = b.EditProject(ctx, ours, "web", ProjectSettings{Plan: &trial})
	wantFault(t, err, fault.PermissionDenied, "scope")

	// It begins with the operator's templates, which then are its own.
	if page := must(b.Templates(ctx, ours, PageQuery{}))(t); len(page.Templates) != 1 || page.Templates[0].Name != "base" || page.Templates[0].Project != "web" {
		t.Errorf("the templates are %+v", page.Templates)
	}
	r := must(b.Create(ctx, ours, CreateRequest{Name: "otter"}))(t)
	if got := must(b.Wait(ctx, ours, r.Operation.ID, patience))(t); got.Status != sandbox.Succeeded || r.Sandbox.Policy.TTL != ttl {
		t.Errorf("a sandbox of the project: %+v, auto-stop %s", got, r.Sandbox.Policy.TTL)
	}
	if p := must(b.GetProject(ctx, boss, "web"))(t); p.Use.Sandboxes != 1 || p.Use.Running != 1 || p.Use.VCPUs != 1 || p.Use.MemoryBytes != 1<<30 || p.Use.DiskBytes != 4e9 {
		t.Errorf("it has %+v", p.Use)
	}

	wrong, far := "gold", 3*time.Hour
	for name, s := range map[string]ProjectSettings{
		"plan": {Plan: &wrong}, "quotas": {Quotas: &Quotas{VCPUs: -1}}, "rate": {Rate: &Rate{PerSecond: 1 << 40}}, "budget": {Budget: &wrong},
	} {
		_, err := b.EditProject(ctx, boss, "web", s)
		wantFault(t, err, fault.InvalidArgument, name)
	}
	_, err = b.EditProject(ctx, boss, "web", ProjectSettings{TTL: &far}) // A5: not even as the default
	wantFault(t, err, fault.FailedPrecondition, "trial_auto_stop")
}

// TestKeyScopes_P1: scopes, expiry and rotation; a key makes none that may do more than itself.
func TestKeyScopes_P1(t *testing.T) {
	t.Parallel()
	clock := &handClock{at: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
	b := newBench(t, func(c *Config) { c.Now = clock.now })
	ctx := t.Context()
	other, secret, err := b.CreateKey(ctx, boss, CreateKeyRequest{Name: "theirs", Project: "other", Scopes: []string{"read", "keys"}, Expires: clock.now().Add(time.Hour)})
	must0(t, err)
	they := must(b.Authenticate(ctx, secret))(t)
	if they != (Actor{Project: "other", KeyID: other.ID, Scopes: ScopeRead | ScopeKeys}) {
		t.Errorf("the key stands for %+v", they)
	}
	if !slices.Equal(other.Scopes.Names(), []string{"read", "keys"}) {
		t.Errorf("its scopes are %v", other.Scopes.Names())
	}
	for need, may := range map[Scopes]bool{ScopeRead: true, ScopeWrite: false, ScopeExec: false, ScopeKeys: true, ScopeOperator: false} {
		if err := they.Need(need); (err == nil) != may {
			t.Errorf("%v: %v", need.Names(), err)
		} else if !may {
			wantFault(t, err, fault.PermissionDenied, "scope")
		}
		must0(t, boss.Need(need))
	}
	_, _, err = b.CreateKey(ctx, they, CreateKeyRequest{Name: "more", Scopes: []string{"write"}})
	wantFault(t, err, fault.PermissionDenied, "scope")
	_, _, err = b.CreateKey(ctx, they, CreateKeyRequest{Name: "all"}) // the default is more than it may
	wantFault(t, err, fault.PermissionDenied, "scope")
	_, _, err = b.CreateKey(ctx, they, CreateKeyRequest{Name: "there", Project: "default", Scopes: []string{"read"}})
	wantFault(t, err, fault.NotFound, "project")
	_, _, err = b.CreateKey(ctx, boss, CreateKeyRequest{Name: "x", Scopes: []string{"root"}})
	wantFault(t, err, fault.InvalidArgument, "scopes")
	_, _, err = b.CreateKey(ctx, boss, CreateKeyRequest{Name: "x", Expires: clock.now()})
	wantFault(t, err, fault.InvalidArgument, "expires_at")
	less, _, err := b.CreateKey(ctx, they, CreateKeyRequest{Name: "less", Scopes: []string{"read"}})
	must0(t, err)
	if less.Project != "other" {
		t.Errorf("a key of %s", less.Project)
	}
	if page := must(b.Keys(ctx, boss, KeyQuery{Project: "other"}))(t); len(page.APIKeys) != 2 {
		t.Errorf("the operator sees %+v", page.APIKeys)
	}
	_, err = b.Keys(ctx, they, KeyQuery{Project: "default"})
	wantFault(t, err, fault.NotFound, "project")

	// Rotation: the old secret opens nothing from the next call on.
	boss2, _, err := b.CreateKey(ctx, boss, CreateKeyRequest{Name: "boss", Project: "other", Scopes: []string{"operator"}})
	must0(t, err)
	_, _, err = b.RotateKey(ctx, they, boss2.ID, Idempotency{}) // or who may do less would have the secret of who may do more
	wantFault(t, err, fault.PermissionDenied, "scope")
	rotated, fresh, err := b.RotateKey(ctx, they, other.ID, Idempotency{})
	must0(t, err)
	if fresh == secret || !rotated.RotatedAt.Equal(clock.now()) {
		t.Errorf("rotated to %+v", rotated)
	}
	_, err = b.Authenticate(ctx, secret)
	wantFault(t, err, fault.Unauthenticated, "")
	if a := must(b.Authenticate(ctx, fresh))(t); a != they {
		t.Errorf("the new secret stands for %+v", a)
	}
	clock.set(clock.now().Add(time.Hour)) // exactly then it is over
	_, err = b.Authenticate(ctx, fresh)
	wantFault(t, err, fault.Unauthenticated, "expired")
	must0(t, b.DeleteKey(ctx, boss, less.ID, Idempotency{})) // the operator's reach
}

// TestRate_P1: a key's calls pass as its project allows, then are told when to come again;
// another key has its own.
func TestRate_P1(t *testing.T) {
	t.Parallel()
	clock := &handClock{at: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
	b := newBench(t, func(c *Config) { c.Now = clock.now })
	ctx := t.Context()
	b.edit("other", ProjectSettings{Rate: &Rate{PerSecond: 4, Burst: 3}})
	_, one, err := b.CreateKey(ctx, boss, CreateKeyRequest{Name: "one", Project: "other"})
	must0(t, err)
	_, two, err := b.CreateKey(ctx, boss, CreateKeyRequest{Name: "two", Project: "other"})
	must0(t, err)
	for range 3 {
		must(b.Authenticate(ctx, one))(t)
	}
	_, err = b.Authenticate(ctx, one)
	if f := wantFault(t, err, fault.RateLimited, "key"); f.RetryAfter != 250*time.Millisecond {
		t.Errorf("come again after %s", f.RetryAfter)
	}
	must(b.Authenticate(ctx, two))(t)
	clock.set(clock.now().Add(249 * time.Millisecond))
	_, err = b.Authenticate(ctx, one)
	wantFault(t, err, fault.RateLimited, "key")
	clock.set(clock.now().Add(time.Millisecond))
	must(b.Authenticate(ctx, one))(t)
	_, err = b.Authenticate(ctx, one)
	wantFault(t, err, fault.RateLimited, "key")
	clock.set(clock.now().Add(time.Hour)) // no more than the burst is saved up
	for range 3 {
		must(b.Authenticate(ctx, one))(t)
	}
	_, err = b.Authenticate(ctx, one)
	wantFault(t, err, fault.RateLimited, "key")
	b.edit("other", ProjectSettings{Rate: &Rate{}})
	for range 20 {
		must(b.Authenticate(ctx, one))(t)
	}
}

// TestHostPaths: files of the server's machine are for the operator's keys, and a refusal
// does not say whether they are there.
func TestHostPaths(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, path := range []string{"/etc/passwd", "./x", "../x", "/nothing/there"} {
		r := BuildRequest{Name: "node", Source: TemplateSource{OCI: path}}
		_, err := b.BuildTemplate(t.Context(), Actor{Project: "default", Scopes: ScopesProject}, r)
		wantFault(t, err, fault.PermissionDenied, "host_path")
		op := must(b.BuildTemplate(t.Context(), boss, r))(t)
		b.ended(&op, sandbox.Succeeded)
	}
}

// TestTrial_A5: a project on the trial plan needs an auto-stop of 2 hours or less at every
// boot and every change; leaving it out is the default, and a plan that changes reaches a
// sandbox at its next boot.
func TestTrial_A5(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	none, long, short := TTL{Given: true, None: true}, TTL{Given: true, Seconds: 7201}, TTL{Given: true, Seconds: 7200}
	trial, standard := "trial", "standard"

	b.ready("before")
	must(b.Update(ctx, me, "before", UpdateRequest{TTL: none}))(t)
	b.edit("default", ProjectSettings{Plan: &trial})
	refused := func(err error) {
		t.Helper()
		wantFault(t, err, fault.FailedPrecondition, "trial_auto_stop")
	}
	for _, ttl := range []TTL{none, long} {
		_, err := b.Create(ctx, me, CreateRequest{TTL: ttl})
		refused(err)
	}
	if s := b.ready("plain"); s.Policy.TTL != time.Hour {
		t.Errorf("left out it is %s", s.Policy.TTL)
	}
	r := must(b.Create(ctx, me, CreateRequest{Name: "short", TTL: short}))(t)
	b.ended(r.Operation, sandbox.Succeeded)
	for _, ttl := range []TTL{none, long} {
		_, err := b.Update(ctx, me, "short", UpdateRequest{TTL: ttl})
		refused(err)
	}
	must(b.Update(ctx, me, "short", UpdateRequest{TTL: TTL{Given: true, Seconds: 60}}))(t)

	// What ran before goes on, sleeps and wakes; a boot of it, or of its copy, is refused.
	_, err := b.Fork(ctx, me, "before", ForkRequest{})
	refused(err)
	b.ended(must(b.Sleep(ctx, me, "before", Idempotency{}))(t).Operation, sandbox.Succeeded)
	b.ended(must(b.Wake(ctx, me, "before", Idempotency{}))(t).Operation, sandbox.Succeeded)
	b.ended(must(b.Stop(ctx, me, "before", Idempotency{}))(t).Operation, sandbox.Succeeded)
	_, err = b.Resume(ctx, me, "before", Idempotency{})
	refused(err)
	must(b.Update(ctx, me, "before", UpdateRequest{TTL: short}))(t)
	b.ended(must(b.Resume(ctx, me, "before", Idempotency{}))(t).Operation, sandbox.Succeeded)
	b.edit("default", ProjectSettings{Plan: &standard})
	must(b.Update(ctx, me, "before", UpdateRequest{TTL: none}))(t)
}

// TestQuotas_P1: each quota refuses what goes beyond it, with its name, and lets go of what
// it counted when that is gone.
func TestQuotas_P1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	refused := func(err error, reason string) {
		t.Helper()
		wantFault(t, err, fault.QuotaExceeded, reason)
	}
	create := func() error { _, err := b.Create(ctx, me, CreateRequest{}); return err }
	b.ready("one")
	b.ready("two")

	b.edit("default", ProjectSettings{Quotas: &Quotas{Sandboxes: 2}})
	refused(create(), "sandboxes")
	_, err := b.Fork(ctx, me, "one", ForkRequest{})
	refused(err, "sandboxes")
	b.ended(must(b.Stop(ctx, me, "two", Idempotency{}))(t).Operation, sandbox.Succeeded)
	refused(create(), "sandboxes") // stopped ones count
	b.ended(must(b.Resume(ctx, me, "two", Idempotency{}))(t).Operation, sandbox.Succeeded)

	for reason, q := range map[string]Quotas{"running": {Running: 2}, "vcpus": {VCPUs: 2}, "memory": {MemoryBytes: 5 << 29}} {
		b.edit("default", ProjectSettings{Quotas: &q})
		refused(create(), reason)
		b.ended(must(b.Sleep(ctx, me, "two", Idempotency{}))(t).Operation, sandbox.Succeeded)
		r := must(b.Create(ctx, me, CreateRequest{}))(t) // what sleeps has given it back
		b.ended(r.Operation, sandbox.Succeeded)
		_, err := b.Wake(ctx, me, "two", Idempotency{})
		refused(err, reason)
		b.ended(must(b.Delete(ctx, me, r.Sandbox.ID, DeleteRequest{}))(t).Operation, sandbox.Succeeded)
		b.ended(must(b.Wake(ctx, me, "two", Idempotency{}))(t).Operation, sandbox.Succeeded)
	}
	b.edit("default", ProjectSettings{Quotas: &Quotas{DiskBytes: 11e9}})
	refused(create(), "disk")
	r := must(b.Create(ctx, me, CreateRequest{DiskBytes: new(int64(3e9))}))(t)
	b.ended(r.Operation, sandbox.Succeeded)
	b.edit("default", ProjectSettings{Quotas: &Quotas{Forks: 2}})
	_, err = b.Fork(ctx, me, "one", ForkRequest{Count: new(int64(3))})
	refused(err, "forks_per_call")
	b.ended(must(b.Fork(ctx, me, "one", ForkRequest{Count: new(int64(2))}))(t).Operation, sandbox.Succeeded)
	b.edit("default", ProjectSettings{Quotas: &Quotas{}})
	must0(t, create())
}

// quotaRace has fifty creates, forks and wakes come at a time for the last places of a quota.
func quotaRace(t *testing.T, servers ...*bench) {
	t.Helper()
	a := servers[0]
	ctx := t.Context()
	a.edit("default", ProjectSettings{Quotas: &Quotas{Sandboxes: 12, Running: 9}})
	source := a.ready("source")
	for i := range 3 {
		a.reaches(fmt.Sprintf("sleeper-%d", i), sandbox.Sleeping)
	}
	var mu sync.Mutex
	admitted, refused := 0, 0
	var all sync.WaitGroup
	for i := range 50 {
		server := servers[i%len(servers)]
		all.Go(func() {
			var err error
			adds := 1
			switch {
			case i%10 == 9: // only one fork is at work on the source at a time
				adds = 2
				_, err = server.Fork(ctx, me, source.ID, ForkRequest{Count: new(int64(2))})
			case i%10 == 4 && i < 30:
				_, err = server.Wake(ctx, me, fmt.Sprintf("sleeper-%d", i/10), Idempotency{})
			default:
				_, err = server.Create(ctx, me, CreateRequest{})
			}
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				admitted += adds
			case fault.Is(err, fault.QuotaExceeded):
				refused++
			case !fault.Is(err, fault.Conflict):
				t.Errorf("call %d: %v", i, err)
			}
		})
	}
	all.Wait()
	use := must(a.GetProject(ctx, boss, "default"))(t).Use
	if use.Sandboxes > 12 || use.Running > 9 || int(use.Running) != admitted+1 || refused == 0 {
		t.Errorf("the project has %+v, %d were admitted and %d refused", use, admitted, refused)
	}
	if use.Running < 8 { // a fork of two may find one place left
		t.Errorf("places were left: %+v", use)
	}
}

func TestFiftyAtAQuota_P1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	quotaRace(t, b)
}

func TestFiftyAtAQuotaOfTwoServers_P1(t *testing.T) {
	t.Parallel()
	host := newFakeHost()
	both := map[string]*fakeHost{"local": host}
	a, b := twoServers(t, [2]map[string]*fakeHost{both, both})
	quotaRace(t, a, b)
}

// TestEventsOfAProject_P1: a project is told of its own events, also of those that the
// operator caused, and of no others.
func TestEventsOfAProject_P1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.ready("otter")
	must(b.CreateProject(t.Context(), boss, "web", ProjectSettings{}))(t)
	for _, e := range must(b.Events(t.Context(), Actor{Project: "web"}, EventQuery{}))(t).Events {
		if e.Project != "web" {
			t.Errorf("an event of %s: %+v", e.Project, e)
		}
	}
	if n := len(must(b.Events(t.Context(), Actor{Project: "web"}, EventQuery{}))(t).Events); n != 1 {
		t.Errorf("%d events of the new project", n)
	}
}
