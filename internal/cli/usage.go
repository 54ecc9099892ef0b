package cli

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/hutchrun/hutch/internal/fault"
)

// flagExamples are values as one types them, for each flag that takes one.
var flagExamples = map[string]string{
	"allow": "example.com", "deny": "203.0.113.0/24", "allow-port": "8080", "deny-port": "22", "ports": "deny", "firewall": "allowlist",
	"after": "1200", "archive-after": "30d", "count": "3", "cpus": "2", "cursor": "4096", "cwd": "/tmp", "data": "/srv/hutch", "delete-after": "30d", "disk": "4GB",
	"env": "KEY=value", "from": "2026-03-01", "from-oci": "registry.example.com/node:24", "label": "team=web", "limit": "20",
	"description": "chat", "events": "sandbox.*", "from-event": "1200", "overlap": "2h", "sandbox": "demo", "since": "10m", "status": "failed",
	"tail": "20", "to-event": "1300", "type": "sandbox.*", "url": "https://example.com/hook",
	"listen": "127.0.0.1:4880", "memory": "512MiB", "mode": "disk", "name": "demo", "on-deadline": "sleep", "pool-size": "100GB",
	"project": "web", "scope": "read", "expires": "30d", "plan": "trial", "max-sandboxes": "20", "max-running": "5", "max-vcpus": "8",
	"max-memory": "16GiB", "max-disk": "100GB", "max-forks": "10", "rate": "10", "burst": "20", "budget": "10.00", "budget-from": "2026-03-01",
	"prices": "vcpu-second=0.000012,gib-second=0.0000035", "to": "2026-04-01",
	"key": "hutch.pub", "operation": "op_01k3c9a6xwe8htz0s6h1j2k3m4", "save-retry": "30s,10m", "undelete-for": "48h",
	"request-key": "deploy-42", "signal": "KILL", "sleep": "auto", "sleep-deadline": "paused", "idle-after": "10m", "on-idle": "stop",
	"state": "ready", "stdin": "never",
	"template": "base", "timeout": "30m", "ttl": "2h", "user": "root", "workdir": "/workspace",
	"adopt": "all", "config": "/etc/hutch/hutch.toml", "install-root": "/mnt/image",
}

// laterFlags and laterVerbs are known and not there yet, each with the capability that
// is missing. They are refused as such, not as mistakes.
var (
	laterFlags = map[string]map[string]string{
		"new": {"snapshot": "snapshots", "region": "regions"},
	}
	laterVerbs = map[string]string{
		"run": "tasks", "snapshots": "snapshots", "archive": "archive", "migrate": "migrate",
		"ssh": "ssh", "share": "shares", "schedule": "schedules",
		"login": "login", "opencode": "harness", "prompt": "harness",
	}
)

var (
	togetherGroup = regexp.MustCompile(`^if any flags in the group \[.*\] are set none of the others can be; \[(.*)\] were all set`)
	missingGroup  = regexp.MustCompile(`^at least one of the flags in the group \[(.*)\] is required`)
)

// usageFault makes a fault of what cobra says about a line that it cannot read. rest
// is what follows the command in the line.
func usageFault(cmd *cobra.Command, err error, rest []string) error {
	if _, ok := errors.AsType[*fault.Fault](err); ok {
		return err
	}
	if cmd.HasSubCommands() && len(rest) > 0 && !strings.HasPrefix(rest[0], "-") {
		return unknownCommand(cmd, rest[0]) // whatever its flags are
	}
	if bad, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		return badValue(bad.GetFlag(), bad.GetValue(), err)
	}
	if missing, ok := errors.AsType[*pflag.ValueRequiredError](err); ok {
		return fault.New(fault.InvalidArgument, "%s needs a value; write %s", flagName(missing.GetFlag()), flagExample(missing.GetFlag()))
	}
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok {
		if capability := laterFlags[verbPath(cmd)][unknown.GetSpecifiedName()]; capability != "" {
			return fault.New(fault.Unsupported, "--%s is not supported by this version of hutch; leave it out", unknown.GetSpecifiedName()).Because(capability)
		}
	}
	message, _, _ := strings.Cut(err.Error(), "\n")
	hint := fmt.Sprintf("`%s --help` shows what it takes", cmd.CommandPath())
	if m := togetherGroup.FindStringSubmatch(message); m != nil {
		return fault.New(fault.InvalidArgument, "%s do not go together; leave one out", flagList(m[1], " and "))
	}
	if m := missingGroup.FindStringSubmatch(message); m != nil {
		return fault.New(fault.InvalidArgument, "%s needs one of %s; %s", cmd.CommandPath(), flagList(m[1], " and "), hint)
	}
	switch {
	case strings.HasPrefix(message, "unknown command") && len(rest) > 0:
		return unknownCommand(cmd, rest[0])
	case strings.HasPrefix(message, "unknown") && cmd.Annotations[annotationExec] != "":
		hint = "write `--` before a command that has flags of its own: hutch exec NAME -- CMD …"
	}
	return fault.New(fault.InvalidArgument, "%s; %s", message, hint)
}

// unknownCommand refuses a word where a verb belongs, or one too many.
func unknownCommand(cmd *cobra.Command, word string) error {
	if !cmd.HasSubCommands() {
		return fault.New(fault.InvalidArgument, "%s takes no arguments, and %q is one; `%s --help` shows what it takes", cmd.CommandPath(), word, cmd.CommandPath())
	}
	if capability := laterVerbs[word]; capability != "" && !cmd.HasParent() {
		return fault.New(fault.Unsupported, "hutch %s is not supported by this version of hutch; `hutch --help` lists the verbs that are", word).Because(capability)
	}
	hint := fmt.Sprintf("`%s --help` lists those that are", cmd.CommandPath())
	for cmd.SuggestionsMinimumDistance = 1; cmd.SuggestionsMinimumDistance <= 2; cmd.SuggestionsMinimumDistance++ {
		if near := cmd.SuggestionsFor(word); len(near) > 0 {
			hint = fmt.Sprintf("did you mean `%s %s`?", cmd.CommandPath(), near[0])
			break
		}
	}
	return fault.New(fault.InvalidArgument, "there is no command %q; %s", strings.TrimPrefix(cmd.CommandPath()+" "+word, cmd.Root().Name()+" "), hint)
}

// badValue refuses a flag's value: what was given, what it takes, and an example.
func badValue(flag *pflag.Flag, value string, err error) error {
	what := "what it takes"
	switch flag.Value.Type() {
	case "int", "int64":
		what = "a whole number"
		if errors.Is(err, strconv.ErrRange) || strings.HasSuffix(err.Error(), strconv.ErrRange.Error()) {
			return fault.New(fault.InvalidArgument, "%s %q is larger than hutch can hold; write it as %s", flagName(flag), value, flagExample(flag))
		}
	case "bool":
		return fault.New(fault.InvalidArgument, "%s %q is neither true nor false; write %s alone", flagName(flag), value, flagName(flag))
	}
	return fault.New(fault.InvalidArgument, "%s %q is not %s; write it as %s", flagName(flag), value, what, flagExample(flag))
}

func flagName(flag *pflag.Flag) string { return "--" + flag.Name }

func flagExample(flag *pflag.Flag) string {
	if example := flagExamples[flag.Name]; example != "" {
		return flagName(flag) + " " + example
	}
	return flagName(flag) + " VALUE"
}

// flagList writes names of flags, as cobra lists them, as they are typed.
func flagList(names, and string) string {
	return "--" + strings.Join(strings.Fields(names), and+"--")
}
