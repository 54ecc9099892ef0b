package gvisor

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// record is what Adopt needs, kept in Spec.Dir. It is written before anything of the
// sandbox runs and again when its processes are known. A record that was not yet
// written again belongs to a boot that nobody finished: all in its group is killed.
type record struct {
	Boot     string  `json:"boot"` // the machine's boot id
	ID       string  `json:"id"`
	Version  string  `json:"version"`  // of the runsc that it runs under
	Running  bool    `json:"running"`  // Start or Restore has returned, or was about to
	Restored bool    `json:"restored"` // the memory came from an image
	Sandbox  process `json:"sandbox"`
	Gofer    process `json:"gofer"`
}

func recordPath(dir string) string { return filepath.Join(dir, "hutch.json") }

// save replaces the record in one step. It is not synced: after a power cut no
// process is left that it could name.
func (r record) save(dir string) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	tmp := recordPath(dir) + ".new"
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, recordPath(dir))
}

func loadRecord(dir string) (record, error) {
	var r record
	data, err := os.ReadFile(recordPath(dir))
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(data, &r)
}

// findProcesses reads from runsc's own state file which processes it has started.
func findProcesses(dir string) (sandbox, gofer process, err error) {
	var state struct {
		GoferPid int `json:"goferPid"`
		Sandbox  struct {
			Pid int `json:"pid"`
		} `json:"sandbox"`
	}
	name := containerID + "_sandbox:" + containerID + ".state" // runsc/container/state_file.go
	data, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return sandbox, gofer, err
	}
	if err := json.Unmarshal(data, &state); err != nil {
		return sandbox, gofer, err
	}
	if sandbox, err = processOf(state.Sandbox.Pid); err != nil {
		return sandbox, gofer, err
	}
	gofer, err = processOf(state.GoferPid)
	return sandbox, gofer, err
}

// clean removes what runsc and this package left in dir but for the logs. A process
// that is long gone must not be found by its record again.
func clean(dir string) error {
	names, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, n := range names {
		if strings.HasSuffix(n.Name(), ".log") {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, n.Name())); err != nil {
			return err
		}
	}
	return nil
}

// lastWords gives the last message of runsc's log: JSON objects in a row
// (runsc/cmd/util).
func lastWords(dir string) string {
	f, err := os.Open(filepath.Join(dir, logName))
	if err != nil {
		return ""
	}
	defer f.Close()
	words := ""
	for d := json.NewDecoder(f); ; {
		var entry struct {
			Msg string `json:"msg"`
		}
		if d.Decode(&entry) != nil {
			return words
		}
		words = entry.Msg
	}
}
