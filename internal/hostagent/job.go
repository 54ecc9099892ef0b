package hostagent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// plan is how a verb is carried out. Until the commit every action can be taken
// back, and is when a later one fails. After the commit nothing is taken back: the
// rest is repeated until it succeeds. A crash in between needs no more than this: an
// operation that was not committed is undone in full and begun again, a committed
// one is finished. So each do and each undo may run any number of times, and an undo
// also where its do never ran.
type plan struct {
	before []action
	commit func(*record) // what the commit record changes; nil for none
	after  []action
	end    func(*record) hostproto.Report // the new phase, and the fact to report
	failed func(*record, error) hostproto.Report
}

// action is one step of a plan.
type action struct {
	step string
	do   func(ctx context.Context) error
	undo func(ctx context.Context) error // nil: nothing to take back
}

const (
	// attempts bounds how often an operation that kills the agent is begun again. It is
	// high, because most ends of an agent are not the operation's fault.
	attempts = 20
	// undoTimeout bounds one undo; what it leaves, the next start finds.
	undoTimeout = 30 * time.Second
	// retryFirst and retryMost bound the pause between repeats after a commit.
	retryFirst = 100 * time.Millisecond
	retryMost  = 10 * time.Second
	// stepLimit bounds one try of one step: what hangs fails, is taken back or tried
	// again.
	stepLimit = 5 * time.Minute
	// frozenFirst and frozenRate bound the steps that keep a sandbox frozen: a time, and
	// what a slow disk takes for the memory, in bytes a second.
	frozenFirst = 30 * time.Second
	frozenRate  = 16 << 20
	// mostTimings bounds what is told of steps that were tried again and again.
	mostTimings = 64
	// stuckAfter is how long a step may go on after it was told to end. What takes
	// longer hangs in the kernel, which cannot be told.
	stuckAfter = 5 * time.Second
)

// errStopping is the cause of a context that the agent's own end cancels: the
// operation stays open in the journal.
var errStopping = errors.New("the host agent stops")

// job is one run of an operation. It is a goroutine beside its owner, so that the
// owner always answers; all that it keeps it keeps through the owner.
type job struct {
	o      *owner
	rec    jobRecord    // as it was at the start
	log    *slog.Logger // names the sandbox, the operation, its verb and its request
	memory int64        // of the sandbox, in bytes
	cancel context.CancelCauseFunc

	trace   string // the span that the steps are beneath, "" where none is kept
	failed  error  // why the operation ends without success
	timings []sandbox.StepTime
	stuck   <-chan error // of a step that did not end when it was told to, nil for none
	left    bool         // the agent stopped before all was taken back
}

// run carries the plan out and gives the mutation that ends the operation, or nil
// when it stays open because the agent stops.
func (j *job) run(ctx context.Context, p plan) func(*record) {
	if !j.rec.Committed {
		if err := j.prelude(ctx, p); err != nil {
			return j.fail(ctx, p, err)
		}
		if err := j.perform(ctx, p.before); err != nil {
			return j.fail(ctx, p, err)
		}
		if p.after != nil {
			if err := j.commit(ctx, p); err != nil {
				if !errors.Is(context.Cause(ctx), errStopping) {
					j.undo(ctx, p.before)
				}
				return j.fail(ctx, p, err)
			}
		}
	}
	for _, a := range p.after {
		if !j.insist(a) {
			return nil
		}
	}
	return func(r *record) {
		rep := p.end(r)
		rep.At, rep.Timings = j.o.agent.now(), j.timings
		r.finish(rep, j.o.agent.cfg.Backoff)
	}
}

// commit writes the commit record, unless the operation was cancelled before.
func (j *job) commit(ctx context.Context, p plan) error {
	return j.o.decide(ctx, func() error {
		if j.o.rec.Job.Cancelled {
			return errCancelled(j.rec.Command.Verb)
		}
		return j.o.write(func(r *record) {
			r.Job.Committed = true
			if p.commit != nil {
				p.commit(r)
			}
		})
	})
}

// prelude takes back what an earlier attempt left.
func (j *job) prelude(ctx context.Context, p plan) error {
	if j.rec.Attempt > 1 {
		j.undo(ctx, p.before)
		j.o.uses.shutFor(j.rec.Command.Verb)
	}
	if j.rec.Cancelled {
		return fault.New(fault.Cancelled, "the operation was cancelled")
	}
	if j.rec.Attempt > attempts {
		return fault.New(fault.Internal, "the host agent ended %d times in this operation; it was given up", attempts)
	}
	return nil
}

// perform does the actions in order; when one fails it takes all of them back.
func (j *job) perform(ctx context.Context, actions []action) error {
	for i, a := range actions {
		err := context.Cause(ctx)
		if err == nil {
			err = j.step(ctx, a, float64(i)/float64(len(actions)))
		}
		if err != nil {
			if !errors.Is(context.Cause(ctx), errStopping) {
				j.undo(ctx, actions[:i+1])
			}
			return err
		}
	}
	if err := context.Cause(ctx); err != nil && !errors.Is(err, errStopping) { // cancelled in the last of them
		j.undo(ctx, actions)
		return err
	}
	return nil
}

