package cli

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/hutchrun/hutch/internal/fault"
)

func connectWith(t *testing.T, vars map[string]string) (connection, error) {
	t.Helper()
	a := &app{env: Env{Getenv: func(name string) string { return vars[name] }}}
	return a.connect()
}

func TestContextFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "new", "config.toml")
	for _, c := range [][3]string{{"old", "http://old:1", "k1"}, {"local", "http://here:2", "k2"}} {
		if err := WriteContext(path, c[0], c[1], c[2]); err != nil {
			t.Fatal(err)
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the context file: %v, %v; want mode 0600", info.Mode(), err)
	}
	if dir, err := os.Stat(filepath.Dir(path)); err != nil || dir.Mode().Perm() != 0o700 {
		t.Errorf("its directory: %v, %v; want mode 0700", dir.Mode(), err)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".config-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	conn, err := connectWith(t, map[string]string{"HUTCH_CONFIG": path})
	if err != nil || conn.URL != "http://here:2" || conn.APIKey != "k2" || conn.Context != "local" {
		t.Errorf("connect = %+v, %v", conn, err)
	}
	file, err := readContextFile(path)
	if err != nil || file.Contexts["old"] != (serverContext{"http://old:1", "k1"}) {
		t.Errorf("the other context is lost: %+v, %v", file, err)
	}
}

// A reader that comes while the file is replaced sees a whole one.
func TestContextFileIsReplacedWhole(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.toml")
	if err := WriteContext(path, "local", "http://a", "k"); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for range 50 {
			if err := WriteContext(path, "local", "http://a", strings.Repeat("k", 4096)); err != nil {
				t.Error(err)
			}
		}
	})
	for range 200 {
		if file, err := readContextFile(path); err != nil || file.Contexts["local"].URL != "http://a" {
			t.Errorf("read %+v, %v", file, err)
		}
	}
	wg.Wait()
}

func TestEnvironmentWinsOverTheContext(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.toml")
	if err := WriteContext(path, "local", "http://here:2", "secret"); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		vars     map[string]string
		url, key string
	}{
		"url and key":                     {map[string]string{"HUTCH_URL": "http://x", "HUTCH_API_KEY": "k"}, "http://x", "k"},
		"key only":                        {map[string]string{"HUTCH_API_KEY": "k"}, "http://here:2", "k"},
		"the context's own url":           {map[string]string{"HUTCH_URL": "http://here:2"}, "http://here:2", "secret"},
		"with a slash at the end":         {map[string]string{"HUTCH_URL": "HTTP://Here:2/"}, "http://here:2", "secret"},
		"another url never gets its key":  {map[string]string{"HUTCH_URL": "http://evil"}, "http://evil", ""},
		"no file":                         {map[string]string{"HUTCH_CONFIG": path + ".none"}, defaultURL, ""},
		"both, and a file that is broken": {map[string]string{"HUTCH_CONFIG": "/dev/null/x", "HUTCH_URL": "http://x", "HUTCH_API_KEY": "k"}, "http://x", "k"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.vars["HUTCH_CONFIG"] == "" {
				c.vars["HUTCH_CONFIG"] = path
			}
			conn, err := connectWith(t, c.vars)
			if err != nil || conn.URL != c.url || conn.APIKey != c.key {
				t.Errorf("connect = %+v, %v; want %s with key %q", conn, err, c.url, c.key)
			}
		})
	}
}

func TestBrokenContextFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.toml")
	for _, text := range []string{"current = ", "current = \"gone\"\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := connectWith(t, map[string]string{"HUTCH_CONFIG": path}); !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("with %q: %v; want invalid_argument", text, err)
		}
	}
}

func TestConfigPath(t *testing.T) {
	t.Parallel()
	for want, vars := range map[string]map[string]string{
		"/c/x.toml":                    {"HUTCH_CONFIG": "/c/x.toml", "HOME": "/h"},
		"/xdg/hutch/config.toml":       {"XDG_CONFIG_HOME": "/xdg", "HOME": "/h"},
		"/h/.config/hutch/config.toml": {"HOME": "/h"},
	} {
		if got := ConfigPath(func(name string) string { return vars[name] }); got != want {
			t.Errorf("ConfigPath = %s, want %s", got, want)
		}
	}
}
