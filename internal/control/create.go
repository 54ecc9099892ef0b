package control

import (
	"cmp"
	"context"
	"fmt"
	"maps"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// originTemplate and originFork are the kinds of sandbox.Origin.
const (
	originTemplate = "template"
	originFork     = "fork"
)

// Create makes a sandbox from a template. It is creating when Create returns; the
// operation tells when it is ready.
func (c *Control) Create(ctx context.Context, a Actor, r CreateRequest) (Result, error) {
	var spec sandbox.Spec
	var policy sandbox.Policy
	var host hostproto.HostInfo
	check := func() (err error) {
		if host, err = c.place(ctx); err != nil {
			return err
		}
		if spec, err = c.spec(r, host); err != nil {
			return err
		}
		if policy, spec.Sleep, err = r.Sleep.set(c.limits.Policy, sandbox.SleepManual); err != nil {
			return err
		}
		if policy, err = r.Policy.set(policy); err != nil {
			return err
		}
		if r.Firewall != nil {
			f, err := r.Firewall.Normal()
			if err != nil {
				return err
			}
			policy.Firewall = &f
		}
		policy, err = r.TTL.set(policy, spec.Sleep, c.limits.Bounds)
		return err
	}
	return c.onSandboxes(ctx, a, r.Idempotency, check, func(ctx context.Context, w *writer) (Result, error) {
		tmpl, err := w.Template(ctx, a.Project, spec.Template)
		if fault.Is(err, fault.NotFound) {
			return Result{}, w.missingTemplate(ctx, spec.Template)
		}
		if err != nil {
			return Result{}, err
		}
		spec := pinned(spec, tmpl)
		name := r.Name
		if name == "" {
			if name, err = c.freeName(ctx, w); err != nil {
				return Result{}, err
			}
		}
		policy, err := w.policyOf(ctx, policy, r.TTL)
		if err != nil {
			return Result{}, err
		}
		if err := w.within(ctx, c, more{verb: sandbox.Create, name: name, add: another(spec, 1), spec: spec, policy: &policy}); err != nil {
			return Result{}, err
		}
		s := w.newSandbox(c, name, host.ID, spec, r.Labels, sandbox.Origin{Kind: originTemplate})
		s.Policy = policy
		op, err := w.create(ctx, c, s, nil)
		if err != nil {
			return Result{}, err
		}
		return Result{Sandbox: s, Operation: &op, Outcome: sandbox.Accept}, nil
	})
}

// spec turns a request into a spec without the template's version.
func (c *Control) spec(r CreateRequest, host hostproto.HostInfo) (sandbox.Spec, error) {
	spec := sandbox.Spec{Template: r.Template, Env: maps.Clone(r.Env), User: r.User, Workdir: r.Workdir}
	if spec.Template == "" {
		spec.Template = c.limits.Template
	}
	if len(host.Runtimes) > 0 {
		spec.Runtime = host.Runtimes[0]
	}
	if r.Name != "" {
		if err := validName("sandbox", r.Name); err != nil {
			return spec, err
		}
	}
	for _, err := range []error{validLabels(r.Labels), validEnv(r.Env), validUser(r.User), validWorkdir(r.Workdir)} {
		if err != nil {
			return spec, err
		}
	}
	cpus, err := c.limits.CPUs.below(int64(host.CPUs)).choose("cpus", r.CPUs)
	if err != nil {
		return spec, err
	}
	spec.CPUs = int(cpus)
	if spec.Memory, err = c.limits.Memory.below(host.MemoryBytes).choose("memory_bytes", r.MemoryBytes); err != nil {
		return spec, err
	}
	spec.Disk, err = c.limits.Disk.below(host.DiskMaxBytes).choose("disk_bytes", r.DiskBytes)
	return spec, err
}

// pinned is a spec on the present version of its template, which says what the request
// left open. Later versions of the template do not reach the sandbox (F7).
func pinned(spec sandbox.Spec, tmpl store.Template) sandbox.Spec {
	spec.Version = tmpl.Digest
	spec.User = cmp.Or(spec.User, tmpl.User)
	spec.Workdir = cmp.Or(spec.Workdir, tmpl.Workdir)
	env := maps.Clone(tmpl.Env)
	if env == nil {
		env = map[string]string{}
	}
	maps.Copy(env, spec.Env)
	spec.Env = env
	return spec
}

// newSandbox gives the row of a sandbox that begins now.
func (w *writer) newSandbox(c *Control, name, host string, spec sandbox.Spec, labels map[string]string, origin sandbox.Origin) sandbox.Sandbox {
	if labels == nil {
		labels = map[string]string{}
	}
	return sandbox.Sandbox{
		ID: c.newID("sbx"), Project: w.project, Name: name, State: sandbox.Creating, Host: host,
		Spec: spec, Labels: maps.Clone(labels), Origin: origin,
		CreatedAt: w.at, UpdatedAt: w.at, StateSince: w.at, Version: 1,
	}
}

// create writes a new sandbox, the operation that prepares it and their events.
func (w *writer) create(ctx context.Context, c *Control, s sandbox.Sandbox, params []byte) (sandbox.Operation, error) {
	op := sandbox.Operation{
		ID: c.newID("op"), Project: s.Project, Sandbox: s.ID, Kind: sandbox.Create, Status: sandbox.Pending,
		Actor: w.actor, CreatedAt: w.at, Version: 1,
	}
	var err error
	if op.Params, err = withCall(ctx, params); err != nil {
		return op, err
	}
	if err := w.InsertSandbox(ctx, s); err != nil {
		return op, err
	}
	change := stateChange{State: s.State, Name: s.Name, Origin: s.Origin.Kind, Source: s.Origin.Source}
	if err := w.event(ctx, "sandbox."+string(s.State), s.ID, op.ID, change); err != nil {
		return op, err
	}
	if err := w.begin(ctx, op); err != nil {
		return op, err
	}
	return op, w.meterAccepted(ctx, c, s, op)
}

// stateChange is the data of the events sandbox.STATE.
type stateChange struct {
	State      sandbox.State `json:"state"`
	From       sandbox.State `json:"from,omitempty"`
	Cause      sandbox.Event `json:"cause,omitempty"`
	Reason     string        `json:"reason,omitempty"`
	Message    string        `json:"message,omitempty"`
	Generation int64         `json:"generation,omitempty"`
	Name       string        `json:"name,omitempty"`   // of a new one
	Origin     string        `json:"origin,omitempty"` // of a new one
	Source     string        `json:"source,omitempty"` // of a new fork
}

// freeName makes up a name that nothing in the project holds.
func (c *Control) freeName(ctx context.Context, w *writer) (string, error) {
	for numbers := 90; ; numbers *= 10 { // ever more room, so that it ends
		for range 10 {
			name := fmt.Sprintf("%s-%s-%d", adjectives[c.pick(len(adjectives))], nouns[c.pick(len(nouns))], 10+c.pick(numbers))
			held, err := w.NameHeld(ctx, w.project, name)
			if err != nil || !held {
				return name, err
			}
		}
	}
}

// The words of generated names: short, friendly, easy to say.
var (
	adjectives = []string{
		"amber", "bold", "brave", "bright", "brisk", "calm", "clever", "cosy", "crisp", "eager", "early", "fair",
		"fond", "gentle", "glad", "golden", "happy", "jolly", "keen", "kind", "lively", "lucky", "mellow", "merry",
		"mild", "neat", "nimble", "noble", "patient", "plucky", "proud", "quick", "quiet", "rosy", "sunny", "swift",
		"tidy", "warm", "wise", "witty",
	}
	nouns = []string{
		"badger", "beaver", "bison", "crane", "curlew", "deer", "dormouse", "duck", "falcon", "ferret", "finch", "fox",
		"hare", "hedgehog", "heron", "ibex", "jay", "kestrel", "lark", "linnet", "lynx", "magpie", "marten", "mole",
		"newt", "otter", "owl", "plover", "puffin", "rabbit", "raven", "robin", "seal", "sparrow", "squirrel", "stoat",
		"swan", "thrush", "vole", "wren",
	}
)
