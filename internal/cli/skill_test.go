package cli

import (
	"io"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// Every command and flag that the guide for agents names is there.
func TestSkillNamesWhatIsThere(t *testing.T) {
	t.Parallel()
	root := New(Env{Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: io.Discard, Getenv: func(string) string { return "" }})
	lines := regexp.MustCompile("hutch ([a-z][^\\n`|&#]*)").FindAllStringSubmatch(skill, -1)
	seen := map[string]bool{}
	for _, m := range lines {
		if strings.HasPrefix(m[1], "gives ") { // prose
			continue
		}
		own, _, _ := strings.Cut(m[1], " -- ")
		words := strings.Fields(own)
		if words[0] == "help" {
			words = words[1:]
		}
		cmd, rest, err := root.Find(words)
		if err != nil || cmd == root || cmd.HasSubCommands() {
			t.Errorf("hutch %s: there is no such command (%v)", m[1], err)
			continue
		}
		seen[cmd.CommandPath()] = true
		for _, word := range rest {
			if !strings.HasPrefix(word, "-") {
				continue
			}
			name, _, _ := strings.Cut(strings.TrimLeft(word, "-"), "=")
			var flag *pflag.Flag
			if strings.HasPrefix(word, "--") {
				flag = cmd.Flags().Lookup(name)
			} else {
				flag = cmd.Flags().ShorthandLookup(name)
			}
			if flag == nil {
				t.Errorf("hutch %s: %s has no flag %s", m[1], cmd.CommandPath(), word)
			}
		}
	}
	for _, want := range []string{"new", "exec", "cp", "fork", "sleep", "delete", "attach", "watch", "mcp", "commands logs", "commands stdin"} {
		if !seen["hutch "+want] {
			t.Errorf("the guide says nothing of hutch %s", want)
		}
	}
}

func TestLeaveKeys(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		typed []string
		rest  string
		left  bool
	}{
		{[]string{"ls\r"}, "ls\r", false},
		{[]string{"a\x1dd", "b"}, "a", true},
		{[]string{"\x1d", "d"}, "", true},
		{[]string{"\x1dx\x1d\x1dd"}, "\x1dx\x1d\x1dd", false},
	} {
		var k leaveKeys
		var rest string
		var left bool
		for _, typed := range c.typed {
			var part []byte
			part, left = k.filter([]byte(typed))
			rest += string(part)
			if left {
				break
			}
		}
		if rest != c.rest || left != c.left {
			t.Errorf("%q: %q %v", c.typed, rest, left)
		}
	}
}
