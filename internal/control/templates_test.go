package control

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
)

var debian = TemplateSource{Debian: true}

func TestTemplates(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	op := must(b.BuildTemplate(ctx, me, BuildRequest{Name: "node", Source: TemplateSource{OCI: "node:22"}}))(t)
	if op.Kind != sandbox.BuildTemplate || op.Sandbox != "" {
		t.Errorf("the build: %+v", op)
	}
	if ended := b.ended(&op, sandbox.Succeeded); ended.Progress != 1 || !strings.Contains(string(ended.Result), "sha256:build-1") {
		t.Errorf("the build ended so: %+v", ended)
	}
	tmpl := must(b.Template(ctx, me, "node"))(t)
	if tmpl.Digest != "sha256:build-1" || tmpl.Source != "oci:node:22" || tmpl.User != "agent" || tmpl.CreatedAt.IsZero() {
		t.Errorf("the template: %+v", tmpl)
	}
	page := must(b.Templates(ctx, me, PageQuery{Limit: new(int64(1))}))(t)
	next := must(b.Templates(ctx, me, PageQuery{Cursor: page.NextCursor}))(t)
	if page.Templates[0].Name != "base" || len(next.Templates) != 1 || next.Templates[0].Name != "node" || next.NextCursor != "" {
		t.Errorf("pages: %+v, %+v", page, next)
	}

	// F7: a new version does not reach what was made from the old one.
	s := must(b.Create(ctx, me, CreateRequest{Name: "otter", Template: "node"}))(t)
	b.ended(s.Operation, sandbox.Succeeded)
	op = must(b.BuildTemplate(ctx, me, BuildRequest{Name: "node", Source: debian}))(t)
	b.ended(&op, sandbox.Succeeded)
	if got := b.get("otter"); got.Spec.Version != "sha256:build-1" {
		t.Errorf("the sandbox has version %s", got.Spec.Version)
	}
	if got := must(b.Template(ctx, me, "node"))(t); got.Digest != "sha256:build-2" || got.Source != "debian" {
		t.Errorf("the new version: %+v", got)
	}

	err := b.DeleteTemplate(ctx, me, "node", Idempotency{})
	if f := wantFault(t, err, fault.FailedPrecondition, "template_in_use"); !strings.Contains(f.Message, "otter") {
		t.Errorf("%q does not name the sandbox", f.Message)
	}
	b.ended(must(b.Delete(ctx, me, "otter", DeleteRequest{}))(t).Operation, sandbox.Succeeded)
	must0(t, b.DeleteTemplate(ctx, me, "node", Idempotency{}))
	until(t, "the image is removed", func() bool { return slices.Equal(b.host.removed(), []string{"sha256:build-2"}) })
	wantFault(t, b.DeleteTemplate(ctx, me, "node", Idempotency{}), fault.NotFound, "template")
	_, err = b.Template(ctx, me, "node")
	wantFault(t, err, fault.NotFound, "template")
	for _, r := range []BuildRequest{
		{Name: "X", Source: debian}, {Name: "x"}, {Name: "x", Source: TemplateSource{Debian: true, OCI: "a"}}, {Name: "x", Source: TemplateSource{OCI: "a\nb"}},
	} {
		_, err := b.BuildTemplate(ctx, me, r)
		wantFault(t, err, fault.InvalidArgument, "")
	}
}

