package main

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// The pin. cmd/hutch-runsc/go.mod names the same version; a test compares them.
const (
	module  = "gvisor.dev/gvisor"
	version = "v0.0.0-20260224225140-573d5e7127a8"
	sum     = "h1:Zy8IV/+FMLxy6j6p87vk/vQGKcdnbprwjTxc8UiUtsA="
)

// stampName is the file in the written folder that says what was written.
const stampName = ".hutch-changes"

// added holds whole new files: changes/runsc__boot__hutch.go.txt becomes
// runsc/boot/hutch.go. The suffix keeps the go tool from compiling them here.
//
//go:embed changes/*.go.txt
var added embed.FS

// edit replaces one piece of text in one file of the module.
type edit struct {
	path   string // inside the module
	anchor string // must occur exactly once
	text   string // what stands there afterwards
}

// build writes the module to out, changed unless stock, and says whether it was up to
// date already. source gives the folder of the untouched module.
func build(out string, stock bool, source func() (string, error)) (fresh bool, err error) {
	stamp := stampText(stock)
	if old, err := os.ReadFile(filepath.Join(out, stampName)); err == nil && string(old) == stamp {
		return true, nil
	}
	src, err := source()
	if err != nil {
		return false, err
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return false, err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(out), filepath.Base(out)+".tmp-")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(tmp)
	if err := copyTree(tmp, src); err != nil {
		return false, err
	}
	if !stock {
		if err := apply(tmp, append(slices.Clone(edits), versionEdit())); err != nil {
			return false, err
		}
		if err := addFiles(tmp); err != nil {
			return false, err
		}
	}
	if err := os.WriteFile(filepath.Join(tmp, stampName), []byte(stamp), 0o644); err != nil {
		return false, err
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return false, err
	}
	if err := os.RemoveAll(out); err != nil {
		return false, err
	}
	return false, os.Rename(tmp, out)
}

// stampText names the pin and a digest of what is changed.
func stampText(stock bool) string {
	if stock {
		return version + " stock\n"
	}
	return version + " " + changesDigest() + "\n"
}

// runscVersion is the pin's date and commit and the beginning of the changes' digest.
func runscVersion() string {
	return strings.TrimPrefix(version, "v0.0.0-") + "+hutch." + changesDigest()[:12]
}

func changesDigest() string {
	h := sha256.New()
	for _, e := range edits {
		fmt.Fprintf(h, "%q %q %q\n", e.path, e.anchor, e.text)
	}
	for _, name := range addedNames() {
		text, _ := added.ReadFile(name)
		fmt.Fprintf(h, "%q %q\n", name, text)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// apply makes every edit, or says which anchor has moved.
func apply(root string, edits []edit) error {
	for _, e := range edits {
		path := filepath.Join(root, e.path)
		text, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("%s: the file that this change edits is gone from %s: %w; see docs/gvisor.md, \"When the pin moves\"", e.path, version, err)
		}
		if n := bytes.Count(text, []byte(e.anchor)); n != 1 {
			return fmt.Errorf("%s: the anchor of this change occurs %d times in %s, not once; see docs/gvisor.md, \"When the pin moves\"; the anchor is:\n%s", e.path, n, version, e.anchor)
		}
		text = bytes.Replace(text, []byte(e.anchor), []byte(e.text), 1)
		if err := os.WriteFile(path, text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

func addedNames() []string {
	names, _ := fs.Glob(added, "changes/*.go.txt")
	slices.Sort(names)
	return names
}

// addFiles writes the new files, none of which may exist in the module.
func addFiles(root string) error {
	for _, name := range addedNames() {
		path := strings.TrimSuffix(strings.TrimPrefix(name, "changes/"), ".txt")
		path = strings.ReplaceAll(path, "__", "/")
		if _, err := os.Lstat(filepath.Join(root, path)); err == nil {
			return fmt.Errorf("%s: %s has a file of this name now; see docs/gvisor.md, \"When the pin moves\"", path, version)
		}
		text, err := added.ReadFile(name)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(root, path), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// copyTree copies the regular files of src with modes that allow writing: the
// module cache is read-only.
func copyTree(dst, src string) error {
	return filepath.WalkDir(src, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(src, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			return os.MkdirAll(filepath.Join(dst, rel), 0o755)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dst, rel), text, 0o644)
	})
}

// moduleFolder finds the pinned module in the module cache, downloading it when it
// is not there, and checks its sum.
func moduleFolder() (string, error) {
	cmd := exec.Command("go", "mod", "download", "-json", module+"@"+version)
	cmd.Dir = os.TempDir() // outside of this module, so that its go.sum is left alone
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod")
	out, err := cmd.Output()
	var got struct{ Dir, Sum, Error string }
	if jsonErr := json.Unmarshal(out, &got); jsonErr != nil || got.Dir == "" {
		return "", fmt.Errorf("%s@%s cannot be downloaded (%w, %s); check GOPROXY and the network", module, version, err, got.Error)
	}
	if got.Sum != sum {
		return "", fmt.Errorf("%s@%s has the sum %s, not %s; the module proxy serves something else", module, version, got.Sum, sum)
	}
	return got.Dir, nil
}
