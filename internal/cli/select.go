package cli

import (
	"bufio"
	"context"
	"fmt"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"github.com/muesli/cancelreader"
	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// parallel is how many sandboxes one line changes at a time.
const parallel = 8

// selection is which sandboxes a verb acts on: those that are named, or those with
// labels.
type selection struct {
	labels []string
	yes    bool
}

func (s *selection) add(cmd *cobra.Command) {
	cmd.Flags().StringArrayVarP(&s.labels, "label", "l", nil, "act on the sandboxes with this label, as key=value; all that are given must hold")
	cmd.Flags().BoolVarP(&s.yes, "yes", "y", false, "do not ask")
}

// args checks that there are names or labels, not both.
func (s *selection) args(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) == 0 && len(s.labels) == 0:
		return fault.New(fault.InvalidArgument, "%s needs the name or id of a sandbox; `hutch ls` lists them", cmd.CommandPath())
	case len(args) > 0 && len(s.labels) > 0:
		return fault.New(fault.InvalidArgument, "%s takes names or --label, not both; leave one out", cmd.CommandPath())
	}
	return nil
}

// resolve gives the names to act on. What is chosen by label is asked about first. Where
// ask is set, so is what was named, of a person at a terminal: a script that names a
// sandbox means it.
func (a *app) resolve(ctx context.Context, c *client, s *selection, verb string, args []string, ask bool) ([]string, error) {
	names, what := args, strings.Join(args, ", ")
	_, person := terminalFile(a.env.Stdin)
	ask = ask && person
	if len(s.labels) > 0 {
		list, err := a.listSandboxes(ctx, c, api.ListSandboxesParams{Label: s.labels}, paging{all: true})
		if err != nil {
			return nil, err
		}
		names = nil
		var shown []string
		for _, sb := range list.Sandboxes {
			names, shown = append(names, sb.V.ID), append(shown, sb.V.Name)
		}
		what = strings.Join(shown, ", ")
		ask = true
	}
	if len(names) == 0 || s.yes || !ask {
		return names, nil
	}
	if len(s.labels) == 0 {
		there, err := a.thatAre(ctx, c, names)
		if err != nil || len(there) == 0 {
			return names, err // the verb says of each that it is not there
		}
		what = strings.Join(there, ", ")
	}
	return names, a.confirm(ctx, fmt.Sprintf("%s %s", verb, what))
}

// thatAre gives those of the names that there is a sandbox of: nobody is asked about
// others.
func (a *app) thatAre(ctx context.Context, c *client, names []string) (there []string, err error) {
	for _, name := range names {
		err := done(c.GetSandbox(ctx, name, &api.GetSandboxParams{}))
		if err != nil && !fault.Is(err, fault.NotFound) {
			return nil, err
		}
		if err == nil {
			there = append(there, name)
		}
	}
	return there, nil
}

// confirm asks whether to go on. Where nobody can be asked, that is a refusal.
func (a *app) confirm(ctx context.Context, what string) error {
	stdin, in := terminalFile(a.env.Stdin)
	_, out := terminalFile(a.env.Stderr)
	if !in || !out {
		return fault.New(fault.InvalidArgument, "to %s must be confirmed, and there is no terminal to ask on; add --yes", clean(what))
	}
	fmt.Fprintf(a.env.Stderr, "%s? [y/N] ", clean(what))
	reader, err := cancelreader.NewReader(stdin)
	if err != nil {
		return fault.Wrap(err, fault.Internal, "cannot read the answer; add --yes")
	}
	defer reader.Close()
	defer context.AfterFunc(ctx, func() { reader.Cancel() })()
	answer, _ := bufio.NewReader(reader).ReadString('\n') // no input is a no
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return nil
	}
	return fault.New(fault.Cancelled, "nothing was done; answer y, or add --yes")
}

// confirmUntilSignal is confirm for a verb that speaks to no server.
func (a *app) confirmUntilSignal(ctx context.Context, what string) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	return a.confirm(ctx, what)
}

// outcome is what became of one of several sandboxes.
type outcome struct {
	name   string
	change change
	err    error
}

// results is the document of a verb on several sandboxes.
type results struct {
	Results []result `json:"results"`
}

type result struct {
	Name string `json:"name"`
	*change
	Error *errorBody `json:"error,omitempty"`
}

// each does call on every name, some at a time, and gives the outcomes in the order
// of the names.
func (a *app) each(ctx context.Context, names []string, call func(ctx context.Context, name string, show func(string)) (change, error)) []outcome {
	defer a.progress.spin()()
	lines := newBoard(a.progress, len(names))
	out := make([]outcome, len(names))
	slots := make(chan struct{}, parallel)
	var wg sync.WaitGroup
	for i, name := range names {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			ch, err := call(ctx, name, func(text string) { lines.set(i, text) })
			out[i] = outcome{name, ch, err}
		})
	}
	wg.Wait()
	return out
}

// report prints the outcomes: the document of the one sandbox that was named, or the
// list of several. The error is the first one; those before the last are told here.
func (a *app) report(outcomes []outcome, several, asJSON bool, say func(change)) error {
	var doc results
	var failures []error
	for _, o := range outcomes {
		r := result{Name: o.name}
		if o.err != nil {
			body := bodyOf(o.err)
			r.Error = &body
			failures = append(failures, o.err)
		} else {
			r.change = &o.change
			if !asJSON {
				say(o.change)
			}
		}
		doc.Results = append(doc.Results, r)
	}
	if asJSON && several {
		if doc.Results == nil {
			doc.Results = []result{}
		}
		if err := a.printJSON(doc); err != nil {
			return err
		}
	} else if asJSON && len(failures) == 0 {
		if err := a.printJSON(outcomes[0].change); err != nil {
			return err
		}
	}
	if len(failures) == 0 {
		return nil
	}
	if !asJSON {
		for _, err := range failures[1:] {
			reportError(a.env.Stderr, err)
		}
	}
	return failures[0]
}
