// Package api is hutch's HTTP API: its description (openapi.yaml), the types of its
// bodies and a Go client, both generated from the description.
//
// Client's calls give the raw response, for the streams; ClientWithResponses reads
// the whole body into the types.
package api

import (
	_ "embed"
	"encoding/json"
	"errors"
	"strconv"
	"time"
)

//go:generate go run github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen@v2.8.2 -config oapi.yaml openapi.yaml

// Spec is openapi.yaml, the description of the API.
//
//go:embed openapi.yaml
var Spec []byte

// timeLayout is RFC 3339 in UTC with exactly three digits of milliseconds.
const timeLayout = "2006-01-02T15:04:05.000Z"

// Timestamp is an instant as the API writes it: RFC 3339, UTC, milliseconds.
type Timestamp struct{ time.Time }

// At gives the Timestamp of t, with what is below a millisecond cut off.
func At(t time.Time) Timestamp { return Timestamp{t.UTC().Truncate(time.Millisecond)} }

// AtOrNil gives nil for the zero time, which the API writes as null.
func AtOrNil(t time.Time) *Timestamp {
	if t.IsZero() {
		return nil
	}
	ts := At(t)
	return &ts
}

// MarshalJSON writes milliseconds always, unlike time.Time, which drops zeros.
func (t Timestamp) MarshalJSON() ([]byte, error) {
	return []byte(`"` + t.UTC().Format(timeLayout) + `"`), nil
}

// UnmarshalJSON reads any RFC 3339 time.
func (t *Timestamp) UnmarshalJSON(b []byte) error { return t.Time.UnmarshalJSON(b) }

// Seconds is a number of seconds as it stands in a body: "" is not given, "null" none.
type Seconds string

// SecondsOf gives n seconds, nil is none.
func SecondsOf(n *int64) Seconds {
	if n == nil {
		return "null"
	}
	return Seconds(strconv.FormatInt(*n, 10))
}

// None says that it was given, as none.
func (s Seconds) None() bool { return s == "null" }

// Int64 is the number that was given, 0 for none.
func (s Seconds) Int64() int64 {
	n, _ := strconv.ParseInt(string(s), 10, 64) // what is read from JSON is a number or null
	return n
}

// MarshalJSON writes what was given.
func (s Seconds) MarshalJSON() ([]byte, error) {
	if s == "" {
		return []byte("null"), nil
	}
	return []byte(s), nil
}

// UnmarshalJSON reads a whole number or null.
func (s *Seconds) UnmarshalJSON(b []byte) error {
	if string(b) != "null" {
		if _, err := strconv.ParseInt(string(b), 10, 64); err != nil {
			return err
		}
	}
	*s = Seconds(b)
	return nil
}

// CommandLine is what to run: Args, or one Shell line when Args is empty. In JSON it
// is an array or a string.
type CommandLine struct {
	Args  []string
	Shell string
}

// MarshalJSON writes the array, or the string where there is no array.
func (c CommandLine) MarshalJSON() ([]byte, error) {
	if len(c.Args) > 0 {
		return json.Marshal(c.Args)
	}
	return json.Marshal(c.Shell)
}

// UnmarshalJSON reads an array of strings or a string; neither may be empty.
func (c *CommandLine) UnmarshalJSON(b []byte) error {
	*c = CommandLine{}
	if len(b) > 0 && b[0] == '"' {
		if err := json.Unmarshal(b, &c.Shell); err != nil {
			return err
		}
	} else if err := json.Unmarshal(b, &c.Args); err != nil {
		return errors.New("command takes an array of strings or one string")
	}
	if len(c.Args) == 0 && c.Shell == "" {
		return errors.New("command is empty")
	}
	return nil
}
