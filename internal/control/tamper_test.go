package control

import (
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/sandbox"
)

// TestTampering_B7: whoever changes anything in the ledger or in what it comes from, past
// the guard of the database, is found out: each number and each byte of text.
func TestTampering_B7(t *testing.T) {
	t.Parallel()
	l := newLife(t)
	l.damaged = true
	l.priced(60, "2", "1") // an interval is split
	l.told(10, sandbox.EventCreated)
	l.ask(100, l.Sleep)
	l.told(110, sandbox.EventSlept)
	l.ask(200, l.Wake)
	l.told(210, sandbox.EventWoken)
	l.ask(300, l.Stop)
	l.told(310, sandbox.EventStopped)
	l.clock.set(l.t0.Add(time.Hour))

	raw, err := sql.Open("sqlite", l.path+"?_pragma=busy_timeout(10000)")
	must0(t, err)
	defer raw.Close()
	exec := func(query string, args ...any) {
		t.Helper()
		if _, err := raw.Exec(query, args...); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
	}
	for _, trigger := range []string{"meter_entries_update", "meter_entries_delete", "meter_facts_update", "meter_facts_delete"} {
		exec("DROP TRIGGER " + trigger)
	}
	found := func() bool {
		b, err := l.Bill(t.Context(), me, BillQuery{Verify: true})
		return err != nil || len(b.Differences) > 0
	}
	if found() {
		t.Fatal("there are differences before anything is changed")
	}
	tries := 0
	attempt := func(table, column string, row int64, was, now any) {
		t.Helper()
		tries++
		set := fmt.Sprintf("UPDATE %s SET %s = ? WHERE rowid = ?", table, column)
		exec(set, now, row)
		if !found() {
			t.Errorf("%s.%s of row %d was changed from %v to %v, and the bill is said to be right", table, column, row, was, now)
		}
		exec(set, was, row)
	}
	for table, columns := range map[string][]string{
		"meter_entries": {"sandbox", "n", "project", "kind", "reason", "end_reason", "began_at", "ended_at", "vcpus", "memory_bytes", "disk_bytes", "price", "generation", "event"},
		"meter_facts":   {"n", "fact"},
	} {
		var rows int64
		must0(t, raw.QueryRow("SELECT COUNT(*) FROM "+table).Scan(&rows))
		if rows < 4 {
			t.Fatalf("%s has only %d rows", table, rows)
		}
		for row := int64(1); row <= rows; row++ {
			for _, column := range columns {
				var was any
				must0(t, raw.QueryRow(fmt.Sprintf("SELECT %s FROM %s WHERE rowid = ?", column, table), row).Scan(&was))
				switch v := was.(type) {
				case int64:
					attempt(table, column, row, v, v+1000)
				case string:
					step := max(1, len(v)/12) // of a long text some bytes of every part
					for at := int(row) % step; at < len(v); at += step {
						now := []byte(v)
						now[at] ^= 1
						attempt(table, column, row, v, string(now))
					}
				}
			}
		}
		var last int64
		must0(t, raw.QueryRow("SELECT MAX(rowid) FROM "+table).Scan(&last))
		exec(fmt.Sprintf("CREATE TABLE kept AS SELECT * FROM %s WHERE rowid = %d", table, last))
		exec(fmt.Sprintf("DELETE FROM %s WHERE rowid = %d", table, last))
		if !found() {
			t.Errorf("the last row of %s was taken out, and the bill is said to be right", table)
		}
		exec(fmt.Sprintf("INSERT INTO %s SELECT * FROM kept", table))
		exec("DROP TABLE kept")
	}
	if tries < 200 || found() {
		t.Errorf("%d tries; differences after all was put back: %v", tries, found())
	}
}
