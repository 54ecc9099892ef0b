package sandbox

import (
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

func TestPolicyCheck_A1_A5_A8_Z1_Z7(t *testing.T) {
	const second = time.Second
	tests := map[string]struct {
		mode   SleepMode
		plan   Plan
		change func(*Policy)
		reason string // "" is accepted
	}{
		"default":                  {SleepManual, "", func(*Policy) {}, ""},
		"default on trial":         {SleepManual, PlanTrial, func(*Policy) {}, ""},
		"a second":                 {SleepManual, "", func(p *Policy) { p.TTL = second }, ""},
		"less than a second":       {SleepManual, "", func(p *Policy) { p.TTL = second - 1 }, "ttl_seconds"},
		"negative":                 {SleepManual, "", func(p *Policy) { p.TTL = -second }, "ttl_seconds"},
		"30 days":                  {SleepManual, "", func(p *Policy) { p.TTL = 30 * day }, ""},
		"more is not clipped":      {SleepManual, "", func(p *Policy) { p.TTL = 30*day + second }, "ttl_seconds"},
		"none":                     {SleepManual, "", func(p *Policy) { p.TTL = 0 }, ""},
		"none on trial":            {SleepManual, PlanTrial, func(p *Policy) { p.TTL = 0 }, "trial_auto_stop"},
		"2 hours on trial":         {SleepManual, PlanTrial, func(p *Policy) { p.TTL = 2 * time.Hour }, ""},
		"more on trial":            {SleepManual, PlanTrial, func(p *Policy) { p.TTL = 2*time.Hour + second }, "trial_auto_stop"},
		"far too much on trial":    {SleepManual, PlanTrial, func(p *Policy) { p.TTL = 31 * day }, "ttl_seconds"},
		"paused":                   {SleepManual, "", func(p *Policy) { p.SleepDeadline = DeadlinePaused }, ""},
		"paused on trial":          {SleepManual, PlanTrial, func(p *Policy) { p.SleepDeadline = DeadlinePaused }, "trial_sleep_deadline"},
		"halted":                   {SleepManual, "", func(p *Policy) { p.SleepDeadline = "halted" }, "sleep_deadline"},
		"sleep at the deadline":    {SleepManual, "", func(p *Policy) { p.OnDeadline = Sleep }, ""},
		"which it never does":      {SleepNever, "", func(p *Policy) { p.OnDeadline = Sleep }, "on_deadline"},
		"delete at the deadline":   {SleepNever, "", func(p *Policy) { p.OnDeadline = Delete }, ""},
		"archive at the deadline":  {SleepManual, "", func(p *Policy) { p.OnDeadline = Archive }, "on_deadline"},
		"stop when idle":           {SleepAuto, "", func(p *Policy) { p.OnIdle = Stop }, ""},
		"delete when idle":         {SleepAuto, "", func(p *Policy) { p.OnIdle = Delete }, "on_idle"},
		"30 s of idleness":         {SleepAuto, "", func(p *Policy) { p.IdleAfter = 30 * second }, ""},
		"29 s of idleness":         {SleepAuto, "", func(p *Policy) { p.IdleAfter = 29 * second }, "idle_seconds"},
		"a day of idleness":        {SleepAuto, "", func(p *Policy) { p.IdleAfter = day }, ""},
		"more than a day":          {SleepAuto, "", func(p *Policy) { p.IdleAfter = day + 1 }, "idle_seconds"},
		"a week of memory":         {SleepManual, "", func(p *Policy) { p.MemoryWindow = 7 * day }, ""},
		"more than a week":         {SleepManual, "", func(p *Policy) { p.MemoryWindow = 7*day + 1 }, "memory_window"},
		"no memory":                {SleepManual, "", func(p *Policy) { p.MemoryWindow = 0 }, "memory_window"},
		"never archived":           {SleepManual, "", func(p *Policy) { p.ArchiveAfter = 0 }, ""},
		"archived at once":         {SleepManual, "", func(p *Policy) { p.ArchiveAfter = 1 }, "archive_after"},
		"deleted before it is":     {SleepManual, "", func(p *Policy) { p.DeleteAfter = -second }, "delete_after"},
		"deleted after a year":     {SleepManual, "", func(p *Policy) { p.DeleteAfter = 365 * day }, ""},
		"a mode that is none":      {"often", "", func(*Policy) {}, "sleep_mode"},
		"another plan is no trial": {SleepManual, "team", func(p *Policy) { p.TTL = 30 * day }, ""},
	}
	for name, tt := range tests {
		p := DefaultPolicy()
		tt.change(&p)
		err := p.Check(tt.mode, tt.plan, DefaultBounds())
		if (err == nil) != (tt.reason == "") || err != nil && fault.Of(err).Reason != tt.reason {
			t.Errorf("%s: %v, want the reason %q", name, err, tt.reason)
		}
		want := fault.InvalidArgument
		if tt.plan == PlanTrial && tt.reason != "ttl_seconds" {
			want = fault.FailedPrecondition
		}
		if err != nil && !fault.Is(err, want) {
			t.Errorf("%s: %v is %s, want %s", name, err, fault.Of(err).Kind, want)
		}
	}
	if p := DefaultPolicy(); p.TTL != time.Hour || p.OnDeadline != Stop || p.OnIdle != Sleep || p.IdleAfter != 2*time.Minute ||
		p.SleepDeadline != DeadlineRunning || p.MemoryWindow != 168*time.Hour || p.ArchiveAfter != 336*time.Hour || p.DeleteAfter != 0 {
		t.Errorf("the defaults are %+v", p)
	}
}
