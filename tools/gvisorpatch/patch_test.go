package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// stand makes a stand-in for the untouched module: the files that edits name, each
// with its anchor.
func stand(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for _, e := range append([]edit{versionEdit()}, edits...) {
		path := filepath.Join(root, e.path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		old, _ := os.ReadFile(path)
		if err := os.WriteFile(path, append(old, "before\n"+e.anchor+"after\n"...), 0o444); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range addedNames() {
		path := strings.ReplaceAll(strings.TrimPrefix(name, "changes/"), "__", "/")
		if err := os.MkdirAll(filepath.Join(root, filepath.Dir(path)), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func from(dir string) func() (string, error) { return func() (string, error) { return dir, nil } }

func TestBuild(t *testing.T) {
	t.Parallel()
	src, out := stand(t), filepath.Join(t.TempDir(), "a", "gvisor")
	if fresh, err := build(out, false, from(src)); err != nil || fresh {
		t.Fatalf("first build: %v, %v", fresh, err)
	}
	for _, e := range append([]edit{versionEdit()}, edits...) {
		text, err := os.ReadFile(filepath.Join(out, e.path))
		if err != nil || !strings.Contains(string(text), e.text) {
			t.Errorf("%s does not have its change (%v)", e.path, err)
		}
		untouched, err := os.ReadFile(filepath.Join(src, e.path))
		if err != nil || !strings.Contains(string(untouched), e.anchor) {
			t.Errorf("%s of the source has changed (%v)", e.path, err)
		}
	}
	if _, err := os.Stat(filepath.Join(out, "runsc/boot/hutch.go")); err != nil {
		t.Error(err)
	}

	// A second time nothing is done, and the source is not even asked for.
	never := func() (string, error) { return "", errors.New("asked for the source") }
	if fresh, err := build(out, false, never); err != nil || !fresh {
		t.Errorf("second build: %v, %v", fresh, err)
	}
	// Stock is another thing.
	if fresh, err := build(out, true, from(src)); err != nil || fresh {
		t.Errorf("stock build: %v, %v", fresh, err)
	}
	if _, err := os.Stat(filepath.Join(out, "runsc/boot/hutch.go")); !os.IsNotExist(err) {
		t.Errorf("the stock module has a file of ours: %v", err)
	}
}

func TestBuildStopsWhenAnAnchorMoves(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(path string, text []byte) error{
		"moved":   func(path string, _ []byte) error { return os.WriteFile(path, []byte("else\n"), 0o644) },
		"doubled": func(path string, text []byte) error { return os.WriteFile(path, append(text, text...), 0o644) },
		"gone":    func(path string, _ []byte) error { return os.Remove(path) },
	} {
		for _, e := range edits {
			src, out := stand(t), filepath.Join(t.TempDir(), "gvisor")
			if _, err := build(out, true, from(src)); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(src, e.path)
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(os.Chmod(path, 0o644), spoil(path, text)); err != nil {
				t.Fatal(err)
			}
			_, err = build(out, false, from(src))
			if err == nil || !strings.Contains(err.Error(), e.path) || !strings.Contains(err.Error(), "docs/gvisor.md") {
				t.Errorf("%s in %s: got %v", name, e.path, err)
			}
			// What was there stays, and nothing else does.
			if left, _ := filepath.Glob(out + "*"); len(left) != 1 {
				t.Errorf("%s in %s: left %v", name, e.path, left)
			}
		}
	}
}

func TestBuildStopsWhenANameIsTaken(t *testing.T) {
	t.Parallel()
	src := stand(t)
	if err := os.WriteFile(filepath.Join(src, "runsc/boot/hutch.go"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := build(filepath.Join(t.TempDir(), "gvisor"), false, from(src))
	if err == nil || !strings.Contains(err.Error(), "runsc/boot/hutch.go") {
		t.Errorf("got %v", err)
	}
}

// The changes fit the module that is really pinned.
func TestChangesFitThePin(t *testing.T) {
	t.Parallel()
	if _, err := build(filepath.Join(t.TempDir(), "gvisor"), false, moduleFolder); err != nil {
		t.Error(err)
	}
	mod, err := os.ReadFile("../../cmd/hutch-runsc/go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if want := module + " " + version; !strings.Contains(string(mod), want) {
		t.Errorf("cmd/hutch-runsc/go.mod does not require %s", want)
	}
}
