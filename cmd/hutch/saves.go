package main

import (
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/config"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// savesFlags are the operator's settings of what is saved and what is deleted.
type savesFlags struct {
	undeleteFor, retry string
}

func (f *savesFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.undeleteFor, "undelete-for", "24h", "how long a deleted sandbox can be brought back, as a duration; 0 erases at once")
	cmd.Flags().StringVar(&f.retry, "save-retry", "30s,10m", "pauses between the tries of a save that failed: the first, and the longest")
}

// settle takes what is in force from the settings.
func (f *savesFlags) settle(cmd *cobra.Command, s settings) {
	if !cmd.Flags().Changed("undelete-for") {
		f.undeleteFor = s.text(config.KeepDeleted)
	}
	if !cmd.Flags().Changed("save-retry") {
		f.retry = s.text(config.SaveRetry)
	}
}

// read puts the settings into a server's.
func (f *savesFlags) read(cfg *serverConfig) error {
	d, err := config.ParseDuration(f.undeleteFor)
	if f.undeleteFor == "0" {
		d, err = 0, nil
	}
	if err != nil || d < 0 {
		return fault.New(fault.InvalidArgument, "--undelete-for %.40q is no time; write it as 48h, or 0 to erase at once", f.undeleteFor)
	}
	if cfg.undeleteFor = d; d == 0 {
		cfg.undeleteFor = -1
	}
	cfg.limits.UndeleteFor = cfg.undeleteFor
	first, most, _ := strings.Cut(f.retry, ",")
	cfg.saveRetry = sandbox.Backoff{}
	for _, p := range []struct {
		to   *time.Duration
		text string
	}{{&cfg.saveRetry.First, first}, {&cfg.saveRetry.Most, most}} {
		d, err := time.ParseDuration(strings.TrimSpace(p.text))
		if err != nil || d < 100*time.Millisecond {
			return fault.New(fault.InvalidArgument, "--save-retry %.40q is not two times of 100ms or more; write it as 30s,10m", f.retry)
		}
		*p.to = d
	}
	if cfg.saveRetry.Most < cfg.saveRetry.First {
		return fault.New(fault.InvalidArgument, "--save-retry %.40q has a first pause that is longer than the longest; write it as 30s,10m", f.retry)
	}
	return nil
}
