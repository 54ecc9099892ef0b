package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/config"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// restFile has what was put away when the machine, or the server with --sleep, went down,
// for the next start to bring back (R7).
func (l layout) restFile() string { return filepath.Join(l.data, "rest.json") }

func (l layout) readRest() (list []control.Rested, err error) {
	data, err := os.ReadFile(l.restFile())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &list)
	}
	return list, err
}

// putAway puts the sandboxes that run away as the settings say, in the time that they
// give. Each is on record as soon as it is safe: where the machine dies in the middle of
// it, those that were are brought back.
func putAway(ctx context.Context, cfg serverConfig, ctl *control.Control) error {
	verb, wanted := map[string]sandbox.Verb{config.StopBySleep: sandbox.Sleep, config.StopByStop: sandbox.Stop}[cfg.machineStop]
	if !wanted {
		cfg.log.Info("the sandboxes that run are left as they are, as the settings say")
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, cfg.stopLimit, fault.New(fault.DeadlineExceeded, "it took longer than %s (%s)", cfg.stopLimit, config.StopLimit))
	defer cancel()
	begin, list := time.Now(), []control.Rested{}
	left, err := ctl.Rest(ctx, verb, func(r control.Rested) error {
		list = append(list, r)
		return writeDurably(cfg.layout.restFile(), list)
	})
	for _, s := range left {
		cfg.log.Warn("a sandbox runs on; when the machine goes down it fails, and its disk resumes", "sandbox", s.ID)
	}
	cfg.log.Info("the sandboxes that ran are put away; the next start brings them back", "count", len(list), "took", time.Since(begin).Round(time.Millisecond))
	return err
}

// bringBack brings back what was put away. A record that cannot be read brings nothing
// back and keeps no server from starting.
func bringBack(ctx context.Context, log *slog.Logger, l layout, ctl *control.Control) error {
	list, err := l.readRest()
	if err != nil {
		log.Error("what was put away cannot be read; sandboxes that sleep wake by `hutch wake`", "path", l.restFile(), "err", err)
		return nil
	}
	if len(list) == 0 {
		return nil
	}
	begun, err := ctl.Return(ctx, list)
	if err != nil {
		return err
	}
	log.Info("the sandboxes that were put away come back", "count", begun)
	return os.Remove(l.restFile())
}

// machineStops says whether this machine is going down, as systemd knows it.
func machineStops(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "systemctl", "is-system-running").Output() // its exit code is 1 for every state but running
	state := strings.TrimSpace(string(out))
	if state == "" {
		return false, fault.Wrap(err, fault.FailedPrecondition, "systemd does not say whether the machine goes down; `hutch down --sleep` puts the sandboxes to sleep in any case")
	}
	return state == "stopping", nil
}

// restText says what was put away, for people.
func restText(list []control.Rested) string {
	slept, stopped := 0, 0
	for _, r := range list {
		if r.Verb == sandbox.Sleep {
			slept++
		} else {
			stopped++
		}
	}
	if slept+stopped == 0 {
		return "no sandbox ran"
	}
	var parts []string
	if slept > 0 {
		parts = append(parts, fmt.Sprintf("%d %s", slept, plural(slept, "sandbox sleeps", "sandboxes sleep")))
	}
	if stopped > 0 {
		parts = append(parts, fmt.Sprintf("%d %s stopped", stopped, plural(stopped, "is", "are")))
	}
	return strings.Join(parts, ", ") + "; the next `hutch up` brings " + plural(slept+stopped, "it", "them") + " back"
}
