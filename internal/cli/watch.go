package cli

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

func (a *app) watchCommand() *cobra.Command {
	var recursive, asJSON bool
	var user string
	cmd := &cobra.Command{
		Use:   "watch NAME:DIR",
		Short: "Tell of changes in a directory of a sandbox",
		Long: "Tell of changes in a directory of a sandbox, one a line, until ctrl-C: create, write, remove, rename (moved away) or " +
			"attributes, and the path below the directory. `rescan` says that changes may have been missed, as after a sleep, " +
			"when they came too fast, or when the connection broke: the directory is watched again from then on, and has to be looked " +
			"through once. A sandbox that sleeps is not woken; the watch goes on when it wakes.",
		Example:           "hutch watch demo:/workspace --recursive\nhutch watch demo:src --json",
		Args:              named("NAME:DIR"),
		ValidArgsFunction: a.completeNames,
	}
	cmd.Flags().BoolVarP(&recursive, "recursive", "r", false, "also of all directories below")
	cmd.Flags().StringVarP(&user, "user", "u", "", "as whom it is watched")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the events as JSON, one a line; errors as JSON on stderr")
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		at := parsePlace(args[0])
		if at.ref == "" {
			return fault.New(fault.InvalidArgument, "%s is in no sandbox; write it as NAME:DIR", args[0])
		}
		if at.path == "" {
			at.path = "."
		}
		w := &watch{a: a, asJSON: asJSON}
		err := a.keepAsking(ctx, func() (bool, error) {
			began := time.Now()
			resp, err := c.WatchFiles(ctx, at.ref, &api.WatchFilesParams{Path: at.path, User: user, Recursive: recursive, NoWake: w.stood}, accept(jsonLines))
			body, err := open(resp, err)
			if err == nil {
				defer body.Close()
				err = lines(body, w.take)
			}
			if w.stood && asleep(err) {
				return true, fault.Wrap(err, fault.Unavailable, "%s sleeps; the watch goes on when it wakes", at.ref).After(askAsleep)
			}
			if f := fault.Of(err); f != nil && f.Reason == "events_lost" {
				err = fault.Wrap(err, fault.Unavailable, "changes came faster than they could be told")
			}
			return time.Since(began) > steady, err
		})
		if interrupted(ctx) {
			return exitStatus(exitCodes[fault.Cancelled])
		}
		return err
	})
	return cmd
}

// watch is a watch that is taken up again.
type watch struct {
	a      *app
	asJSON bool
	stood  bool
}

// take prints one event. The answer to a second watch says that something may have been
// missed before it.
func (w *watch) take(event doc[api.FileEvent]) (bool, error) {
	e := event.V
	switch {
	case e.Error != nil:
		return true, detailFault(*e.Error)
	case e.Watching:
		again := w.stood
		w.stood = true
		switch {
		case again && w.asJSON:
			return false, w.a.printLine(map[string]bool{"rescan": true})
		case again:
			w.a.say("rescan")
		case w.asJSON:
			return false, w.a.printLine(event)
		}
	case e.Change != nil && w.asJSON:
		return false, w.a.printLine(event)
	case e.Change != nil:
		w.a.say("%s %s", e.Change.Type, clean(e.Change.Path))
	}
	return false, nil
}
