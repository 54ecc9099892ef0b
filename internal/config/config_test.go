package config

import (
	"flag"
	"os"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write the reference page anew")

// R5: every key is documented with its default: the page is what the code says.
func TestReferencePage(t *testing.T) {
	const path = "../../docs/configuration.md"
	if *update {
		if err := os.WriteFile(path, []byte(Reference()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != Reference() {
		t.Errorf("%s is not what the keys say; `go test ./internal/config -update` writes it anew", path)
	}
}

// R5: the sample sets nothing but what it is told, and every line of it may be set.
func TestSample(t *testing.T) {
	t.Parallel()
	sample := Sample(nil)
	file, problems := Parse([]byte(sample))
	if len(file) != 0 || len(problems) != 0 {
		t.Errorf("the sample sets %v, with %v", file, problems)
	}
	var all strings.Builder
	for line := range strings.Lines(sample) {
		if rest, ok := strings.CutPrefix(line, "# "); ok && strings.Contains(rest, " = ") && !strings.HasSuffix(strings.TrimSpace(rest), ".") {
			line = rest
		}
		all.WriteString(line)
	}
	file, problems = Parse([]byte(all.String()))
	if len(problems) != 0 || len(file) != len(Keys) {
		t.Errorf("with every comment taken away %d of %d keys are set, with %v:\n%s", len(file), len(Keys), problems, all.String())
	}
	file, problems = Parse([]byte(Sample(map[string]string{Listen: "127.0.0.1:9", LogFiles: "7"})))
	if len(problems) != 0 || len(file) != 2 || file[Listen].Text != "127.0.0.1:9" || file[LogFiles].Text != "7" {
		t.Errorf("%v %v", file, problems)
	}
	for _, k := range Keys {
		if k.Default == "" && k.Unset == "" || k.Doc == "" || k.Example == "" {
			t.Errorf("%s is not documented", k.Name)
		}
		for _, v := range []string{k.Default, k.Example} {
			if what := k.Wrong(v); k.Kind != Count && k.Kind != Switch && v != "" && what != "" {
				t.Errorf("%s: its own %q %s", k.Name, v, what)
			}
		}
	}
}

// R5: each mistake is refused with its line and what to do.
func TestProblems(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"listen = \"127.0.0.1:1\"\nlistn = \"x\"":              "line 2: listn is no setting of this version of hutch; did you mean listen?",
		"colour = \"red\"":                                     "line 1: colour is no setting of this version of hutch; remove the line",
		"\n[prises]\nvcpu_second = \"1\"\nx = 1":               "line 2: [prises] is no setting of this version of hutch; did you mean [prices]?",
		"[prices]\nvcpu_secnd = \"1\"":                         "line 2: prices.vcpu_secnd is no setting of this version of hutch; did you mean prices.vcpu_second?",
		"pool_size = 100":                                      "line 1: pool_size is not in quotes; write it as \"100GB\"",
		"# a comment\npool_size = \"100\"":                     "line 2: pool_size \"100\" is not a size; write a number and a unit",
		"pool_size = \"100 parsec\"":                           "is not a size; write a number and a unit",
		"pool_size = \"0GB\"":                                  "is a size that cannot be",
		"keep.events = \"90\"":                                 "line 1: keep.events \"90\" is not a duration; write a whole number and a unit of s, m, h or d, such as 90d",
		"[keep]\nevents = \"0d\"":                              "line 2: keep.events \"0d\" is a duration that cannot be",
		"[log]\nfiles = \"4\"":                                 "line 2: log.files is not a whole number from 0 to 100; write it as 8, without quotes",
		"[log]\nfiles = 101":                                   "is not a whole number from 0 to 100",
		"[log]\nfiles = -1":                                    "is not a whole number",
		"[prices]\nvcpu_second = 0.000012":                     "line 2: prices.vcpu_second is not in quotes; write it as \"0.000012\"",
		"[prices]\nvcpu_second = \"1e-5\"":                     "is no exact decimal",
		"machine_stop = \"explode\"":                           "line 1: machine_stop \"explode\" is not one of sleep, stop, leave; choose one of them",
		"data = \"here\"":                                      "is not an absolute path; begin it with /",
		"data = \"\"":                                          "line 1: data is empty",
		"listen = \"4880\"":                                    "line 1: listen \"4880\" is no address with a port",
		"listen = \"127.0.0.1:1\"\n\nlisten = \"127.0.0.1:2\"": "line 3: ",
		"listen \"x\"":                                         "line 1: ",
		"log = { files = 3, fils = 4 }":                        "line 1: log.fils is no setting of this version of hutch; did you mean log.files?",
		"webhooks.http = \"true\"":                             "webhooks.http is neither true nor false",
		"[[log]]\nfiles = 3":                                   "line 1: ",
	} {
		_, problems := Parse([]byte(text))
		if len(problems) != 1 || !strings.Contains(problems[0].String(), want) {
			t.Errorf("%s:\n%q, want one with %q", text, problems, want)
			continue
		}
		if what, next, ok := strings.Cut(problems[0].Message, "; "); !ok || what == "" || next == "" {
			t.Errorf("%s: %q does not say what to do", text, problems[0].Message)
		}
	}
	file, problems := Parse([]byte("listen = \"127.0.0.1:1\"\nnope = 1\n[log]\nfiles = 3\nsize = \"5 MiB\"\n[nope2]\nx = 1\n[keep]\nevents = \"1d\""))
	if len(problems) != 2 || problems[0].Line != 2 || problems[1].Line != 6 || len(file) != 4 || file[LogFiles] != (Value{"3", 4}) || file[KeepEvents] != (Value{"1d", 9}) {
		t.Errorf("%v %v", file, problems)
	}
}

// Sizes and durations are what their units say.
func TestUnits(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int64{"1KB": 1000, "1.5GB": 15e8, "512MiB": 512 << 20, "2 TiB": 2 << 40} {
		if got, err := ParseSize(text); err != nil || got != want {
			t.Errorf("%s: %d, %v", text, got, err)
		}
	}
	for text, want := range map[string]time.Duration{"30s": 30 * time.Second, "5m": 5 * time.Minute, "24h": 24 * time.Hour, "90d": 90 * 24 * time.Hour} {
		if got, err := ParseDuration(text); err != nil || got != want {
			t.Errorf("%s: %s, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "GB", "-1GB", "1gb", "1e3GB", "99999999999999TB"} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("%q is %d", text, got)
		}
	}
	for _, text := range []string{"", "d", "-1d", "1.5d", "1w", "999999999d"} {
		if got, err := ParseDuration(text); err == nil {
			t.Errorf("%q is %s", text, got)
		}
	}
}
