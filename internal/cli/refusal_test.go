package cli

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// sent are the bodies and parameters of each verb's calls, as far as a value in them
// is typed.
var sent = map[string][]any{
	"new":                    {api.CreateSandbox{}},
	"firewall":               {api.Firewall{}},
	"ls":                     {api.ListSandboxesParams{}},
	"fork":                   {api.ForkSandbox{}},
	"sleep":                  {api.ListSandboxesParams{}},
	"wake":                   {api.ListSandboxesParams{}},
	"stop":                   {api.ListSandboxesParams{}},
	"resume":                 {api.ListSandboxesParams{}},
	"delete":                 {api.DeleteSandboxParams{}, api.ListSandboxesParams{}},
	"keep":                   {api.KeepSandboxParams{}, api.ListSandboxesParams{}},
	"undelete":               {api.UndeleteSandboxParams{}},
	"rename, label, edit":    {api.UpdateSandbox{}},
	"events":                 {api.ListEventsParams{}},
	"operations ls":          {api.ListOperationsParams{}},
	"webhooks create":        {api.CreateWebhook{}},
	"webhooks ls":            {api.ListWebhooksParams{}},
	"webhooks edit":          {api.UpdateWebhook{}},
	"webhooks deliveries":    {api.ListDeliveriesParams{}},
	"webhooks replay":        {api.ReplayWebhook{}},
	"webhooks rotate-secret": {api.RotateSecret{}},
	"keys ls":                {api.ListKeysParams{}},
	"keys create":            {api.CreateKey{}},
	"templates ls":           {api.ListTemplatesParams{}},
	"templates build":        {api.CreateTemplate{}},
	"exec":                   {api.StartCommand{}},
	"commands ls":            {api.ListCommandsParams{}},
	"commands logs":          {api.GetCommandOutputParams{}},
	"commands kill":          {api.SignalCommand{}},
	"cp":                     {api.StatFileParams{}, api.ReadFileParams{}, api.WriteFileParams{}},
	"bill":                   {api.GetBillParams{}},
	"projects create":        {api.CreateProject{}},
	"projects edit":          {api.UpdateProject{}},
}

// notTyped are the fields that the command line fills by itself.
var notTyped = []string{
	"wait", "lossless", "Last-Event-ID", // how it listens
	"mode@cp",                                                 // of the local file
	"secret@webhooks create", "secret@webhooks rotate-secret", // the server makes it
	"cursor@webhooks ls", "cursor@webhooks deliveries", // pages
	"pty.cols", "pty.rows", "command.args", // of the terminal; CMD
	"cursor@ls", "cursor@events", "cursor@operations ls", "cursor@keys ls", "cursor@templates ls", "cursor@commands ls", // pages
	// All that have the labels, whatever else they are.
	"limit@sleep", "cursor@sleep", "state@sleep", "template@sleep", "undeletable@sleep", "limit@wake", "cursor@wake", "state@wake", "template@wake", "undeletable@wake",
	"limit@stop", "cursor@stop", "state@stop", "template@stop", "undeletable@stop", "limit@resume", "cursor@resume", "state@resume", "template@resume", "undeletable@resume",
	// A key and a place that cp makes itself.
	"upload@cp", "offset@cp",
	"limit@keep", "cursor@keep", "state@keep", "template@keep", "undeletable@keep",
	"limit@delete", "cursor@delete", "state@delete", "template@delete", "undeletable@delete",
}

// SPEC section 16: a refusal says what to do: each field that a verb sends is named by
// the flag or the argument that it was typed as, and the verb has that flag.
func TestEveryFieldHasItsFlag(t *testing.T) {
	t.Parallel()
	root := New(Env{Getenv: func(string) string { return "" }})
	find := func(verb string) *cobra.Command {
		cmd, _, err := root.Find(strings.Fields(verb))
		if err != nil || verbPath(cmd) != verb {
			t.Fatalf("there is no verb %s: %v", verb, err)
		}
		return cmd
	}
	for verbs, bodies := range sent {
		for _, body := range bodies {
			for _, field := range fieldsOf(reflect.TypeOf(body), "") {
				var flag string
				for verb := range strings.SplitSeq(verbs, ", ") {
					if slices.Contains(notTyped, field) || slices.Contains(notTyped, field+"@"+verb) || field == requestKeyField {
						flag = "-"
					}
					if f := fieldFlags[verb][field]; f != "" {
						flag = f
					}
				}
				if flag == "" {
					t.Errorf("%s sends the field %s, which has no flag", verbs, field)
				}
			}
		}
	}
	for verb, fields := range fieldFlags {
		cmd := find(verb)
		for field, typed := range fields {
			name, isFlag := strings.CutPrefix(typed, "--")
			if isFlag && cmd.Flags().Lookup(name) == nil {
				t.Errorf("%s has no flag %s, for the field %s", verb, typed, field)
			}
			if !isFlag && !strings.Contains(cmd.Use+" CMD NAME:PATH", typed) {
				t.Errorf("%s has no argument %s, for the field %s", verb, typed, field)
			}
		}
	}
}

