// Package arch holds no code, only the rules of the whole module as tests.
package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/hutchrun/hutch"

// mayImport is the architecture: each package of the module has one line here, with
// the packages of the module that it may import. "*" is all.
var mayImport = map[string][]string{
	"api":                          {},
	"internal/fault":               {},
	"internal/sandbox":             {"internal/fault"},
	"internal/metering":            {"internal/fault", "internal/sandbox"},
	"internal/cron":                {},
	"internal/receipt":             {"internal/fault"}, // ADR 0014
	"internal/guestproto":          {"internal/fault"},
	"internal/hostproto":           {"internal/fault", "internal/sandbox"},
	"internal/store":               {"internal/fault", "internal/metering", "internal/sandbox"},
	"internal/store/bunstore":      {"internal/fault", "internal/metering", "internal/sandbox", "internal/store"},
	"internal/store/sqlite":        {"internal/fault", "internal/sandbox", "internal/store", "internal/store/bunstore"},
	"internal/store/postgres":      {"internal/fault", "internal/sandbox", "internal/store", "internal/store/bunstore"},
	"internal/store/storetest":     {"internal/fault", "internal/metering", "internal/sandbox", "internal/store"},
	"internal/control":             {"internal/fault", "internal/metering", "internal/sandbox", "internal/store", "internal/hostproto", "internal/webhook", "internal/receipt"}, // ADR 0001
	"internal/webhook":             {"internal/fault", "internal/sandbox", "internal/store"},
	"internal/webhook/webhooktest": {"internal/fault", "internal/sandbox", "internal/store"},
	"internal/apiserver":           {"internal/fault", "internal/metering", "internal/sandbox", "internal/control", "internal/hostproto", "internal/store", "internal/guestproto", "internal/span", "api"},
	"internal/sshgate":             {"internal/fault", "internal/guestproto", "internal/hostproto"},
	"internal/cli":                 {"internal/fault", "internal/receipt", "internal/mcp", "api"},
	"internal/mcp":                 {"internal/fault", "api"},
	"internal/config":              {"internal/fault"},
	"internal/gateway":             {"internal/fault"},
	"internal/runtime":             {"internal/fault", "internal/sandbox"},
	"internal/runtime/gvisor":      {"internal/fault", "internal/sandbox", "internal/runtime"},
	"internal/runtime/fake":        {"internal/fault", "internal/sandbox", "internal/runtime"},
	"internal/runtime/runtimetest": {"internal/fault", "internal/sandbox", "internal/runtime"},
	"internal/network":             {"internal/fault", "internal/sandbox"},
	"internal/disk":                {"internal/fault", "internal/sandbox"},
	"internal/hostagent": {"internal/fault", "internal/sandbox", "internal/hostproto", "internal/guestproto", "internal/cron",
		"internal/runtime", "internal/network", "internal/disk", "internal/span"},
	"internal/fakehost":                      {"internal/disk", "internal/fault", "internal/guestproto", "internal/hostagent", "internal/hostproto", "internal/runtime", "internal/runtime/fake"},
	"internal/fakehost/fakeserver":           {"internal/apiserver", "internal/control", "internal/fakehost", "internal/fault", "internal/hostagent", "internal/hostproto", "internal/store", "internal/store/postgres", "internal/store/sqlite"},
	"internal/soakdoc":                       {},
	"internal/span":                          {},
	"internal/telemetry":                     {"internal/fault", "internal/metering", "internal/sandbox", "internal/span"},
	"internal/telemetry/telemetrytest":       {},
	"internal/store/observed":                {"internal/metering", "internal/sandbox", "internal/store"},
	"internal/runtime/traced":                {"internal/runtime", "internal/span"},
	"internal/store/postgres/pgtest":         {},
	"internal/crashmatrix":                   {},
	"internal/guest/guesttest":               {"internal/fault", "internal/guestproto", "internal/guest"},
	"internal/guest":                         {"internal/fault", "internal/guestproto"},
	"cmd/hutch":                              {"*"},
	"cmd/hutch-guest":                        {"internal/guest", "internal/guestproto"},
	"tools/gvisorpatch":                      {},
	"tools/bench":                            {"api"},
	"tools/controlbench":                     {"api", "internal/fakehost", "internal/fakehost/fakeserver", "internal/metering", "internal/sandbox", "internal/store", "internal/store/postgres/pgtest"},
	"internal/runtime/runtimetest/testguest": {},
}

// apart are modules of their own inside the tree: nothing of theirs is ours to judge.
var apart = []string{"cmd/hutch-runsc", "build", "web"}

// pure packages do no I/O, read no clock and start no goroutine.
var pure = []string{"internal/fault", "internal/sandbox", "internal/metering", "internal/cron", "internal/receipt"}

var impure = []string{"net", "net/http", "os", "os/exec", "io/fs", "database/sql", "syscall", "math/rand/v2", "crypto/rand", "log/slog"}