// step runs one action, with its trace.
func (j *job) step(ctx context.Context, a action, progress float64) error {
	cmd := j.rec.Command
	j.o.progress(cmd, a.step, progress)
	ctx, s := j.o.agent.cfg.Span.Begin(ctx, j.trace, "step "+a.step)
	begin := time.Now() // a duration: the monotonic clock
	err := j.bounded(ctx, a)
	took := time.Since(begin)
	s.End(err)
	j.log.Debug("step", "step", a.step, "took", took, "err", err)
	if len(j.timings) < mostTimings {
		j.timings = append(j.timings, sandbox.StepTime{Step: a.step, Milliseconds: float64(took.Microseconds()) / 1000})
	}
	if err != nil {
		return fmt.Errorf("%s: %w", a.step, err)
	}
	return nil
}

// bounded runs an action within the limit of a step. One that does not end when it is
// told to is left to itself and becomes j.stuck.
func (j *job) bounded(ctx context.Context, a action) error {
	limit := j.limit(a.step)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fault.New(fault.DeadlineExceeded,
		"the step %s took longer than %s; is the host's storage stalled?", a.step, limit).Because("step_timeout"))
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- j.do(ctx, a) }()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		grace := time.NewTimer(j.o.agent.cfg.points.stuckAfter)
		defer grace.Stop()
		select {
		case err = <-done:
		case <-grace.C:
			j.stuck = done
			return context.Cause(ctx)
		}
	}
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func (j *job) do(ctx context.Context, a action) error {
	if point := j.o.agent.cfg.points.step; point != nil {
		return point(ctx, j.rec.Command.Sandbox, j.rec.Command.Verb, a.step, a.do)
	}
	return a.do(ctx)
}

// forever is the limit of the wait for a fork's children, which have limits of their
// own.
const forever = 100 * 365 * 24 * time.Hour

// limit is how long one try of a step may take. What may keep the sandbox frozen gets
// no more than its memory explains.
func (j *job) limit(step string) time.Duration {
	most := j.o.agent.cfg.StepLimit
	if point := j.o.agent.cfg.points.limit; point != nil {
		most = point(j.rec.Command.Sandbox, j.rec.Command.Verb, step)
	}
	switch step {
	case sandbox.StepSpawn:
		return forever
	case sandbox.StepCapture, sandbox.StepClone, sandbox.StepSeal:
		return min(most, frozenFirst+time.Duration(j.memory/frozenRate)*time.Second)
	}
	return most
}

// unstick waits until a step that hung in the kernel has returned, because nothing that
// it works on may be touched before. It says so meanwhile; false when the agent stops
// first.
func (j *job) unstick() bool {
	if j.stuck == nil {
		return !j.left
	}
	j.log.Error("a step hangs in the kernel and is waited for")
	j.o.stall(true)
	select {
	case <-j.stuck:
	case <-j.o.agent.jobs.Done():
		j.left = true
		return false
	}
	j.stuck = nil
	j.o.stall(false)
	return true
}

// insist repeats an action of a committed operation until it succeeds; false when
// the agent stops first.
func (j *job) insist(a action) bool {
	ctx := j.o.agent.jobs // a cancel comes too late
	for pause := retryFirst; ; pause = min(2*pause, retryMost) {
		err := j.step(ctx, a, 0.9)
		if err == nil {
			return true
		}
		if errors.Is(context.Cause(ctx), errStopping) {
			return false
		}
		j.log.Warn("a committed step failed and is repeated", "step", a.step, "err", err)
		if !j.unstick() {
			return false
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
}

// undo takes the actions back, last first; but a sandbox that was frozen runs again
// before anything else is done, which may take its time (Z10). What fails here is
// logged: the next start of the agent, or the next operation, meets it again.
func (j *job) undo(ctx context.Context, actions []action) {
	for _, a := range actions {
		if a.step == sandbox.StepPause {
			j.takeBack(ctx, a)
		}
	}
	j.o.uses.close(false) // Z10: it answers, whatever else takes its time
	if !j.unstick() {
		return
	}
	for _, a := range slices.Backward(actions) {
		if a.step != sandbox.StepPause {
			j.takeBack(ctx, a)
		}
	}
}

func (j *job) takeBack(ctx context.Context, a action) {
	if a.undo == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	ctx, s := j.o.agent.cfg.Span.Begin(ctx, j.trace, "undo "+a.step)
	err := a.undo(ctx)
	s.End(err)
	if err != nil {
		j.log.Error("a step could not be taken back", "step", a.step, "err", err)
	}
}

// fail gives the mutation that ends the operation without success.
func (j *job) fail(ctx context.Context, p plan, err error) func(*record) {
	cause := context.Cause(ctx)
	if errors.Is(cause, errStopping) || j.left {
		return nil
	}
	if cause != nil {
		err = cause
	}
	j.failed = err
	j.log.Warn("operation failed", "err", err)
	return func(r *record) {
		var rep hostproto.Report
		if p.failed != nil {
			rep = p.failed(r, err)
		}
		rep.At = j.o.agent.now()
		if rep.Failure == nil {
			rep.Failure = failure(err)
		}
		r.finish(rep, j.o.agent.cfg.Backoff)
	}
}

// failure is an error as a report carries it.
func failure(err error) *hostproto.Failure {
	f := fault.Of(err)
	return &hostproto.Failure{Kind: string(f.Kind), Message: f.Message, Reason: f.Reason}
}

// errCancelled is the cause of a context that a cancel ends.
func errCancelled(verb sandbox.Verb) error {
	return fault.New(fault.Cancelled, "the %s was cancelled", verb)
}
