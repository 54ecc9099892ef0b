package config

import (
	"fmt"
	"strings"
)

// Sample is a file in which every key is a comment with its default or an example, but
// for those of set, which are set.
func Sample(set map[string]string) string {
	var b strings.Builder
	b.WriteString("# The settings of hutch on this machine. `hutch config check` says what is wrong in here, `hutch config show`\n" +
		"# what is in force. A line that begins with # sets nothing: it shows the default, or an example.\n")
	last := ""
	for _, k := range Keys {
		table, name := k.parts()
		if table != last {
			fmt.Fprintf(&b, "\n[%s]\n", table)
			last = table
		}
		b.WriteByte('\n')
		for _, line := range wrap(k.Doc+k.orElse(), 100) {
			fmt.Fprintf(&b, "# %s\n", line)
		}
		mark, value := "# ", k.Default
		if given, ok := set[k.Name]; ok {
			mark, value = "", given
		} else if value == "" {
			value = k.Example
		}
		fmt.Fprintf(&b, "%s%s = %s\n", mark, name, k.literal(value))
	}
	return b.String()
}

// literal is a value as TOML.
func (k Key) literal(value string) string {
	if k.Kind == Count || k.Kind == Switch {
		return value
	}
	return fmt.Sprintf("%q", value)
}

func (k Key) orElse() string {
	if k.Default == "" {
		return " Not set: " + k.Unset + "."
	}
	return ""
}

// Reference is the page of docs/ on the file.
func Reference() string {
	var b strings.Builder
	b.WriteString(`# The file of settings

` + "`" + DefaultPath + "`" + ` (` + "`--config FILE`" + ` or ` + "`HUTCH_SERVER_CONFIG`" + ` name another) has the settings of the installation on a machine, in TOML.
It need not be there. ` + "`hutch up`, `server`, `down`, `doctor`" + ` and the other verbs of the machine read it; flags of a verb win over it, and so do the
variables below. A key that is not in this list, a size or a duration without its unit, a value that cannot be: each is
refused, at a start too, with its line and what to do.

    hutch config check          # what is wrong in the file, without a start
    hutch config show           # every setting in force, and where it comes from
    hutch config sample         # a file with every key, to begin with

A change counts at the next start: ` + "`hutch down && hutch up`" + `; sandboxes go on meanwhile. Sizes are written with KB, MB, GB, TB (powers of
1000) or KiB to TiB (of 1024), durations with s, m, h or d.

| key | default | what it is |
|---|---|---|
`)
	for _, k := range Keys {
		def := "`" + strings.Trim(k.literal(k.Default), "`") + "`"
		if k.Default == "" {
			def = k.Unset + "; such as `" + k.literal(k.Example) + "`"
		}
		also := ""
		if k.Flag != "" {
			also = " Flag: `--" + k.Flag + "`."
		}
		if k.Env != "" {
			also += " Variable: `" + k.Env + "`."
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s%s |\n", k.Name, def, k.Doc, also)
	}
	b.WriteString("\n`prices.vcpu_second` is the key `vcpu_second` of the table `[prices]`:\n\n" +
		"    listen = \"127.0.0.1:4881\"\n\n    [prices]\n    vcpu_second = \"0.000012\"\n    gib_second = \"0.0000035\"\n")
	return b.String()
}

// wrap breaks a text into lines of at most so many letters.
func wrap(text string, width int) (lines []string) {
	line := ""
	for word := range strings.FieldsSeq(text) {
		if line != "" && len(line)+1+len(word) > width {
			lines, line = append(lines, line), ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}
