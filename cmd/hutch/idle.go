package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/config"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// idleSettings say how idleness is measured.
type idleSettings struct {
	sampleEvery time.Duration // between two samples
	windowMin   time.Duration // the shortest window that a sandbox may have
}

func (i *idleSettings) add(cmd *cobra.Command) {
	cmd.Flags().DurationVar(&i.sampleEvery, "idle-sample", sandbox.SampleEvery, "time between two looks at whether sandboxes are idle")
	cmd.Flags().DurationVar(&i.windowMin, "idle-min", sandbox.DefaultBounds().IdleMin, "shortest idle window that a sandbox may have")
}

// settle takes from the settings what no flag says.
func (i *idleSettings) settle(cmd *cobra.Command, s settings) {
	if !cmd.Flags().Changed("idle-sample") {
		i.sampleEvery = s.duration(config.IdleSample)
	}
	if !cmd.Flags().Changed("idle-min") {
		i.windowMin = s.duration(config.IdleMin)
	}
}

func (i idleSettings) check() error {
	if most := sandbox.DefaultPolicy().IdleAfter; i.sampleEvery < 100*time.Millisecond || i.windowMin < i.sampleEvery || i.windowMin > most {
		return fault.New(fault.InvalidArgument, "--idle-sample %s with --idle-min %s is not possible: samples are 100ms apart or more, and the shortest window is between that and %s",
			i.sampleEvery, i.windowMin, most).Because("idle_sample")
	}
	return nil
}

func (i idleSettings) bounds() sandbox.Bounds {
	bounds := sandbox.DefaultBounds()
	bounds.IdleMin = i.windowMin
	return bounds
}
