// Package config is the operator's settings of an installation (R5): the one list of
// keys with their defaults, and the file that sets them. Values are kept as they are
// written; what is wrong is told with its line and what to do.
package config

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"

	"github.com/hutchrun/hutch/internal/fault"
)

// DefaultPath is where the file lies unless somebody says else.
const DefaultPath = "/etc/hutch/hutch.toml"

// Problem is something in a file that cannot be.
type Problem struct {
	Line    int    `json:"line"` // 0 is the file as a whole
	Key     string `json:"key,omitempty"`
	Message string `json:"message"` // what is wrong; and what to do
}

func (p Problem) String() string {
	if p.Line == 0 {
		return p.Message
	}
	return fmt.Sprintf("line %d: %s", p.Line, p.Message)
}

// Value is what a file says of a key.
type Value struct {
	Text string
	Line int
}

// File is what a file sets, by the keys' names.
type File map[string]Value

// Parse reads a file. What is not wrong is in the File also where there are problems.
func Parse(text []byte) (File, []Problem) {
	var whole map[string]any // for what is wrong with the TOML itself, keys that are set twice included
	if err := toml.Unmarshal(text, &whole); err != nil {
		line := 0
		if bad, ok := errors.AsType[*toml.DecodeError](err); ok {
			line, _ = bad.Position()
		}
		return nil, []Problem{{line, "", strings.TrimPrefix(err.Error(), "toml: ") + "; write KEY = \"VALUE\", or [TABLE] above keys of a table"}}
	}
	file, problems := File{}, []Problem(nil)
	var table []string
	passed := false // the table is none of ours: it was told of, and its keys are not
	var p unstable.Parser
	p.Reset(text)
	for p.NextExpression() {
		e := p.Expression()
		if e.Kind == unstable.KeyValue {
			if !passed {
				problems = append(problems, file.take(&p, table, e)...)
			}
			continue
		}
		var line int
		table, line = keyOf(&p, e)
		name := strings.Join(table, ".")
		if passed = e.Kind == unstable.ArrayTable || !isTable(name); passed {
			problems = append(problems, Problem{line, name, unknown("["+name+"]", tables())})
		}
	}
	return file, problems
}

// take reads one key, or those of an inline table.
func (f File) take(p *unstable.Parser, table []string, e *unstable.Node) []Problem {
	parts, line := keyOf(p, e)
	name := strings.Join(append(slices.Clone(table), parts...), ".")
	value := e.Value()
	if value.Kind == unstable.InlineTable && isTable(name) {
		var problems []Problem
		for it := value.Children(); it.Next(); {
			problems = append(problems, f.take(p, strings.Split(name, "."), it.Node())...)
		}
		return problems
	}
	key, known := find(name)
	if !known {
		return []Problem{{line, name, unknown(name, names())}}
	}
	text := string(value.Data)
	if what := wrong(key, value.Kind, text); what != "" {
		return []Problem{{line, name, name + " " + what}}
	}
	f[name] = Value{Text: text, Line: line}
	return nil
}

func keyOf(p *unstable.Parser, e *unstable.Node) (parts []string, line int) {
	for it := e.Key(); it.Next(); {
		if line == 0 {
			line = p.Shape(it.Node().Raw).Start.Line
		}
		parts = append(parts, string(it.Node().Data))
	}
	return parts, line
}

// wrong says what is wrong with a value, "" for nothing.
func wrong(k Key, kind unstable.Kind, text string) string {
	if k.Kind == Count {
		n, err := strconv.ParseInt(strings.ReplaceAll(text, "_", ""), 10, 64)
		if kind != unstable.Integer || err != nil || n < 0 || k.Most > 0 && n > k.Most {
			return fmt.Sprintf("is not a whole number from 0 to %d; write it as %s, without quotes", k.Most, k.Example)
		}
		return ""
	}
	if k.Kind == Switch {
		if kind != unstable.Bool {
			return "is neither true nor false; write one of them, without quotes"
		}
		return ""
	}
	if kind != unstable.String {
		return fmt.Sprintf("is not in quotes; write it as %q", k.Example)
	}
	return k.Wrong(text)
}

