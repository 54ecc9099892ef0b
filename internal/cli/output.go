package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"

	"charm.land/lipgloss/v2"
	"charm.land/lipgloss/v2/table"
	"github.com/charmbracelet/colorprofile"
	"golang.org/x/term"
)

// stateColors are the terminal's own colours, so that they suit its theme.
var stateColors = map[string]string{
	"creating": "3", "ready": "2", "sleeping": "4", "stopped": "8", "archived": "8", "failed": "1", "deleted": "8",
}

// printJSON writes the one JSON document of a verb.
func (a *app) printJSON(doc any) error {
	return writeJSON(a.env.Stdout, doc)
}

func writeJSON(w io.Writer, doc any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(doc)
}

// printLine writes a JSON object on a line of its own, as streams have them.
func (a *app) printLine(object any) error {
	enc := json.NewEncoder(a.env.Stdout)
	enc.SetEscapeHTML(false)
	return enc.Encode(object)
}

// say writes a line for people to stdout.
func (a *app) say(format string, args ...any) {
	fmt.Fprintf(a.env.Stdout, format+"\n", args...)
}

// note writes a line beside the data, to stderr.
func (a *app) note(format string, args ...any) {
	a.progress.clear()
	fmt.Fprintf(a.env.Stderr, format+"\n", args...)
}

// printTable writes rows below their headers. It is the same on a terminal and in a
// pipe but for colour: columns aligned by spaces, no frame, nothing wrapped.
func (a *app) printTable(headers []string, rows [][]string) error {
	stateColumn := -1
	for i, h := range headers {
		if h == "STATE" {
			stateColumn = i
		}
	}
	t := table.New().Border(lipgloss.HiddenBorder()).
		BorderTop(false).BorderBottom(false).BorderLeft(false).BorderRight(false).
		BorderColumn(false).BorderHeader(false).BorderRow(false).
		Headers(headers...).Rows(rows...).Wrap(false).
		StyleFunc(func(row, column int) lipgloss.Style {
			style := lipgloss.NewStyle()
			if column < len(headers)-1 {
				style = style.PaddingRight(2)
			}
			switch {
			case row == table.HeaderRow:
				style = style.Bold(true)
			case column == stateColumn:
				word, _, _ := strings.Cut(rows[row][column], " ")
				if color, ok := stateColors[word]; ok {
					style = style.Foreground(lipgloss.Color(color))
				}
			}
			return style
		})
	return a.printStyled(trimLines(t.String()) + "\n")
}

// printFields writes names and values, one pair a line.
func (a *app) printFields(fields [][2]string) error {
	width := 0
	for _, f := range fields {
		width = max(width, len(f[0]))
	}
	for _, f := range fields {
		if _, err := fmt.Fprintf(a.env.Stdout, "%-*s  %s\n", width, f[0], clean(f[1])); err != nil {
			return err
		}
	}
	return nil
}

// printStyled writes text with as much of its colour as stdout takes: none in a
// pipe, and none where NO_COLOR says so.
func (a *app) printStyled(text string) error {
	environ := []string{}
	for _, name := range []string{"TERM", "COLORTERM", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE"} {
		if value := a.env.Getenv(name); value != "" {
			environ = append(environ, name+"="+value)
		}
	}
	w := colorprofile.NewWriter(a.env.Stdout, environ)
	if a.env.Getenv("NO_COLOR") != "" {
		w.Profile = min(w.Profile, colorprofile.NoTTY)
	}
	_, err := io.WriteString(w, text)
	return err
}

// trimLines takes the padding off the ends of lines.
func trimLines(text string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		lines[i] = strings.TrimRight(line, " ")
	}
	return strings.Join(lines, "\n")
}

// clean makes text from elsewhere safe for a terminal: control characters, which
// could move the cursor or change its title, become spaces.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r < 0x20 || r >= 0x7f && r < 0xa0 {
			return ' '
		}
		return r
	}, s)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return clean(s)
}

// terminalFile gives the file behind a stream where it is a terminal.
func terminalFile(stream any) (*os.File, bool) {
	f, ok := stream.(*os.File)
	return f, ok && term.IsTerminal(int(f.Fd()))
}
