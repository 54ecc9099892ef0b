package arch

import (
	"go/ast"
	"go/token"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// logMethods are the methods of a logger that take keys and values, with the place of
// the first key.
var logMethods = map[string]int{
	"With": 0, "Debug": 1, "Info": 1, "Warn": 1, "Error": 1,
	"DebugContext": 2, "InfoContext": 2, "WarnContext": 2, "ErrorContext": 2, "Log": 3,
}

// unkeyed are ways to log, or to name a key, that this test does not read.
var unkeyed = []string{"LogAttrs", "WithGroup", "Group", "Any", "String", "Int", "Int64", "Duration", "Bool", "Time", "Attr"}

// documented gives the first column of a table in a document beneath docs.
func documented(t *testing.T, file, heading string) []string {
	t.Helper()
	b, err := os.ReadFile(root + "/docs/" + file)
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(b), "\n## "+heading+"\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var out []string
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(section, -1) {
		out = append(out, m[1])
	}
	if len(out) == 0 {
		t.Fatalf("docs/%s has no table beneath %q", file, heading)
	}
	return out
}

// isLogger says whether an expression names a logger, as all of them are named here.
func isLogger(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name == "log" || e.Name == "Log" || e.Name == "slog"
	case *ast.SelectorExpr:
		return e.Sel.Name == "log" || e.Sel.Name == "Log"
	}
	return false
}

// Every key of a log line is one of docs/logs.md and each of those is used; a message is
// a constant; and what is told at level info has not failed.
func TestLogKeys(t *testing.T) {
	keys := documented(t, "logs.md", "Keys")
	used := map[string]bool{}
	walk(t, func(pkg, path string, f *ast.File) {
		ast.Inspect(f, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			sel, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || !isLogger(sel.X) {
				return true
			}
			first, keyed := logMethods[sel.Sel.Name]
			if !keyed {
				if slices.Contains(unkeyed, sel.Sel.Name) {
					t.Errorf("%s: %s hides its keys from this test; write \"key\", value", path, sel.Sel.Name)
				}
				return true
			}
			if len(call.Args) < first {
				return true // another type's method
			}
			if first > 0 {
				if m, ok := call.Args[first-1].(*ast.BasicLit); sel.Sel.Name != "Log" && !(ok && m.Kind == token.STRING) && !isMessage(call.Args[first-1]) {
					t.Errorf("%s: the message of %s is put together; put what varies beneath a key", path, sel.Sel.Name)
				}
			}
			for _, key := range keysOf(t, path, call.Args[first:]) {
				used[key] = true
				if !slices.Contains(keys, key) {
					t.Errorf("%s: the key %q is not in docs/logs.md; use one that is, or add it there", path, key)
				}
				if key == "err" && strings.HasPrefix(sel.Sel.Name, "Info") {
					t.Errorf("%s: a line at level info has no err: what failed is a warning", path)
				}
			}
			return true
		})
	})
	for _, key := range keys {
		if !used[key] {
			t.Errorf("docs/logs.md lists %q, which no line has", key)
		}
	}
	if len(used) < 20 {
		t.Errorf("only %d keys were found: does this test still read the tree?", len(used))
	}
}

// isMessage lets a function pass on the constant that it was given.
func isMessage(e ast.Expr) bool {
	id, ok := e.(*ast.Ident)
	return ok && id.Name == "what"
}

func keysOf(t *testing.T, path string, args []ast.Expr) (keys []string) {
	t.Helper()
	for i := 0; i < len(args); i += 2 {
		lit, ok := args[i].(*ast.BasicLit)
		if !ok || lit.Kind != token.STRING || i+1 == len(args) {
			t.Errorf("%s: a key that is no constant, or has no value", path)
			return keys
		}
		key, _ := strconv.Unquote(lit.Value)
		keys = append(keys, key)
	}
	return keys
}