var clock = []string{"Now", "Since", "Until", "After", "AfterFunc", "Sleep", "NewTimer", "NewTicker", "Tick"}

// onlyIn pins a library to the packages that adapt it.
var onlyIn = map[string][]string{
	"database/sql":                           {"internal/store/bunstore", "internal/store/sqlite", "internal/store/postgres"},
	"github.com/uptrace/bun":                 {"internal/store/bunstore", "internal/store/sqlite", "internal/store/postgres"},
	"github.com/jackc/pgx":                   {"internal/store/postgres", "internal/store/postgres/pgtest"},
	"github.com/vishvananda":                 {"internal/network"},
	"github.com/google/nftables":             {"internal/network"},
	"github.com/google/go-containerregistry": {"internal/disk"},
	"github.com/spf13/cobra":                 {"internal/cli", "cmd/hutch"},
	"github.com/standard-webhooks":           {"internal/webhook"},
	"github.com/modelcontextprotocol":        {"internal/mcp"},
	"github.com/prometheus":                  {"internal/telemetry"},
	"go.opentelemetry.io":                    {"internal/telemetry", "internal/telemetry/telemetrytest"},
	"golang.org/x/crypto/ssh":                {"internal/sshgate"},
	"gvisor.dev/gvisor":                      {},
}

const root = "../.."

// walk parses every non-test Go file of the module in this process, so that the test
// cache sees each of them; a test that runs `go list` is served stale.
func walk(t *testing.T, visit func(pkg, path string, f *ast.File)) (seen map[string]bool) {
	t.Helper()
	seen = map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		if d.IsDir() && (d.Name() == "testdata" || d.Name() == "node_modules" || strings.HasPrefix(d.Name(), ".") && rel != "." || slices.Contains(apart, rel)) {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		pkg := filepath.ToSlash(filepath.Dir(rel))
		seen[pkg] = true
		visit(pkg, rel, f)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return seen
}

func under(path, root string) bool { return path == root || strings.HasPrefix(path, root+"/") }

func TestImports(t *testing.T) {
	seen := walk(t, func(pkg, path string, f *ast.File) {
		allowed, listed := mayImport[pkg]
		if !listed {
			t.Errorf("%s: the package has no line in mayImport; add one, and one in ARCHITECTURE.md", pkg)
			return
		}
		for _, spec := range f.Imports {
			imp, _ := strconv.Unquote(spec.Path.Value)
			if own, ok := strings.CutPrefix(imp, module+"/"); ok && !slices.Contains(allowed, own) && !slices.Contains(allowed, "*") {
				t.Errorf("%s: %s may not import %s", path, pkg, own)
			}
			for lib, where := range onlyIn {
				if under(imp, lib) && !slices.Contains(where, pkg) {
					t.Errorf("%s: only %v may import %s", path, where, imp)
				}
			}
			if slices.Contains(pure, pkg) && slices.Contains(impure, imp) {
				t.Errorf("%s: %s is pure and may not import %s", path, pkg, imp)
			}
		}
	})
	for pkg := range mayImport {
		if !seen[pkg] {
			t.Errorf("mayImport lists %s, which no longer exists", pkg)
		}
	}
}

func TestPurePackagesTakeTimeAsArgument(t *testing.T) {
	walk(t, func(pkg, path string, f *ast.File) {
		if !slices.Contains(pure, pkg) {
			return
		}
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				t.Errorf("%s: pure package starts a goroutine", path)
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" && slices.Contains(clock, n.Sel.Name) {
					t.Errorf("%s: pure package uses time.%s", path, n.Sel.Name)
				}
			}
			return true
		})
	})
}

// Every package says what it is for, once.
func TestPackageDocs(t *testing.T) {
	docs := map[string]int{}
	seen := walk(t, func(pkg, _ string, f *ast.File) {
		if f.Doc != nil && !ast.IsGenerated(f) {
			docs[pkg]++
		}
	})
	for pkg := range seen {
		if docs[pkg] != 1 {
			t.Errorf("%s: %d package comments, want one", pkg, docs[pkg])
		}
	}
}

// A file that has grown past 800 lines is two rooms in one.
func TestFileLength(t *testing.T) {
	walk(t, func(_, path string, f *ast.File) {
		if ast.IsGenerated(f) {
			return
		}
		data, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(data), "\n"); n > 800 {
			t.Errorf("%s has %d lines", path, n)
		}
	})
}

// Unfinished work is not left in the tree.
func TestNothingUnfinished(t *testing.T) {
	unfinished := regexp.MustCompile(`\b(TODO|FIXME|XXX|HACK)\b`)
	walk(t, func(_, path string, f *ast.File) {
		for _, group := range f.Comments {
			if m := unfinished.FindString(group.Text()); m != "" {
				t.Errorf("%s: a comment says %s", path, m)
			}
		}
	})
}
