// Package crashmatrix keeps docs/crash-matrix.md: what the tests that make faults have
// proved. Each package with such tests has a section there that its own run writes
// (`go test -update`) or compares. No cell comes from anything but a test that ran to
// its end and found what the cell says.
package crashmatrix

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
)

var update = flag.Bool("update", false, "write this package's section of docs/crash-matrix.md")

// Section is the part of the document that one package proves.
type Section struct {
	name, path string
	tables     []*Table
}

// New begins a section. path is the document's, from the package's directory.
func New(name, path string) *Section { return &Section{name: name, path: path} }

// Table is one table. Its rows and cells may be proved in any order, by any goroutine.
type Table struct {
	title, text string
	columns     []string

	mu     sync.Mutex
	rows   map[string]*row
	notRun string
}

type row struct {
	order int
	cells map[string]string
}

// Table adds a table with a heading, a line of text ("" for none) and columns behind
// the first, which names the row.
func (s *Section) Table(title, text string, columns ...string) *Table {
	t := &Table{title: title, text: text, columns: columns, rows: map[string]*row{}}
	s.tables = append(s.tables, t)
	return t
}

// Prove fills a cell. Rows are sorted by order. Two tests that prove the same cell
// must say the same.
func (t *Table) Prove(order int, name, column, outcome string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !slices.Contains(t.columns[1:], column) {
		panic(fmt.Sprintf("the table %s has no column %s", t.title, column))
	}
	r := t.rows[name]
	if r == nil {
		r = &row{order: order, cells: map[string]string{}}
		t.rows[name] = r
	}
	if old := r.cells[column]; old != "" && old != outcome {
		outcome = old + " / " + outcome
	}
	r.cells[column] = outcome
}

// NotRun says why a table was not proved on this machine.
func (t *Table) NotRun(why string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.notRun = why
}

// Main is for TestMain: after a run in which all tests passed it writes or compares the
// section, and gives the exit code. A run of some tests only proves too little for that.
func (s *Section) Main(code int) int {
	if code != 0 || partial() {
		return code
	}
	if err := s.settle(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

func partial() bool {
	for _, name := range []string{"test.run", "test.skip", "test.list", "test.bench", "test.fuzz"} {
		if f := flag.Lookup(name); f != nil && f.Value.String() != "" {
			return true
		}
	}
	return false
}

func (s *Section) settle() error {
	data, err := os.ReadFile(s.path)
	if err != nil {
		return err
	}
	begin, end := "<!-- begin "+s.name+" -->\n", "<!-- end "+s.name+" -->\n"
	before, rest, ok := strings.Cut(string(data), begin)
	old, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no section %s", s.path, s.name)
	}
	if *update {
		return os.WriteFile(s.path, []byte(before+begin+s.render("")+end+after), 0o644)
	}
	// What this machine cannot prove stands as it was proved elsewhere.
	if got := s.render(old); got != old {
		return errors.Join(fmt.Errorf("%s is not what the tests of %s have proved; run them with -update and read the difference", s.path, s.name),
			difference(old, got))
	}
	return nil
}

// render writes the section; a table that was not run is taken from old, where it is
// there.
func (s *Section) render(old string) string {
	var b strings.Builder
	cells := 0
	for _, t := range s.tables {
		text, n := t.render()
		if t.notRun != "" {
			text = "### " + t.title + "\n\nNot run: " + t.notRun + "\n"
			if kept := tableOf(old, t.title); kept != "" {
				text, n = kept, count(kept)
			}
		}
		b.WriteString("\n" + text)
		cells += n
	}
	return fmt.Sprintf("\n%d cells.\n%s\n", cells, b.String())
}

func (t *Table) render() (string, int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var b strings.Builder
	b.WriteString("### " + t.title + "\n\n")
	if t.text != "" {
		b.WriteString(t.text + "\n\n")
	}
	line(&b, t.columns)
	line(&b, slices.Repeat([]string{"---"}, len(t.columns)))
	names := make([]string, 0, len(t.rows))
	for name := range t.rows {
		names = append(names, name)
	}
	slices.SortFunc(names, func(x, y string) int {
		if d := t.rows[x].order - t.rows[y].order; d != 0 {
			return d
		}
		return strings.Compare(x, y)
	})
	n := 0
	for _, name := range names {
		cells := []string{name}
		for _, c := range t.columns[1:] {
			text := t.rows[name].cells[c]
			if text != "" {
				n++
			}
			cells = append(cells, text)
		}
		line(&b, cells)
	}
	return b.String(), n
}

func line(b *strings.Builder, cells []string) {
	b.WriteString("| " + strings.Join(cells, " | ") + " |\n")
}

// tableOf cuts a table out of a section.
func tableOf(section, title string) string {
	_, rest, ok := strings.Cut(section, "\n### "+title+"\n")
	if !ok {
		return ""
	}
	text, _, _ := strings.Cut(rest, "\n\n### ")
	return "### " + title + "\n" + strings.TrimRight(text, "\n") + "\n"
}

// count counts the filled cells of a table that was rendered before.
func count(table string) int {
	n, lines := 0, 0
	for l := range strings.Lines(table) {
		if !strings.HasPrefix(l, "| ") {
			continue
		}
		if lines++; lines <= 2 {
			continue
		}
		for i, cell := range strings.Split(strings.Trim(strings.TrimSpace(l), "|"), "|") {
			if i > 0 && strings.TrimSpace(cell) != "" {
				n++
			}
		}
	}
	return n
}

// difference names the first lines that differ.
func difference(old, got string) error {
	a, b := strings.Split(old, "\n"), strings.Split(got, "\n")
	var all error
	for i, n := 0, 0; i < max(len(a), len(b)) && n < 5; i++ {
		var x, y string
		if i < len(a) {
			x = a[i]
		}
		if i < len(b) {
			y = b[i]
		}
		if x != y {
			n++
			all = errors.Join(all, fmt.Errorf("  is     %s\n  proved %s", x, y))
		}
	}
	return all
}
