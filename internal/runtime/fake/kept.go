package fake

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime"
)

// OpenMachine makes a machine whose sandboxes outlive this process, kill -9 included:
// what runs is in files of dir, and runs again once the directory is opened anew. One
// process at a time may have it open. A guest is found again with the memory that it
// kept last (Boot.Keep), and with none where it kept nothing.
func OpenMachine(dir string, guest func(Boot) (Guest, error)) (*Machine, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	m := NewMachine(guest)
	m.dir = dir
	names, err := filepath.Glob(filepath.Join(dir, "*"+runsMark))
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if err := m.foundAgain(strings.TrimSuffix(name, runsMark)); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return m, nil
}

// The files of a boot that runs: what it is, and its memory.
const (
	runsMark   = ".runs"
	memoryMark = ".memory"
)

// keptBoot is what a machine keeps of a boot in a file. It runs while the file is there.
type keptBoot struct {
	Spec   runtime.Spec
	Paused bool
	Held   bool
}

// foundAgain goes on with a boot that another process left.
func (m *Machine) foundAgain(base string) error {
	data, err := os.ReadFile(base + runsMark)
	if err != nil {
		return err
	}
	var k keptBoot
	if err := json.Unmarshal(data, &k); err != nil {
		return err
	}
	memory, err := os.ReadFile(base + memoryMark)
	if err != nil && !os.IsNotExist(err) {
		return err
	}
	s := &sandbox{base: base, spec: k.Spec, paused: k.Paused, held: k.Held}
	if s.guest, err = m.guest(Boot{Spec: k.Spec, Restored: k.Held, Memory: memory, Exit: s.end, Keep: s.keepMemory}); err != nil {
		return err
	}
	if k.Paused {
		s.guest.Pause()
	}
	m.sandboxes[k.Spec.ID] = s
	return nil
}

// base names the files of a boot.
func (m *Machine) base(spec runtime.Spec) string {
	if m.dir == "" {
		return ""
	}
	return filepath.Join(m.dir, spec.ID+"@"+filepath.Base(spec.Dir))
}

// keep writes down what runs, where the machine keeps that.
func (s *sandbox) keep() error {
	if s.base == "" {
		return nil
	}
	data, err := json.Marshal(keptBoot{s.spec, s.paused, s.held})
	if err != nil {
		return err
	}
	return replace(s.base+runsMark, data)
}

// keepMemory writes down a guest's memory, where the machine keeps that.
func (s *sandbox) keepMemory(memory []byte) error {
	if s.base == "" {
		return nil
	}
	return replace(s.base+memoryMark, memory)
}

// forgotten removes the files of a boot that has ended: first that which says that it runs.
func (s *sandbox) forgotten() error {
	if s.base == "" {
		return nil
	}
	var all error
	for _, mark := range []string{runsMark, memoryMark} {
		if err := os.Remove(s.base + mark); err != nil && !os.IsNotExist(err) {
			all = errors.Join(all, err)
		}
	}
	return all
}

// replace puts a file in the place of another, whole or not at all. Nothing is synced:
// what a power cut leaves is no matter of a machine that is none.
func replace(path string, data []byte) error {
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// Kept lists the ids of the sandboxes that run on the machine of a directory, also while
// another process has it open.
func Kept(dir string) ([]string, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*"+runsMark))
	if err != nil {
		return nil, err
	}
	ids := make([]string, len(names))
	for i, name := range names {
		ids[i], _, _ = strings.Cut(filepath.Base(name), "@")
	}
	return ids, nil
}

// errNotKept says that a machine's own files failed.
func errNotKept(err error) error {
	return fault.Wrap(err, fault.Unavailable, "the machine cannot write down what runs; is its disk full?")
}