// TestBuildsAtATime: the same build is joined, another of its name is a conflict; one
// runs at a time; it can be cancelled, waiting or running; it can fail.
func TestBuildsAtATime(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	release := make(chan struct{})
	b.host.script(func(h *fakeHost) {
		h.build = func(ctx context.Context, _ func(string, float64)) error {
			select {
			case <-release:
				return errors.New("mmdebstrap: exit status 25")
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	first := must(b.BuildTemplate(ctx, me, BuildRequest{Name: "a", Source: debian}))(t)
	until(t, "it runs and tells its step", func() bool {
		op := must(b.Operation(ctx, me, first.ID))(t)
		return op.Status == sandbox.Running && op.Step == "unpack" && op.Progress == 0.5
	})
	// A sandbox of it is told that it comes, and what to wait for.
	_, err := b.Create(ctx, me, CreateRequest{Template: "a"})
	if f := wantFault(t, err, fault.NotFound, "template_building"); !strings.Contains(f.Message, "hutch operations wait "+first.ID) {
		t.Errorf("%q", f.Message)
	}
	_, err = b.Create(ctx, me, CreateRequest{Template: "other"})
	wantFault(t, err, fault.NotFound, "template")
	if join := must(b.BuildTemplate(ctx, me, BuildRequest{Name: "a", Source: debian}))(t); join.ID != first.ID {
		t.Errorf("the same build again is %s", join.ID)
	}
	_, err = b.BuildTemplate(ctx, me, BuildRequest{Name: "a", Source: TemplateSource{OCI: "x"}})
	wantFault(t, err, fault.Conflict, first.ID)
	waiting := must(b.BuildTemplate(ctx, me, BuildRequest{Name: "b", Source: debian}))(t)
	third := must(b.BuildTemplate(ctx, me, BuildRequest{Name: "c", Source: debian}))(t)
	must(b.Cancel(ctx, me, waiting.ID))(t)
	b.ended(&waiting, sandbox.Cancelled)
	must(b.Cancel(ctx, me, first.ID))(t)
	if op := b.ended(&first, sandbox.Cancelled); op.Error.Code != "cancelled" {
		t.Errorf("cancelled: %+v", op.Error)
	}
	close(release)
	op := b.ended(&third, sandbox.Errored)
	if op.Error.Code != "internal" || strings.Contains(op.Error.Message, "mmdebstrap") {
		t.Errorf("a private cause is public: %+v", op.Error)
	}
	if n := b.log.count(func(l string) bool { return strings.Contains(l, "mmdebstrap") }); n != 1 {
		t.Errorf("the cause was logged %d times", n)
	}
}

// TestBuildAcrossARestart: a build that the end of the process cut is made again.
func TestBuildAcrossARestart(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.host.script(func(h *fakeHost) {
		h.build = func(ctx context.Context, _ func(string, float64)) error { <-ctx.Done(); return ctx.Err() }
	})
	op := must(b.BuildTemplate(t.Context(), me, BuildRequest{Name: "a", Source: debian}))(t)
	until(t, "it runs", func() bool { b.host.mu.Lock(); defer b.host.mu.Unlock(); return b.host.builds == 1 })
	b.host.script(func(h *fakeHost) { h.build = nil })
	b.restart()
	b.ended(&op, sandbox.Succeeded)
	if got := must(b.Template(t.Context(), me, "a"))(t); got.Digest != "sha256:build-2" {
		t.Errorf("the template: %+v", got)
	}
}

// TestSharedImagesStay: an image that another template has is not removed with one name.
func TestSharedImagesStay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		must0(t, b.putTemplate("twin", "sha256:base"))
		must0(t, b.DeleteTemplate(t.Context(), me, "twin", Idempotency{}))
		synctest.Wait()
		if got := b.host.removed(); len(got) != 0 {
			t.Errorf("removed: %v", got)
		}
		must0(t, b.DeleteTemplate(t.Context(), me, "base", Idempotency{}))
		time.Sleep(time.Second)
		if got := b.host.removed(); !slices.Equal(got, []string{"sha256:base"}) {
			t.Errorf("removed: %v", got)
		}
	})
}

func TestKeys_P1(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		ctx := t.Context()
		key, secret, err := b.CreateKey(ctx, me, CreateKeyRequest{Name: "laptop"})
		must0(t, err)
		if len(secret) != secretLength || !strings.HasPrefix(secret, "hutch_") || !strings.HasPrefix(secret, key.Prefix) || len(key.Prefix) != 12 ||
			strings.Contains(string(key.Hash), secret) || len(key.Hash) != 32 {
			t.Errorf("key %+v, secret %q", key, secret)
		}
		_, second, err := b.CreateKey(ctx, Actor{Project: "other", Scopes: ScopesProject}, CreateKeyRequest{Name: "laptop"})
		must0(t, err)
		if second == secret {
			t.Error("two keys have one secret")
		}
		if a := must(b.Authenticate(ctx, secret))(t); a != (Actor{Project: "default", KeyID: key.ID, Scopes: ScopesProject}) {
			t.Errorf("it stands for %+v", a)
		}
		if a := must(b.Authenticate(ctx, second))(t); a.Project != "other" {
			t.Errorf("it stands for %+v", a)
		}
		for _, bad := range []string{"", "hutch_", secret[:len(secret)-1], secret + "a", strings.ToUpper(secret), "hutch_" + strings.Repeat("a", 52), strings.Repeat("x", 1<<20)} {
			_, err := b.Authenticate(ctx, bad)
			if f := wantFault(t, err, fault.Unauthenticated, ""); strings.Contains(f.Message, secret[6:20]) {
				t.Error("the message has a secret in it")
			}
		}
		time.Sleep(2 * time.Second)
		page := must(b.Keys(ctx, me, KeyQuery{}))(t)
		if len(page.APIKeys) != 1 || page.APIKeys[0].LastUsed.IsZero() {
			t.Errorf("keys: %+v", page)
		}
		used := page.APIKeys[0].LastUsed
		for range 100 {
			must(b.Authenticate(ctx, secret))(t)
		}
		time.Sleep(2 * time.Second)
		if again := must(b.Keys(ctx, me, KeyQuery{}))(t); !again.APIKeys[0].LastUsed.Equal(used) {
			t.Error("each use is a write")
		}
		time.Sleep(2 * time.Minute)
		must(b.Authenticate(ctx, secret))(t)
		time.Sleep(2 * time.Second)
		if again := must(b.Keys(ctx, me, KeyQuery{}))(t); !again.APIKeys[0].LastUsed.After(used) {
			t.Error("a later use is not recorded")
		}
		wantFault(t, b.DeleteKey(ctx, Actor{Project: "other"}, key.ID, Idempotency{}), fault.NotFound, "key")
		must0(t, b.DeleteKey(ctx, me, key.ID, Idempotency{}))
		_, err = b.Authenticate(ctx, secret)
		wantFault(t, err, fault.Unauthenticated, "")
		for _, name := range []string{"", "a\nb", strings.Repeat("x", 101)} {
			_, _, err := b.CreateKey(ctx, me, CreateKeyRequest{Name: name})
			wantFault(t, err, fault.InvalidArgument, "name")
		}
		must0(t, b.EnsureProject(ctx, "default"))
		wantFault(t, b.EnsureProject(ctx, "No Project"), fault.InvalidArgument, "")
	})
}
