package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/pelletier/go-toml/v2"
	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/fault"
)

// defaultURL is where `hutch up` listens when nothing else is said.
const defaultURL = "http://127.0.0.1:4880"

// contextFile is the client's configuration: which server to speak to, and with
// which key.
type contextFile struct {
	Current  string                   `toml:"current"`
	Contexts map[string]serverContext `toml:"contexts"`
}

// serverContext is one server.
type serverContext struct {
	URL    string `toml:"url"`
	APIKey string `toml:"api_key"`
}

// connection is what a verb connects with, and where each part came from.
type connection struct {
	Context string
	URL     string
	APIKey  string
	KeyFrom string // "HUTCH_API_KEY", "context", or "" without a key
	Source  string // "HUTCH_URL", "config" or "default"
	Path    string // of the context file, whether it exists or not

	// The current context where HUTCH_URL names another server than it, whose key
	// therefore stays here.
	Unused string
	// Others says that there are contexts and none is the current one.
	Others bool
}

// ConfigPath gives the path of the context file: HUTCH_CONFIG, else hutch/config.toml
// below XDG_CONFIG_HOME or ~/.config.
func ConfigPath(getenv func(string) string) string {
	if path := getenv("HUTCH_CONFIG"); path != "" {
		return path
	}
	if dir := getenv("XDG_CONFIG_HOME"); dir != "" {
		return filepath.Join(dir, "hutch", "config.toml")
	}
	return filepath.Join(getenv("HOME"), ".config", "hutch", "config.toml")
}

// WriteContext makes or replaces the context called name in the file at path, and
// makes it the current one. The file is replaced as a whole, so that a reader sees
// the old one or the new one, and only its owner may read it.
func WriteContext(path, name, url, key string) error {
	file, err := readContextFile(path)
	if err != nil {
		return err
	}
	if file.Contexts == nil {
		file.Contexts = map[string]serverContext{}
	}
	file.Contexts[name] = serverContext{URL: url, APIKey: key}
	file.Current = name
	return writeContextFile(path, file)
}

func writeContextFile(path string, file contextFile) error {
	text, err := toml.Marshal(file)
	if err != nil {
		return fmt.Errorf("encode the contexts: %w", err)
	}
	if err := writeFileAtomic(path, text); err != nil {
		return fault.Wrap(err, fault.Internal, "cannot write the context file %s; check that its directory is yours", path)
	}
	return nil
}

// writeFileAtomic replaces the file at path, readable by its owner only.
func writeFileAtomic(path string, text []byte) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(dir, ".config-*") // made with mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) // fails after the rename, as it should
	_, err = tmp.Write(text)
	if err == nil {
		err = tmp.Sync()
	}
	if closeErr := tmp.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}

// readContextFile reads the file at path; one that is not there is empty.
func readContextFile(path string) (contextFile, error) {
	var file contextFile
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return file, nil
	}
	if err != nil {
		return file, fault.Wrap(err, fault.InvalidArgument, "cannot read the context file %s", path)
	}
	if err := toml.Unmarshal(text, &file); err != nil {
		return file, fault.Wrap(err, fault.InvalidArgument,
			"the context file %s is not valid TOML; correct it, or move it away and run `hutch up` again, which writes one", path)
	}
	return file, nil
}

// connect decides which server to speak to. HUTCH_URL and HUTCH_API_KEY win over the
// current context. The key of a context is never sent to another URL than its own;
// where HUTCH_URL only writes that URL differently, the context's is used.
func (a *app) connect() (connection, error) {
	conn := connection{Path: ConfigPath(a.env.Getenv), URL: defaultURL, Source: "default"}
	url, key := a.env.Getenv("HUTCH_URL"), a.env.Getenv("HUTCH_API_KEY")
	if clean, ok := cleanURL(url); ok {
		url = clean
	}
	if url != "" && key != "" { // a broken file does not matter then
		conn.URL, conn.APIKey, conn.Source, conn.KeyFrom = url, key, "HUTCH_URL", keyFromEnv
		return conn, nil
	}
	file, err := readContextFile(conn.Path)
	if err != nil {
		return conn, err
	}
	if current, ok := file.Contexts[file.Current]; ok {
		conn.Context, conn.URL, conn.APIKey, conn.Source = file.Current, current.URL, current.APIKey, "config"
		if clean, ok := cleanURL(current.URL); ok {
			conn.URL = clean
		}
	} else if file.Current != "" {
		return conn, fault.New(fault.InvalidArgument,
			"the current context %q is not in %s; `hutch context use NAME` chooses one that is, `hutch context ls` lists them", file.Current, conn.Path)
	} else {
		conn.Others = len(file.Contexts) > 0
	}
	if url != "" && (conn.Context == "" || !sameServer(url, conn.URL)) {
		conn.Unused, conn.Context = conn.Context, ""
		conn.URL, conn.APIKey, conn.Source = url, "", "HUTCH_URL"
	}
	if conn.APIKey != "" {
		conn.KeyFrom = keyFromContext
	}
	if key != "" {
		conn.APIKey, conn.KeyFrom = key, keyFromEnv
	}
	return conn, nil
}

// Where a key comes from.
const (
	keyFromEnv     = "HUTCH_API_KEY"
	keyFromContext = "context"
)

func (a *app) configCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Show which server hutch speaks to, and why",
		Long: "Show which server hutch speaks to, and where that was said: the current context of the context file, " +
			"or HUTCH_URL and HUTCH_API_KEY, which win over it. The key itself is not shown.",
		Example: "hutch config\nHUTCH_URL=https://hutch.example.com hutch config --json",
		Args:    named(),
		RunE: func(*cobra.Command, []string) error {
			conn, err := a.connect()
			if err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(map[string]any{
					"url": conn.URL, "context": conn.Context, "source": conn.Source,
					"path": conn.Path, "has_api_key": conn.APIKey != "", "api_key_source": conn.KeyFrom,
				})
			}
			return a.printFields([][2]string{
				{"url", conn.URL}, {"context", orDash(conn.Context)}, {"source", conn.Source},
				{"file", conn.Path}, {"api key", keyText(conn)},
			})
		},
	}
	addJSON(cmd, &asJSON)
	return cmd
}

// keyText says which key is used, without the key.
func keyText(conn connection) string {
	switch conn.KeyFrom {
	case keyFromEnv:
		return "that of HUTCH_API_KEY"
	case keyFromContext:
		return "that of the context"
	}
	return "none"
}
