package control

import (
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// The bounds of what callers may write into a sandbox's row.
const (
	maxName       = 40
	maxLabels     = 64
	maxLabelKey   = 128 // bytes
	maxLabelValue = 256 // bytes
	maxEnv        = 256
	maxEnvBytes   = 64 << 10 // names and values together; execve(2) takes 128 KiB for one string
	maxPath       = 4096     // PATH_MAX of Linux
	maxKeyName    = 100      // characters
	maxRequestKey = 255      // bytes
)

var (
	nameSyntax  = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`)
	labelSyntax = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._/-]*$`)
	envSyntax   = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	userSyntax  = regexp.MustCompile(`^([a-z_][a-z0-9_-]{0,31}|[0-9]{1,10})$`)
)

func invalid(reason, format string, args ...any) error {
	return fault.New(fault.InvalidArgument, format, args...).Because(reason)
}

// shown cuts what a caller sent to what a message can carry.
func shown(s string) string {
	const most = 60
	if len(s) > most {
		s = s[:most] + "…"
	}
	return fmt.Sprintf("%q", s)
}

// validName checks a new name of a sandbox or a template (R1). One that begins with - would
// be read as a flag wherever it is typed.
func validName(what, name string) error {
	if !nameSyntax.MatchString(name) {
		return invalid("name", "%s is no name for a %s: use 1 to %d of the characters a to z, 0 to 9 and -, with no - at either end", shown(name), what, maxName)
	}
	return nil
}

func validLabels(labels map[string]string) error {
	if len(labels) > maxLabels {
		return invalid("labels", "%d labels are too many: a sandbox has at most %d", len(labels), maxLabels)
	}
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		if len(key) > maxLabelKey || !labelSyntax.MatchString(key) {
			return invalid("labels", "%s is no label key: begin with a letter or a digit and use at most %d letters, digits, and . _ / -",
				shown(key), maxLabelKey)
		}
		if value := labels[key]; len(value) > maxLabelValue || !printable(value) {
			return invalid("labels", "the value of label %s is too long or not printable: use at most %d bytes of text in one line",
				shown(key), maxLabelValue)
		}
	}
	return nil
}

func printable(s string) bool {
	return utf8.ValidString(s) && strings.IndexFunc(s, unicode.IsControl) < 0
}

func validEnv(env map[string]string) error {
	if len(env) > maxEnv {
		return invalid("env", "%d environment variables are too many: at most %d can be set", len(env), maxEnv)
	}
	total := 0
	for _, name := range slices.Sorted(maps.Keys(env)) {
		if !envSyntax.MatchString(name) {
			return invalid("env", "%s is no name of an environment variable: use letters, digits and _, and no digit first", shown(name))
		}
		if strings.ContainsRune(env[name], 0) {
			return invalid("env", "the value of %s has a zero byte, which no environment variable can hold; take it out", shown(name))
		}
		total += len(name) + len(env[name])
	}
	if total > maxEnvBytes {
		return invalid("env", "the environment is %d bytes: at most %d can be set; put large values into a file", total, maxEnvBytes)
	}
	return nil
}

func validUser(user string) error {
	if user != "" && !userSyntax.MatchString(user) {
		return invalid("user", "%s is no user: give a login name or a numeric id", shown(user))
	}
	return nil
}

func validWorkdir(dir string) error {
	if dir != "" && (len(dir) > maxPath || !printable(dir) || !path.IsAbs(dir)) {
		return invalid("workdir", "%s is no working directory: give an absolute path of at most %d bytes", shown(dir), maxPath)
	}
	return nil
}

func forkMode(mode sandbox.ForkMode) (sandbox.ForkMode, error) {
	switch mode {
	case "":
		return sandbox.ForkLive, nil
	case sandbox.ForkLive, sandbox.ForkDisk:
		return mode, nil
	}
	return "", invalid("mode", "%s is no fork mode: use live or disk", shown(string(mode)))
}

func validStates(states []sandbox.State) error {
	for _, s := range states {
		if !s.Valid() {
			return invalid("state", "%s is no state: use one of %v", shown(string(s)), sandbox.States)
		}
	}
	return nil
}

func (i Idempotency) valid() error {
	if len(i.Key) > maxRequestKey || !printable(i.Key) {
		return invalid("request_key", "the request key is too long or not printable: use at most %d bytes of text", maxRequestKey)
	}
	return nil
}
