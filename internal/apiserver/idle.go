package apiserver

import (
	"context"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// sleepOf are the sleep settings of a body.
func sleepOf(s *api.SleepSettings, onIdle api.OnIdle) control.SleepSettings {
	out := control.SleepSettings{OnIdle: string(onIdle)}
	if s != nil {
		out.Mode, out.IdleSeconds = string(s.Mode), s.IdleSeconds
	}
	return out
}

func sleepShown(mode sandbox.SleepMode, window time.Duration, deadline sandbox.DeadlineMode) api.Sleep {
	out := api.Sleep{Mode: api.SleepMode(mode), IdleSeconds: int64(window / time.Second), Deadline: api.SleepDeadlineRun}
	if deadline == sandbox.DeadlinePaused {
		out.Deadline = api.SleepDeadlinePaused
	}
	return out
}

// GetIdleness says why a sandbox is awake.
func (s *server) GetIdleness(ctx context.Context, r GetIdlenessRequestObject) (GetIdlenessResponseObject, error) {
	why, err := s.control.Why(ctx, callOf(ctx).caller, r.Ref)
	if err != nil {
		return nil, err
	}
	i := why.Idle
	out := GetIdleness200JSONResponse{
		Sandbox: why.Sandbox.ID, State: api.State(why.Sandbox.State), Sleep: sleepShown(i.Mode, i.Window, why.Sandbox.Policy.SleepDeadline), OnIdle: api.OnIdle(i.OnIdle),
		Idle: i.Idle, Blocker: i.Blocker, Message: why.Message, NextDecisionAt: api.AtOrNil(i.Next), SampledAt: api.AtOrNil(i.At),
		SampleSeconds: i.Every.Seconds(), Criteria: []api.Criterion{},
	}
	if i.Failed != nil {
		out.FailedTries = i.Failed.Tries
	}
	for _, c := range i.Criteria {
		out.Criteria = append(out.Criteria, api.Criterion{
			Name: api.CriterionName(c.Name), Reading: c.Reading, Limit: c.Limit, Unit: c.Unit, Ok: c.OK, Since: api.AtOrNil(c.Since),
		})
	}
	return out, nil
}
