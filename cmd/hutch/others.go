package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/hutchrun/hutch/internal/cli"
)

// server is a server that runs on this machine.
type runningServer struct {
	Data string `json:"data"`
	serverInfo
}

// runningServers finds the servers of all installations on this machine by the locks that
// their processes hold open. Only root sees those of others.
func runningServers() (list []runningServer) {
	links, _ := filepath.Glob("/proc/[0-9]*/fd/*") // fails for a bad pattern only
	for _, link := range links {
		to, err := os.Readlink(link)
		if err != nil || filepath.Base(to) != "lock" {
			continue
		}
		l := layout{data: filepath.Dir(to)}
		info, err := l.readServer()
		pid, _ := strconv.Atoi(strings.Split(link, "/")[2])
		if err == nil && info.PID == pid {
			list = append(list, runningServer{l.data, info})
		}
	}
	return list
}

// tellOthers says which other installations run, after one was found not to.
func tellOthers(env cli.Env, l layout) {
	for _, s := range runningServers() {
		if s.Data != l.data {
			fmt.Fprintf(env.Stdout, "another one runs on %s (pid %d, %s); `hutch down --data %s` ends it\n", s.Data, s.PID, s.URL, s.Data)
		}
	}
}

// writeDurably replaces a file with a document, readable by its owner only. It is on the
// disk when this returns.
func writeDurably(path string, document any) error {
	text, err := json.MarshalIndent(document, "", "  ")
	if err != nil {
		return err
	}
	return replaceFile(path, append(text, '\n'), 0o600)
}
