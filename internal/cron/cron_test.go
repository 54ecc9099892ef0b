package cron

import (
	"fmt"
	"testing"
	"time"
)

const example = `# /etc/crontab
SHELL=/bin/sh
PATH = "/usr/bin:/bin"
17 *	* * *	root    cd / && run-parts --report /etc/cron.hourly
25 6	* * *	root	test -x /usr/sbin/anacron || run-parts /etc/cron.daily
@reboot root echo up
@weekly backup /usr/local/bin/backup --all
*/15 8-18/2 * jan-Mar mon-fri user work
0 0 13 * 5 root friday or the thirteenth
CRON_TZ=Asia/Tokyo
0 9 * * 7 user sunday in Tokyo
61 * * * * root never
nonsense
`

func TestParse(t *testing.T) {
	lines, bad := Parse([]byte(example), true)
	if bad != 2 {
		t.Errorf("%d lines are bad, want 2", bad)
	}
	var got string
	for _, l := range lines {
		got += fmt.Sprintf("%d|%s|%s|%s|%s\n", l.Number, l.Schedule, l.User, l.Command, l.Zone)
	}
	if want := `4|17 * * * *|root|cd / && run-parts --report /etc/cron.hourly|
5|25 6 * * *|root|test -x /usr/sbin/anacron || run-parts /etc/cron.daily|
7|@weekly|backup|/usr/local/bin/backup --all|
8|*/15 8-18/2 * jan-Mar mon-fri|user|work|
9|0 0 13 * 5|root|friday or the thirteenth|
11|0 9 * * 7|user|sunday in Tokyo|Asia/Tokyo
`; got != want {
		t.Errorf("read:\n%swant:\n%s", got, want)
	}
	if lines, bad := Parse([]byte("5 4 * * sun echo a=b\n"), false); bad != 0 || len(lines) != 1 || lines[0].Command != "echo a=b" || lines[0].User != "" {
		t.Errorf("a user's: %+v, %d bad", lines, bad)
	}
}

func TestBetween(t *testing.T) {
	at := func(s string) time.Time {
		v, err := time.Parse("2006-01-02 15:04:05", s)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		t.Skip("the machine has no time zones: ", err)
	}
	for _, c := range []struct {
		schedule, from, to string
		zone               *time.Location
		count              int
		last               string
	}{
		{"* * * * *", "2026-03-02 10:00:00", "2026-03-02 10:00:59", time.UTC, 0, ""},
		{"* * * * *", "2026-03-02 10:00:00", "2026-03-02 10:05:00", time.UTC, 5, "2026-03-02 10:05:00"},
		{"* * * * *", "2026-03-02 10:00:30", "2026-03-02 10:05:59", time.UTC, 5, "2026-03-02 10:05:00"},
		{"17 * * * *", "2026-03-02 10:17:00", "2026-03-02 12:16:59", time.UTC, 1, "2026-03-02 11:17:00"},
		{"@daily", "2026-03-01 12:00:00", "2026-03-08 12:00:00", time.UTC, 7, "2026-03-08 00:00:00"},
		{"0 6 * * *", "2026-03-01 12:00:00", "2026-03-02 12:00:00", berlin, 1, "2026-03-02 05:00:00"},
		{"0 0 13 * 5", "2026-03-01 00:00:00", "2026-03-31 23:59:00", time.UTC, 4, "2026-03-27 00:00:00"}, // Fridays, the 13th is one
		{"0 0 13 * *", "2026-03-01 00:00:00", "2026-03-31 23:59:00", time.UTC, 1, "2026-03-13 00:00:00"},
		{"0 0 * * 7", "2026-03-02 00:00:00", "2026-03-08 00:00:00", time.UTC, 1, "2026-03-08 00:00:00"},
		{"30 2 * * *", "2026-03-28 12:00:00", "2026-03-29 12:00:00", berlin, 0, ""}, // that clock shows no 2:30
		{"0 0 30 2 *", "2026-01-01 00:00:00", "2026-03-08 00:00:00", time.UTC, 0, ""},
	} {
		lines, bad := Parse([]byte(c.schedule+" x"), false)
		if bad != 0 || len(lines) != 1 {
			t.Fatalf("%s: %d lines, %d bad", c.schedule, len(lines), bad)
		}
		count, last := lines[0].Between(at(c.from), at(c.to), c.zone)
		if count != c.count || c.count > 0 && !last.Equal(at(c.last)) {
			t.Errorf("%s from %s to %s: %d, last %s; want %d, last %s", c.schedule, c.from, c.to, count, last, c.count, c.last)
		}
	}
}

// What a hostile crontab says is passed over in the end.
func FuzzParse(f *testing.F) {
	f.Add([]byte(example))
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, system := range []bool{false, true} {
			lines, _ := Parse(text, system)
			for _, l := range lines {
				l.Between(time.Unix(0, 0), time.Unix(6000, 0), time.UTC)
			}
		}
	})
}
