package sandbox

import (
	"fmt"
	"slices"
	"strings"
)

// document writes docs/state-machine.md from the tables of this package.
func document() string {
	var b strings.Builder
	b.WriteString(`# The states of a sandbox

Generated from the tables in internal/sandbox by ` + "`go test ./internal/sandbox -update`" + `; a test compares it.

## What happens, and where it leads

A cell is the state after the event. An empty cell cannot happen: the report of it is logged and changes nothing.

`)
	header(&b, "event", "boots")
	for _, e := range Events {
		boots := ""
		if e.Boots() {
			boots = "yes"
		}
		cells := []string{"`" + string(e) + "`", boots}
		for _, s := range States {
			to, err := s.Next(e)
			if err != nil {
				to = ""
			}
			cells = append(cells, string(to))
		}
		line(&b, cells)
	}
	b.WriteString(`
"Boots" says that the event makes a new generation.

## What may be asked

run: an operation starts. join: the operation that runs is the one asked for. done: the goal is reached already.
no: refused, with what to do instead. A sandbox that is creating has its creation at work.

`)
	header(&b, "verb")
	for _, r := range requests {
		cells := []string{"`" + string(r.row()) + "`"}
		for _, s := range States {
			cells = append(cells, outcome(Admit(sample(s), activeIn(s), r), r))
		}
		line(&b, cells)
	}
	b.WriteString(`
## What may be asked while an operation runs

For a sandbox that is in the state in which the operation is usually at work. conflict: refused, naming the operation.

`)
	kinds := []struct {
		verb  Verb
		state State
	}{{Create, Creating}, {Sleep, Ready}, {Wake, Sleeping}, {Stop, Ready}, {Resume, Stopped}, {Fork, Ready}, {Delete, Ready}}
	cells := []string{"verb"}
	for _, k := range kinds {
		cells = append(cells, fmt.Sprintf("%s (%s)", k.verb, k.state))
	}
	line(&b, cells)
	line(&b, slices.Repeat([]string{"---"}, len(cells)))
	for _, r := range requests {
		cells := []string{"`" + string(r.row()) + "`"}
		for _, k := range kinds {
			cells = append(cells, outcome(Admit(sample(k.state), &Operation{ID: "op_1", Kind: k.verb, Status: Running}, r), r))
		}
		line(&b, cells)
	}
	b.WriteString("\n## The steps of an operation\n\nWhat is in brackets takes a step back when a later one fails.\n\n")
	for _, v := range []Verb{Create, Sleep, Wake, Stop, Resume, Fork, Delete, Undelete} {
		var names []string
		for _, s := range Steps(v) {
			name := s.Name
			if s.Undo != "" {
				name += " (" + s.Undo + ")"
			}
			names = append(names, name)
		}
		fmt.Fprintf(&b, "- `%s`: %s\n", v, strings.Join(names, ", "))
	}
	b.WriteString(`
## Until when an operation can be cancelled

` + "`hutch operations cancel`" + ` undoes an operation that is in one of these steps, or waits for its first; after them it goes through. The
build of a template can be cancelled until it ends.

`)
	for _, v := range []Verb{Create, Sleep, Wake, Stop, Resume, Fork, Delete, Undelete} {
		var names []string
		for _, s := range Steps(v) {
			if Cancellable(v, s.Name) {
				names = append(names, s.Name)
			}
		}
		if len(names) == 0 {
			names = []string{"never"}
		}
		fmt.Fprintf(&b, "- `%s`: %s\n", v, strings.Join(names, ", "))
	}
	return b.String()
}

func header(b *strings.Builder, first ...string) {
	cells := first
	for _, s := range States {
		cells = append(cells, string(s))
	}
	line(b, cells)
	line(b, slices.Repeat([]string{"---"}, len(cells)))
}

func line(b *strings.Builder, cells []string) {
	b.WriteString("| " + strings.Join(cells, " | ") + " |\n")
}

func outcome(d Decision, r Request) string {
	switch {
	case d.Outcome == Refuse && string(d.Err.Kind) == "conflict":
		return "conflict"
	case d.Outcome == Refuse && string(d.Err.Kind) == "not_found":
		return "not_found"
	case d.Outcome == Refuse:
		_, instead, _ := strings.Cut(d.Err.Message, "; ")
		return "no: " + instead
	case d.Outcome == Accept && d.Cancels:
		return "run, cancels it"
	case d.Outcome == Accept && d.Verb != r.Verb:
		return "run (= " + string(d.Verb) + ")"
	}
	return string(d.Outcome)
}