// fieldsOf gives the JSON names of a struct's fields, those of structs in it behind a dot.
func fieldsOf(typ reflect.Type, above string) (names []string) {
	for f := range typ.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "" || name == "-" {
			continue
		}
		names = append(names, above+name)
		inner := f.Type
		if inner.Kind() == reflect.Pointer {
			inner = inner.Elem()
		}
		if inner.Kind() == reflect.Struct {
			names = append(names, fieldsOf(inner, above+name+".")...)
		}
	}
	return names
}

// Every flag with a value has an example to be shown, and no example is of a flag that
// is gone. `up`, `down` and `doctor` have theirs in cmd/hutch.
func TestEveryFlagHasAnExample(t *testing.T) {
	t.Parallel()
	used := map[string]bool{"data": true, "listen": true, "pool-size": true, "prices": true, "adopt": true, "config": true, "install-root": true, "undelete-for": true, "save-retry": true}
	walk(New(Env{Getenv: func(string) string { return "" }}), func(cmd *cobra.Command) {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			used[f.Name] = true
			if f.Value.Type() != "bool" && flagExamples[f.Name] == "" {
				t.Errorf("%s --%s has no example", cmd.CommandPath(), f.Name)
			}
		})
		for name := range laterFlags[verbPath(cmd)] {
			if cmd.Flags().Lookup(name) != nil {
				t.Errorf("%s has --%s, which is said to come later", cmd.CommandPath(), name)
			}
		}
		if laterVerbs[verbPath(cmd)] != "" {
			t.Errorf("%s is there and said to come later", cmd.CommandPath())
		}
	})
	for name := range flagExamples {
		if !used[name] {
			t.Errorf("the example of --%s is of no flag", name)
		}
	}
}

func TestRefusalsInFlags(t *testing.T) {
	t.Parallel()
	for _, c := range [][3]string{
		{"new", "cannot make a sandbox with memory_bytes 5: it must be from 134217728 to 274877906944",
			"cannot make a sandbox with --memory 5B: it must be from 128MiB to 256GiB"},
		{"new", "cannot make a sandbox with disk_bytes 8000000001: it must be from 1000000000 to 8000000000",
			"cannot make a sandbox with --disk 8000000001B: it must be from 1GB to 8GB"},
		{"new", "cannot make a sandbox with memory_bytes 5: it must be from 134217728 to 25276514304",
			"cannot make a sandbox with --memory 5B: it must be from 128MiB to 23.5GiB"},
		{"new", "cannot make a sandbox with cpus -1: it must be from 1 to 64", "cannot make a sandbox with --cpus -1: it must be from 1 to 64"},
		{"new", "cannot make a sandbox with memory_bytes 1000000000000: it must be from 134217728 to 274877906944",
			"cannot make a sandbox with --memory 1TB: it must be from 128MiB to 256GiB"},
		{"new", "cannot make a sandbox with disk_bytes 17179869184: it must be from 1000000000 to 8000000000",
			"cannot make a sandbox with --disk 16GiB: it must be from 1GB to 8GB"},
		{"new", "the field memory_bytes is refused: number must be at least 1", "--memory is refused: number must be at least 1B"},
		{"new", "the field labels.team is refused: too long", "--label team is refused: too long"},
		{"new", "sleep.mode auto is not supported by this version of hutch; leave it out", "--sleep auto is not supported by this version of hutch; leave it out"},
		{"new", `this call has no field "workdir"; see /openapi.yaml for those that it has`, "the server does not know --workdir; compare `hutch version` with the server's"},
		{"new", `"x y" is no name for a sandbox: use 1 to 40 of the characters`, `"x y" is no name for a sandbox: use 1 to 40 of the characters`},
		{"exec", "the field timeout_seconds is refused: number must be at most 86400", "--timeout is refused: number must be at most 86400"},
		{"ls", "the parameter limit is refused: number must be at most 1000", "--limit is refused: number must be at most 1000"},
		{"stop", "the parameter Idempotency-Key is refused: too long", "--request-key is refused: too long"},
		{"get", "the field odd is refused", "the field odd is refused"},
	} {
		if got := inFlags(fieldFlags[c[0]], c[1]); got != c[2] {
			t.Errorf("%s: %q\nbecomes %q\nwant    %q", c[0], c[1], got, c[2])
		}
	}
}

// Whoever has no key, or a wrong one, is told what to do about it here, and nothing of
// headers.
func TestKeyMessages(t *testing.T) {
	t.Parallel()
	for want, conn := range map[string]connection{
		"does not take the key in HUTCH_API_KEY; ":                              {KeyFrom: keyFromEnv, APIKey: "k"},
		`does not take the key of the context "local" in /c; `:                  {KeyFrom: keyFromContext, APIKey: "k", Context: "local"},
		`the key of the context "local" goes to its own server only; unset HUT`: {Unused: "local"},
		`the context "local" in /c has no API key; set HUTCH_API_KEY`:           {Context: "local"},
		"no context is the current one; `hutch context ls`":                     {Others: true},
		"there is no context in /c; run `hutch up` as this user, or set HUTCH":  {},
	} {
		conn.URL, conn.Path = "http://s", "/c"
		tr := &transport{conn: conn}
		got := tr.inOwnWords(fault.New(fault.Unauthenticated, "send `Authorization: Bearer hutch_…`")).Message
		if !strings.Contains(got, want) || strings.Contains(got, "Authorization") || strings.Count(got, "; ") < 1 && !conn.Others {
			t.Errorf("%+v: %q, want %q", conn, got, want)
		}
	}
}
