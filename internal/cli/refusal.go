package cli

import (
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/fault"
)

// fieldFlags says for each verb how the fields and parameters of the API that it sends
// are typed: as a flag, or as an argument in capitals. The server names fields, as the
// API has them; people read the flag.
var fieldFlags = map[string]map[string]string{
	"new": {
		"name": "--name", "template": "--template", "cpus": "--cpus", "memory_bytes": "--memory", "disk_bytes": "--disk",
		"env": "--env", "labels": "--label", "user": "--user", "workdir": "--workdir", "sleep": "--sleep", "sleep.mode": "--sleep",
		"sleep.idle_seconds": "--idle-after", "on_idle": "--on-idle",
		"ttl_seconds": "--ttl", "on_deadline": "--on-deadline", "sleep.deadline": "--sleep-deadline",
		"archive_after": "--archive-after", "delete_after": "--delete-after",
		"firewall": "--firewall", "firewall.mode": "--firewall", "firewall.allow": "--allow", "firewall.deny": "--deny",
		"firewall.ports": "--ports", "firewall.allow_ports": "--allow-port", "firewall.deny_ports": "--deny-port",
	},
	"firewall": {
		"mode": "--mode", "allow": "--allow", "deny": "--deny", "ports": "--ports", "allow_ports": "--allow-port", "deny_ports": "--deny-port",
	},
	"ls":       {"limit": "--limit", "state": "--state", "label": "--label", "template": "--template", "undeletable": "--deleted"},
	"keep":     {"label": "--label"},
	"undelete": {"name": "--name"},
	"sleep":    {"label": "--label"},
	"wake":     {"label": "--label", "ttl_seconds": "--ttl"},
	"stop":     {"label": "--label"},
	"resume":   {"label": "--label", "ttl_seconds": "--ttl"},
	"fork":     {"name": "--name", "count": "--count", "mode": "--mode", "ttl_seconds": "--ttl"},
	"delete":   {"permanent": "--permanent", "label": "--label"},
	"rename":   {"name": "NEW-NAME"},
	"label":    {"labels": "KEY=VALUE"},
	"edit": {
		"ttl_seconds": "--ttl", "on_deadline": "--on-deadline", "sleep.deadline": "--sleep-deadline",
		"sleep": "--sleep", "sleep.mode": "--sleep", "sleep.idle_seconds": "--idle-after", "on_idle": "--on-idle",
		"archive_after": "--archive-after", "delete_after": "--delete-after",
	},
	"events":                 {"after": "--after", "follow": "--follow", "limit": "--limit", "sandbox": "NAME", "type": "--type", "since": "--since", "tail": "--tail"},
	"bill":                   {"project": "--project", "from": "--from", "to": "--to", "verify": "--verify"},
	"operations ls":          {"limit": "--limit", "sandbox": "NAME"},
	"webhooks create":        {"url": "URL", "events": "--events", "description": "--description"},
	"webhooks ls":            {"limit": "--limit"},
	"webhooks edit":          {"url": "--url", "events": "--events", "description": "--description", "enabled": "--enable"},
	"webhooks deliveries":    {"limit": "--limit", "status": "--status", "sandbox": "--sandbox"},
	"webhooks replay":        {"delivery": "DELIVERY", "from": "--from-event", "to": "--to-event", "since": "--since"},
	"webhooks rotate-secret": {"overlap_seconds": "--overlap"},
	"keys ls":                {"limit": "--limit", "project": "--project"},
	"keys create":            {"name": "NAME", "project": "--project", "scopes": "--scope", "expires_at": "--expires"},
	"templates ls":           {"limit": "--limit"},
	"projects create": {
		"name": "NAME", "plan": "--plan", "quotas": "--max-sandboxes", "quotas.sandboxes": "--max-sandboxes", "quotas.running": "--max-running",
		"quotas.vcpus": "--max-vcpus", "quotas.memory_bytes": "--max-memory", "quotas.disk_bytes": "--max-disk", "quotas.forks": "--max-forks",
		"rate": "--rate", "rate.per_second": "--rate", "rate.burst": "--burst", "ttl_seconds": "--ttl", "budget": "--budget", "budget_from": "--budget-from",
	},
	"projects edit": {
		"plan": "--plan", "quotas": "--max-sandboxes", "quotas.sandboxes": "--max-sandboxes", "quotas.running": "--max-running",
		"quotas.vcpus": "--max-vcpus", "quotas.memory_bytes": "--max-memory", "quotas.disk_bytes": "--max-disk", "quotas.forks": "--max-forks",
		"rate": "--rate", "rate.per_second": "--rate", "rate.burst": "--burst", "ttl_seconds": "--ttl", "budget": "--budget", "budget_from": "--budget-from",
	},
	"templates build": {
		"name": "NAME", "source": "--from-oci", "source.oci": "--from-oci", "source.debian": "--debian",
	},
	"exec": {
		"command": "CMD", "cwd": "--cwd", "env": "--env", "user": "--user", "detach": "--detach", "pty": "--tty",
		"stdin": "--stdin", "timeout_seconds": "--timeout",
	},
	"commands ls":   {"limit": "--limit"},
	"watch":         {"path": "NAME:DIR", "user": "--user", "recursive": "--recursive"},
	"commands logs": {"cursor": "--cursor", "follow": "--follow"},
	"commands kill": {"signal": "--signal"},
	"cp":            {"path": "NAME:PATH", "user": "--user"},
}

// requestKeyField is the header that every changing verb sends.
const requestKeyField = headerKey

