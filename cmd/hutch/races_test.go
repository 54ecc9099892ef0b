package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// The races of internal/histories once on real sandboxes.

// ask sends a verb without a body and gives how it ended: the status, and the operation's.
func (b *box) ask(method, path string) (int, string) {
	b.t.Helper()
	status, text := api(b.t, method, "/v1/sandboxes/"+b.name+path, nil, nil)
	var body struct {
		Operation *struct{ Status string }
	}
	if json.Unmarshal([]byte(text), &body) != nil || body.Operation == nil {
		return status, ""
	}
	return status, body.Operation.Status
}

// Z5, S4: commands that race sleeps, and come up to half a second after one was accepted,
// are answered; what they were acknowledged is there at the end.
func TestCommandsAgainstSleeps_S4_Z5(t *testing.T) {
	b := newBox(t)
	var all sync.WaitGroup
	for client := range 3 {
		all.Go(func() {
			for i := range 3 {
				line := fmt.Sprintf("line %d.%d.", client, i)
				if r := b.exec(nil, "--", "sh", "-c", "echo "+line+" >> /dev/shm/log"); r.code != 0 {
					t.Errorf("a command that races a sleep: %s", r)
				}
			}
		})
	}
	all.Go(func() {
		for range 3 {
			status, _ := b.ask(http.MethodPost, "/sleep")
			if status >= 400 && status != http.StatusConflict {
				t.Errorf("a sleep that races commands: %d", status)
			}
			time.Sleep(time.Duration(rand.IntN(500)) * time.Millisecond) // the race, not a wait
		}
	})
	all.Wait()
	log := b.sh("cat /dev/shm/log")
	for client := range 3 {
		for i := range 3 {
			if line := fmt.Sprintf("line %d.%d.", client, i); strings.Count(log, line) != 1 {
				t.Errorf("%q was acknowledged and is there %d times: %q", line, strings.Count(log, line), log)
			}
		}
	}
}

// S5: a deletion wins against what is at work, whatever that is.
func TestDeletionWins_S5(t *testing.T) {
	for _, rival := range []string{"stop", "sleep", "fork"} {
		b := newBox(t)
		status, text := api(t, http.MethodPost, "/v1/sandboxes/"+b.name+"/"+rival, nil, strings.NewReader("{}"))
		if status >= 400 {
			t.Errorf("%s: %d: %s", rival, status, text)
		}
		time.Sleep(time.Duration(rand.IntN(150)) * time.Millisecond) // the race, not a wait
		if status, op := b.ask(http.MethodDelete, "?wait=2m"); status != http.StatusOK || op != "succeeded" {
			t.Errorf("the deletion during a %s: %d, the operation %s", rival, status, op)
		}
		hutchFails(t, "not_found", "get", b.name)
		var fork struct {
			Forks []struct{ Sandbox struct{ ID string } }
		}
		if err := json.Unmarshal([]byte(text), &fork); err != nil {
			t.Fatal(err)
		}
		for _, f := range fork.Forks { // one that had its capture is finished, another has failed
			hutchOK(t, "delete", f.Sandbox.ID, "--yes")
		}
	}
}
