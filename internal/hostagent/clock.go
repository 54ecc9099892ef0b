package hostagent

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/sandbox"
)

const (
	// clockKept is how often host time is written down while nothing sets the wall
	// clock, and clockStep the step of the wall clock after which it is at once.
	clockKept = time.Minute
	clockStep = time.Second
)

// hostClock is host time (sandbox.Clock), kept in one file beside the journals.
type hostClock struct {
	read func() sandbox.Reading
	path string
	log  *slog.Logger
	// point is points.clock.
	point func(do func() error) error

	// before is the host time that was kept last before this agent: what ran then was known
	// to run up to it. Zero is none.
	before time.Time

	mu   sync.Mutex // never held across I/O
	c    sandbox.Clock
	step time.Duration // of the wall clock since it was kept
	kept time.Time     // host time when it was
}

// openClock goes on with the host time that is kept in dir, or begins it.
func openClock(dir string, read func() sandbox.Reading, point func(do func() error) error, log *slog.Logger) (*hostClock, error) {
	h := &hostClock{read: read, path: filepath.Join(dir, "clock.json"), point: point, log: log}
	if point == nil {
		h.point = func(do func() error) error { return do() }
	}
	data, err := os.ReadFile(h.path)
	if err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	if err == nil {
		err = json.Unmarshal(data, &h.c)
		if err == nil && h.c.Now.IsZero() {
			err = os.ErrInvalid
		}
		if err != nil {
			log.Error("the host's time was lost and begins anew with the wall clock", "path", h.path, "err", err)
		}
	}
	if err != nil {
		h.c = sandbox.NewClock(read())
	} else {
		h.before = h.c.Now
	}
	h.now()
	return h, h.write()
}

// now is host time.
func (h *hostClock) now() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	var step time.Duration
	h.c, step = h.c.Read(h.read())
	h.step += step
	return h.c.Now
}

// ahead is by how much host time is ahead of the wall clock.
func (h *hostClock) ahead() time.Duration {
	h.now()
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.c.Ahead()
}

// keep writes host time down where that is due. What fails is tried with the next look.
func (h *hostClock) keep() {
	now := h.now()
	h.mu.Lock()
	step, due := h.step, now.Sub(h.kept) >= clockKept
	h.mu.Unlock()
	if step.Abs() < clockStep && !due {
		return
	}
	if step.Abs() >= clockStep {
		h.log.Warn("the machine's wall clock was set; timers do not follow it", "shift", step)
	}
	if err := h.write(); err != nil {
		h.log.Error("the host's time could not be written and is tried again", "err", err)
	}
}

func (h *hostClock) write() error {
	h.mu.Lock()
	c := h.c
	h.mu.Unlock()
	data, err := json.Marshal(c)
	if err != nil {
		return err
	}
	if err := h.point(func() error { return replaceFile(h.path, data) }); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.kept, h.step = c.Now, 0
	return nil
}

// replaceFile puts a file with data in the place of another, whole or not at all.
func replaceFile(path string, data []byte) error {
	f, err := os.OpenFile(path+tempMark, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if _, err = f.Write(data); err == nil {
		err = f.Sync()
	}
	if closed := f.Close(); err == nil {
		err = closed
	}
	if err == nil {
		err = os.Rename(path+tempMark, path)
	}
	if err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// reading looks at the kernel's clocks.
func reading(boot string) sandbox.Reading {
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
		panic(err) // every kernel since 2.6.39 has it
	}
	return sandbox.Reading{Wall: time.Now(), Up: time.Duration(up.Nano()), Boot: boot}
}
