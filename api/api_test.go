package api

import (
	"encoding/json"
	"testing"
	"time"
)

func TestTimestamp(t *testing.T) { // R4
	t.Parallel()
	for in, want := range map[time.Time]string{
		time.Date(2026, 11, 30, 1, 2, 3, 0, time.UTC):                             `"2026-11-30T01:02:03.000Z"`,
		time.Date(2026, 11, 30, 1, 2, 3, 987_654_321, time.UTC):                   `"2026-11-30T01:02:03.987Z"`,
		time.Date(2026, 11, 30, 1, 2, 3, 40e6, time.FixedZone("somewhere", 3600)): `"2026-11-30T00:02:03.040Z"`,
	} {
		got, err := json.Marshal(At(in))
		if err != nil || string(got) != want {
			t.Errorf("%v: %s %v, want %s", in, got, err, want)
		}
		var back Timestamp
		if err := json.Unmarshal(got, &back); err != nil || !back.Equal(in.Truncate(time.Millisecond)) {
			t.Errorf("%s came back as %v, %v", got, back, err)
		}
	}
	if AtOrNil(time.Time{}) != nil {
		t.Error("the zero time is not null")
	}
}

func TestCommandLine(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]CommandLine{
		`["ls","-l"]`: {Args: []string{"ls", "-l"}},
		`"ls -l"`:     {Shell: "ls -l"},
	} {
		var got CommandLine
		if err := json.Unmarshal([]byte(in), &got); err != nil {
			t.Fatal(err)
		}
		back, err := json.Marshal(got)
		if err != nil || string(back) != in || got.Shell != want.Shell || len(got.Args) != len(want.Args) {
			t.Errorf("%s became %+v and %s, %v", in, got, back, err)
		}
	}
	for _, in := range []string{`[]`, `""`, `null`, `7`, `{}`, `[1]`} {
		var got CommandLine
		if err := json.Unmarshal([]byte(in), &got); err == nil {
			t.Errorf("%s became %+v", in, got)
		}
	}
}
