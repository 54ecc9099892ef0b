package gvisor

import "os"

// RemoveParent removes the control group that a test run had its sandboxes in.
func RemoveParent(name string) {
	l, err := readLayout()
	if err != nil {
		return
	}
	for _, dir := range l.group("", name).dirs() {
		_ = os.Remove(dir)
	}
}