// Wrong says what is wrong with the text of a value, "" for nothing.
func (k Key) Wrong(text string) string {
	var err error
	switch k.Kind {
	case Size:
		_, err = ParseSize(text)
	case Duration:
		_, err = ParseDuration(text)
	case Decimal:
		if !decimal.MatchString(text) {
			return fmt.Sprintf("%q is no exact decimal; write digits and a point, as %q", text, k.Example)
		}
	}
	if err != nil {
		return fmt.Sprintf("%q %s", text, fault.Of(err).Message)
	}
	if text == "" {
		return fmt.Sprintf("is empty; write it as %q, or leave the line out", k.Example)
	}
	if k.Choices != nil && !slices.Contains(k.Choices, text) {
		return fmt.Sprintf("%q is not one of %s; choose one of them", text, strings.Join(k.Choices, ", "))
	}
	if k.check != nil {
		if what := k.check(text); what != "" {
			return fmt.Sprintf("%q %s", text, what)
		}
	}
	return ""
}

var (
	decimal     = regexp.MustCompile(`^\d{1,12}(\.\d{1,18})?$`)
	sizeForm    = regexp.MustCompile(`^(\d{1,15}(?:\.\d{1,6})?) ?([KMGT]i?B)$`)
	spanForm    = regexp.MustCompile(`^(\d{1,9})(s|m|h|d)$`)
	bytesOf     = map[string]float64{"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
	durationsOf = map[string]time.Duration{"s": time.Second, "m": time.Minute, "h": time.Hour, "d": 24 * time.Hour}
)

// ParseSize reads a size in bytes. A unit is needed: KB to TB are powers of 1000, KiB to
// TiB of 1024.
func ParseSize(text string) (int64, error) {
	m := sizeForm.FindStringSubmatch(text)
	if m == nil {
		return 0, fault.New(fault.InvalidArgument, "is not a size; write a number and a unit of KB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 100GB")
	}
	n, err := strconv.ParseFloat(m[1], 64)
	if bytes := n * bytesOf[m[2]]; err == nil && bytes >= 1 && bytes < math.MaxInt64 {
		return int64(math.Round(bytes)), nil
	}
	return 0, fault.New(fault.InvalidArgument, "is a size that cannot be; write one from 1KB to 8000000TB")
}

// ParseDuration reads a duration. A unit is needed: s, m, h or d.
func ParseDuration(text string) (time.Duration, error) {
	m := spanForm.FindStringSubmatch(text)
	if m == nil {
		return 0, fault.New(fault.InvalidArgument, "is not a duration; write a whole number and a unit of s, m, h or d, such as 90d")
	}
	n, err := strconv.ParseInt(m[1], 10, 64)
	if err != nil || n < 1 || n > int64(math.MaxInt64/durationsOf[m[2]]) {
		return 0, fault.New(fault.InvalidArgument, "is a duration that cannot be; write one from 1s to 36500d")
	}
	return time.Duration(n) * durationsOf[m[2]], nil
}

// unknown refuses a name, with the one that is most like it.
func unknown(name string, known []string) string {
	const what = "%s is no setting of this version of hutch; "
	best := slices.MinFunc(known, func(a, b string) int { return cmp.Compare(distance(a, name), distance(b, name)) })
	if distance(best, name) <= 3 {
		return fmt.Sprintf(what+"did you mean %s?", name, best)
	}
	return fmt.Sprintf(what+"remove the line (`hutch config show` lists all there are)", name)
}

// distance is how many letters two words differ in.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range a {
		above := row[0]
		row[0] = i + 1
		for j := range b {
			cost := above
			if a[i] != b[j] {
				cost++
			}
			above = row[j+1]
			row[j+1] = min(cost, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}

func names() (list []string) {
	for _, k := range Keys {
		list = append(list, k.Name)
	}
	return list
}

// tables are the names of the tables, in brackets.
func tables() (list []string) {
	for _, k := range Keys {
		if table, _ := k.parts(); table != "" && !slices.Contains(list, "["+table+"]") {
			list = append(list, "["+table+"]")
		}
	}
	return list
}

func isTable(name string) bool { return slices.Contains(tables(), "["+name+"]") }

// parts are the key's table, "" for none, and its name there.
func (k Key) parts() (table, name string) {
	if table, name, ok := strings.Cut(k.Name, "."); ok {
		return table, name
	}
	return "", k.Name
}
