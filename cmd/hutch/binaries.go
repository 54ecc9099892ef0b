package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

// findBinary looks for one of hutch's other programs beside this one, then on PATH.
func findBinary(name string) (string, error) {
	if self, err := os.Executable(); err == nil {
		path := filepath.Join(filepath.Dir(self), name)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	if path, err := exec.LookPath(name); err == nil {
		return filepath.Abs(path)
	}
	return "", fault.New(fault.FailedPrecondition, "%s is neither beside hutch nor on PATH; `make build` makes all three programs", name)
}

// keepBinary copies a program into the installation under its digest: a sandbox that
// runs or sleeps needs the very one that it began with, whatever is installed later.
func keepBinary(dir, path string) (string, error) {
	src, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer src.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, src); err != nil {
		return "", err
	}
	kept := filepath.Join(dir, hex.EncodeToString(sum.Sum(nil))[:16], filepath.Base(path))
	if _, err := os.Stat(kept); err == nil {
		return kept, nil
	}
	if err := os.MkdirAll(filepath.Dir(kept), 0o755); err != nil {
		return "", err
	}
	if _, err := src.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	temp, err := os.CreateTemp(filepath.Dir(kept), ".new-*")
	if err != nil {
		return "", err
	}
	defer os.Remove(temp.Name()) // fails after the rename, as it should
	_, err = io.Copy(temp, src)
	if err == nil {
		err = temp.Chmod(0o755)
	}
	if err == nil {
		err = temp.Sync()
	}
	if closeErr := temp.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return "", err
	}
	return kept, os.Rename(temp.Name(), kept)
}

// versionOf asks a program of the runtime for its version, as saved memory names it.
func versionOf(ctx context.Context, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	line, _, _ := strings.Cut(string(out), "\n")
	said, ok := strings.CutPrefix(line, "runsc version ")
	if err != nil || !ok {
		return "", fault.Wrap(err, fault.Unavailable, "the program %s does not say its version; look at it, and remove its folder by hand if it is damaged", path)
	}
	return said, nil
}
