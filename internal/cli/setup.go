package cli

import (
	"context"
	"os"
)

// What `hutch up` and `hutch doctor` need of the command line's own ways.

// Confirm asks at the terminal whether to go on. A no, and nobody to ask, is a refusal.
func Confirm(ctx context.Context, env Env, what string) error {
	a := &app{env: env, progress: &progress{}}
	return a.confirmUntilSignal(ctx, what)
}

// ParseDisk reads a size of a disk in bytes, such as 100GB; flag names it in errors.
func ParseDisk(flag, s string) (int64, error) { return parseDisk(flag, s) }

// ContextKey gives the API key that the file at path holds under this name, and the
// name of the context that is the current one.
func ContextKey(path, name string) (key, current string) {
	file, err := readContextFile(path)
	if err != nil {
		return "", ""
	}
	return file.Contexts[name].APIKey, file.Current
}

// RemoveContext removes a context with its key from the file at path, and says whether it
// was there. A file that has no context left goes too.
func RemoveContext(path, name string) (bool, error) {
	file, err := readContextFile(path)
	if err != nil {
		return false, err
	}
	if _, there := file.Contexts[name]; !there {
		return false, nil
	}
	delete(file.Contexts, name)
	if file.Current == name {
		file.Current = ""
	}
	if len(file.Contexts) == 0 {
		return true, os.Remove(path)
	}
	return true, writeContextFile(path, file)
}