// amount is how the flag of a field in bytes writes sizes.
type amount struct {
	base  float64
	names []string
	parse func(flag, s string) (int64, error)
}

var amounts = map[string]amount{
	"memory_bytes": {1 << 10, memoryUnits, parseMemory},
	"disk_bytes":   {1000, diskUnits, parseDisk},
}

// exactly writes a size in large units, the flag's own or the others, where that is the
// same size, in bytes otherwise.
func (a amount) exactly(n int64) string {
	for _, text := range []string{
		formatSize(n, a.base, a.names, math.Round), formatSize(n, 1<<10, memoryUnits, math.Round), formatSize(n, 1000, diskUnits, math.Round),
	} {
		if back, err := a.parse("", text); err == nil && back == n {
			return text
		}
	}
	return strconv.FormatInt(n, 10) + "B"
}

// most writes the largest size that is allowed, rounded to one that is allowed too.
func (a amount) most(n int64) string { return formatSize(n, a.base, a.names, math.Floor) }

var (
	namedField = regexp.MustCompile("the (?:field|parameter) \"?([A-Za-z][\\w.-]*)\"?")
	plainField = regexp.MustCompile(`\bwith ([a-z_]+) (-?\d)`)
	loneField  = regexp.MustCompile(`\b[a-z]+(?:[_.][a-z]+)+\b`)
	number     = regexp.MustCompile(`(?:to )?-?\d+`)
	newerField = regexp.MustCompile(`^this call has no (?:field|parameter) "([^"]+)"`)
)

// verbPath is a command's path as the tables have it: without hutch, and without the
// other name that some verbs have below `runs`.
func verbPath(cmd *cobra.Command) string {
	path := strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
	return strings.TrimPrefix(path, "runs ")
}

// inFlags says in flags what a server said in fields of the API.
func inFlags(flags map[string]string, message string) string {
	flagOf := func(field string) (string, bool) {
		if field == requestKeyField {
			return "--request-key", true
		}
		if flag, ok := flags[field]; ok {
			return flag, true
		}
		parent, key, below := strings.Cut(field, ".")
		flag, ok := flags[parent]
		if !ok || !below || strings.HasPrefix(field, "sleep.") {
			return "", false
		}
		return flag + " " + key, true
	}
	if m := newerField.FindStringSubmatch(message); m != nil {
		if flag, ok := flagOf(m[1]); ok {
			return "the server does not know " + flag + "; compare `hutch version` with the server's"
		}
	}
	var size amount
	for _, field := range slices.Sorted(maps.Keys(amounts)) {
		if flags[field] != "" && strings.Contains(message, field) {
			size = amounts[field]
		}
	}
	message = namedField.ReplaceAllStringFunc(message, func(text string) string {
		if flag, ok := flagOf(namedField.FindStringSubmatch(text)[1]); ok {
			return flag
		}
		return text
	})
	message = plainField.ReplaceAllStringFunc(message, func(text string) string {
		m := plainField.FindStringSubmatch(text)
		if flag, ok := flagOf(m[1]); ok {
			return "with " + flag + " " + m[2]
		}
		return text
	})
	message = loneField.ReplaceAllStringFunc(message, func(field string) string {
		if flag, ok := flags[field]; ok {
			return flag
		}
		return field
	})
	if size.parse == nil {
		return message
	}
	return number.ReplaceAllStringFunc(message, func(text string) string {
		digits, isMost := strings.CutPrefix(text, "to ")
		n, err := strconv.ParseInt(digits, 10, 64)
		switch {
		case err != nil || n <= 0:
			return text
		case isMost:
			return "to " + size.most(n)
		}
		return size.exactly(n)
	})
}

// inOwnWords makes a fault of a server's refusal one that says what to type here: the
// server speaks to programs, of fields and headers.
func (t *transport) inOwnWords(f *fault.Fault) *fault.Fault {
	switch f.Kind {
	case fault.Unauthenticated:
		f.Message = t.conn.keyMessage()
	case fault.InvalidArgument, fault.Unsupported:
		f.Message = inFlags(t.flags, f.Message)
	}
	return f
}

// keyMessage says why a server does not know who asks, and what to do about it.
func (c connection) keyMessage() string {
	const getKey = "set HUTCH_API_KEY to a key; `sudo hutch keys create NAME` on the server's machine prints one"
	switch {
	case c.KeyFrom == keyFromEnv:
		return fmt.Sprintf("the server at %s does not take the key in HUTCH_API_KEY; set it to one that `hutch keys create NAME` printed, "+
			"or unset it to use the context's (`hutch config`)", c.URL)
	case c.KeyFrom == keyFromContext:
		return fmt.Sprintf("the server at %s does not take the key of the context %q in %s; `hutch down` and `hutch up` on its machine write a new one, "+
			"or set HUTCH_API_KEY", c.URL, c.Context, c.Path)
	case c.Unused != "":
		return fmt.Sprintf("no API key for %s: the key of the context %q goes to its own server only; unset HUTCH_URL to use the context, or %s",
			c.URL, c.Unused, getKey)
	case c.Context != "":
		return fmt.Sprintf("the context %q in %s has no API key; %s", c.Context, c.Path, getKey)
	case c.Others:
		return fmt.Sprintf("no API key for %s: no context is the current one; `hutch context ls` lists them, `hutch context use NAME` chooses one", c.URL)
	}
	return fmt.Sprintf("no API key for %s: there is no context in %s; run `hutch up` as this user, or %s", c.URL, c.Path, getKey)
}
