package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/cli"
	"github.com/hutchrun/hutch/internal/config"
	"github.com/hutchrun/hutch/internal/fault"
)

// downLimit is how long a server may take to end, beside what putting sandboxes away takes.
const downLimit = 30 * time.Second

// What --sleep may be.
const (
	sleepAlways  = "always"
	sleepMachine = "machine" // only where the machine goes down
)

func downCommand(env cli.Env) *cobra.Command {
	var (
		at    place
		sleep string
	)
	cmd := &cobra.Command{
		Use:   "down",
		Short: "End the server on this machine; sandboxes stay",
		Long: "End the server on this machine. Its sandboxes stay as they are: those that run go on, and the next `hutch up` finds them again.\n\n" +
			"Before the machine goes down, --sleep puts those that run to sleep first (or stops them, as `machine_stop` in the settings says), " +
			"and the next `hutch up` brings them back. The service does it by itself.",
		Example: "hutch down\nhutch down --sleep && reboot\nhutch down --data /srv/hutch",
		GroupID: "server",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, s, err := at.find(cmd, env)
			if err != nil {
				return err
			}
			rest := sleep == sleepAlways
			switch sleep {
			case "", sleepAlways:
			case sleepMachine:
				if rest, err = machineStops(cmd.Context()); err != nil {
					return err
				}
			default:
				return fault.New(fault.InvalidArgument, "--sleep=%s is not known; write --sleep, or --sleep=%s for only where the machine goes down", sleep, sleepMachine)
			}
			return down(cmd.Context(), env, l, s, rest)
		},
	}
	at.flags(cmd)
	cmd.Flags().StringVar(&sleep, "sleep", "", "put the sandboxes that run to sleep first, for the next start to bring back")
	cmd.Flags().Lookup("sleep").NoOptDefVal = sleepAlways
	return cmd
}

func down(ctx context.Context, env cli.Env, l layout, s settings, rest bool) error {
	live, err := l.live()
	if err != nil {
		return err
	}
	if !live {
		if l.made() {
			fmt.Fprintf(env.Stdout, "hutch is down already on %s\n", l.data)
		} else {
			fmt.Fprintf(env.Stdout, "hutch is down already: there is no installation at %s\n", l.data)
		}
		tellOthers(env, l)
		return nil
	}
	info, err := l.readServer()
	if err != nil {
		return fault.New(fault.Unavailable, "a process uses %s but does not answer yet; try again in a moment", l.data)
	}
	sig, limit := syscall.SIGTERM, downLimit
	if rest {
		if info.Settings == nil { // it would take the signal for its end
			return fault.New(fault.FailedPrecondition, "the server (pid %d) is of a version that cannot put sandboxes to sleep at its end; `hutch sleep` each first, or leave --sleep out", info.PID)
		}
		sig, limit = syscall.SIGPWR, limit+stopLimitOf(info, s)
	}
	if err := syscall.Kill(info.PID, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fault.Wrap(err, fault.PermissionDenied, "the server (pid %d) cannot be ended; use sudo", info.PID)
	}
	deadline := time.Now().Add(limit)
	for time.Now().Before(deadline) {
		if live, err := l.live(); err != nil || !live {
			return errors.Join(err, tellDown(env, l, rest))
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(50 * time.Millisecond):
		}
	}
	return fault.New(fault.DeadlineExceeded, "the server (pid %d) has not ended after %s; its log is %s", info.PID, limit, l.log())
}

// stopLimitOf is the limit that a server was started with.
func stopLimitOf(info serverInfo, s settings) time.Duration {
	if d, err := config.ParseDuration(info.Settings[config.StopLimit].Value); err == nil {
		return d
	}
	return s.duration(config.StopLimit)
}

func tellDown(env cli.Env, l layout, rest bool) error {
	if !rest {
		fmt.Fprintln(env.Stdout, "hutch is down; sandboxes stay as they are")
		return nil
	}
	list, err := l.readRest()
	if err == nil {
		fmt.Fprintln(env.Stdout, "hutch is down;", restText(list))
	}
	return err
}
