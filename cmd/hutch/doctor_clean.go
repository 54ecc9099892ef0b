package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/hutchrun/hutch/internal/cli"
	"github.com/hutchrun/hutch/internal/disk"
	"github.com/hutchrun/hutch/internal/fault"
)

// cleaned is what a clean-up did.
type cleaned struct {
	Removed []orphan  `json:"removed"`
	Ended   []string  `json:"ended"` // sandboxes that ran on without a server
	Kept    []orphan  `json:"kept"`
	Failed  []failure `json:"failed"`
}

// failure is an orphan that could not be removed.
type failure struct {
	orphan
	Error string `json:"error"`
}

// cleaning is what a clean-up was told.
type cleaning struct {
	erase       []string // sandboxes whose disks go too
	yes, asJSON bool
}

// askFirst asks before sandboxes that run without a server are ended, and gives them.
func askFirst(ctx context.Context, env cli.Env, l layout, yes bool) ([]string, error) {
	_, running, err := findOrphans(ctx, l)
	if err != nil || len(running) == 0 || yes {
		return running, err
	}
	count, them, run := howMany(running)
	return running, cli.Confirm(ctx, env, fmt.Sprintf("end %s that still %s without a server (`hutch up%s` takes %s over)", count, run, l.dataFlag(), them))
}

// cleanUp removes what nobody owns. Where no server lives, nothing in the kernel has
// an owner; beside a live one all that its journals know is left alone.
func cleanUp(ctx context.Context, env cli.Env, l layout, how cleaning) error {
	if os.Geteuid() != 0 {
		return fault.New(fault.PermissionDenied, "only root can clean up; use `sudo hutch doctor --clean`")
	}
	asked, err := askFirst(ctx, env, l, how.yes)
	if err != nil {
		return err
	}
	live, err := l.live()
	if err == nil && !live && l.hasState() {
		var lock *os.File
		if lock, err = l.lock(); errors.Is(err, errLocked) { // a server came up just now
			live, err = true, nil
		} else if err == nil {
			defer lock.Close()
		}
	}
	if err != nil {
		return err
	}
	s, err := newSurvey(l, live)
	if err != nil {
		return err
	}
	defer s.close()
	done := cleaned{Removed: []orphan{}, Ended: []string{}, Kept: []orphan{}, Failed: []failure{}}
	if live {
		err = s.clearOrphans(ctx, how.erase, &done)
	} else {
		err = s.clearAll(ctx, how, asked, &done)
	}
	if err != nil {
		return err
	}
	// An empty run directory of some other start says nothing about this one.
	own := slices.ContainsFunc(done.Removed, func(o orphan) bool { return filepath.Dir(o.Name) != runRoot })
	if !own && len(done.Ended)+len(done.Failed)+len(done.Kept) == 0 && !l.hasState() {
		return fault.New(fault.NotFound, "there is no installation at %s, and nothing is left of one; give its directory with --data", l.data)
	}
	return done.report(env, l, how.asJSON)
}

// clearOrphans removes the orphans that it finds now.
func (s *survey) clearOrphans(ctx context.Context, erase []string, done *cleaned) error {
	list, _, err := s.orphans(ctx)
	if err != nil {
		return err
	}
	for _, o := range list {
		switch {
		case o.Kept != "" && !slices.Contains(erase, o.Sandbox):
			done.Kept = append(done.Kept, o)
			continue
		case o.Kept != "":
			o.Kept = ""
		}
		if err := o.clear(ctx); err != nil {
			done.Failed = append(done.Failed, failure{o, fault.Of(err).Message})
			continue
		}
		done.Removed = append(done.Removed, o)
	}
	return nil
}

// clearAll ends and removes all that the installation has in the kernel, and the
// half-made files. Disks, saves and the database stay. asked are the sandboxes that were
// asked about.
func (s *survey) clearAll(ctx context.Context, how cleaning, asked []string, done *cleaned) error {
	_, waiting, err := s.look(ctx)
	if err != nil {
		return err
	}
	for _, id := range waiting {
		if !how.yes && !slices.Contains(asked, id) { // a server was up meanwhile
			return fault.New(fault.Conflict, "the sandbox %s began to run while you were asked; nothing was removed, try again", id)
		}
	}
	for _, id := range waiting {
		// On a full disk the note fails. It is not worth leaving all as it is.
		_ = s.owners.NoteClean(id)
	}
	done.Ended = append(done.Ended, waiting...)
	if s.pool != nil && s.pool.Made() {
		// What lies in the pool shows when it is mounted. One that does not mount must
		// not keep the rest from being removed.
		if err := s.pool.Show(ctx); err != nil {
			done.Failed = append(done.Failed, failure{orphan{Kind: disk.KindMount, Name: s.pool.Dir()}, fault.Of(err).Message})
		}
	}
	if err := s.clearOrphans(ctx, how.erase, done); err != nil {
		return err
	}
	things, err := s.things(ctx)
	if err != nil {
		return err
	}
	var all error
	for _, t := range things {
		// What lies in the data directory is the next server's: it finishes it or undoes it.
		if t.owner != ownerServer && !strings.HasPrefix(t.name, s.layout.data+"/") {
			all = errors.Join(all, t.clear(ctx))
		}
	}
	if all != nil {
		return fault.Wrap(all, fault.Unavailable, "what sandboxes left cannot be removed: %s; end what uses it and try again", fault.Of(all).Message)
	}
	if err := s.net.Remove(ctx); err != nil {
		return err
	}
	if s.pool != nil {
		if err := s.pool.TakeDown(ctx); err != nil {
			return err
		}
	}
	if err := s.driver.RemoveGroup(); err != nil {
		return err
	}
	if s.made {
		_ = os.Remove(s.layout.serverFile())
	}
	if mountedBelow(s.layout.run()) {
		return fault.New(fault.Unavailable, "something is still mounted below %s; end what uses it and try again", s.layout.run())
	}
	return os.RemoveAll(s.layout.run())
}

// report prints what was done; what could not be removed makes the command fail.
func (d cleaned) report(env cli.Env, l layout, asJSON bool) error {
	if asJSON {
		enc := json.NewEncoder(env.Stdout)
		enc.SetIndent("", "  ")
		if err := enc.Encode(d); err != nil {
			return err
		}
	} else {
		for _, o := range d.Removed {
			fmt.Fprintf(env.Stdout, "removed  %-9s %s\n", o.Kind, o.Name)
		}
		for _, id := range d.Ended {
			fmt.Fprintf(env.Stdout, "ended    %-9s %s\n", "sandbox", id)
		}
		for _, o := range d.Kept {
			fmt.Fprintf(env.Stdout, "kept     %-9s %s\n%18s → %s\n", o.Kind, o.Name, "", o.Kept)
		}
		for _, f := range d.Failed {
			fmt.Fprintf(env.Stdout, "failed   %-9s %s\n%18s %s\n", f.Kind, f.Name, "", f.Error)
		}
		count, _, _ := howMany(d.Ended)
		fmt.Fprintf(env.Stdout, "clean: %d things of %s removed, %s ended; all disks and saves that were not named stay\n", len(d.Removed), l.data, count)
	}
	if n := len(d.Failed); n > 0 {
		return fault.New(fault.Unavailable, "%d things could not be removed; end what uses them and try again", n)
	}
	return nil
}
