package control

import (
	"slices"
	"strings"

	"github.com/hutchrun/hutch/internal/fault"
)

// Scopes are what a key may do in its project (P1), as a set.
type Scopes uint8

// The scopes. Every key may read.
const (
	// ScopeRead is to see what is there, but not into a sandbox.
	ScopeRead Scopes = 1 << iota
	// ScopeWrite is to make, change and end sandboxes, templates and webhooks.
	ScopeWrite
	// ScopeExec is to work in a sandbox: commands, files and ports.
	ScopeExec
	// ScopeKeys is to make and revoke keys of the project.
	ScopeKeys
	// ScopeOperator is everything, in every project, and what concerns the whole installation:
	// projects, their limits, and files of the server's machine.
	ScopeOperator
)

// ScopesProject are those of a key where nobody says otherwise: all of its project.
const ScopesProject = ScopeRead | ScopeWrite | ScopeExec | ScopeKeys

// scopeNames are the scopes' names, in the order of their bits.
var scopeNames = []string{"read", "write", "exec", "keys", "operator"}

// ScopeNames lists every scope.
func ScopeNames() []string { return slices.Clone(scopeNames) }

// ParseScopes reads names of scopes; none is ScopesProject.
func ParseScopes(names []string) (Scopes, error) {
	if len(names) == 0 {
		return ScopesProject, nil
	}
	out := ScopeRead
	for _, name := range names {
		i := slices.Index(scopeNames, name)
		if i < 0 {
			return 0, invalid("scopes", "%s is no scope: use %s", shown(name), strings.Join(scopeNames, ", "))
		}
		out |= 1 << i
	}
	return out, nil
}

// Names gives the scopes' names. An operator's key may do all and names only that.
func (s Scopes) Names() []string {
	if s&ScopeOperator != 0 {
		return []string{"operator"}
	}
	var out []string
	for i, name := range scopeNames {
		if s&(1<<i) != 0 {
			out = append(out, name)
		}
	}
	return out
}

// May says whether a caller with these scopes may do what needs others.
func (s Scopes) May(need Scopes) bool { return s&ScopeOperator != 0 || s&need == need }

// Need refuses a caller whose key lacks a scope. It tells nothing of what was asked for.
func (a Actor) Need(need Scopes) error {
	if a.Scopes.May(need) {
		return nil
	}
	var lacks Scopes
	for i := range scopeNames {
		if bit := Scopes(1 << i); need&bit != 0 && a.Scopes&bit == 0 {
			lacks |= bit
		}
	}
	return fault.New(fault.PermissionDenied, "the API key may not do this: it has the scopes %s and lacks %s; use another key, or have one made with `hutch keys create`",
		strings.Join(a.Scopes.Names(), ", "), strings.Join(lacks.Names(), ", ")).Because("scope")
}

// Operator says whether the caller may see and change every project.
func (a Actor) Operator() bool { return a.Scopes&ScopeOperator != 0 }

func (s Scopes) text() string { return strings.Join(s.Names(), ",") }

// scopesOf reads what text wrote. What it does not know opens nothing.
func scopesOf(text string) Scopes {
	var out Scopes
	for name := range strings.SplitSeq(text, ",") {
		if i := slices.Index(scopeNames, name); i >= 0 {
			out |= 1 << i
		}
	}
	return out
}
