package hostagent

import (
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// owner is the one goroutine that decides about a sandbox on this host. It owns the
// record and the journal. Long work is done by one job at a time beside it.
type owner struct {
	agent *Agent
	id    string
	log   *slog.Logger

	inbox chan func() // run by the owner, one after the other
	done  chan struct{}

	// Owned by the loop.
	rec        *record
	journal    *journal
	job        *job
	lastExit   runtime.Exit // of the boot that ended by itself
	delivering bool
	asked      asleep                               // the sleep whose missed timers were asked for
	waiters    map[string][]chan *hostproto.Failure // by operation
	gone       bool

	// live is what runs, nil for nothing. Jobs set it, anyone reads it.
	live    atomic.Pointer[live]
	jobs    sync.WaitGroup
	stalled atomic.Bool // a step hangs in the kernel
	probing atomic.Bool // the guest is being asked

	uses     uses
	auto     atomic.Bool                      // it is to fall asleep by itself
	sampling atomic.Bool                      // a sample is being taken
	watch    sandbox.Watch                    // owned by the loop: whether it is idle
	tried    bool                             // owned by the loop: an operation of its own has failed since the last sample
	due      atomic.Int64                     // when the timers are to be looked at, in ms of host time; 0 is not
	leased   atomic.Bool                      // the record has leases
	walls    atomic.Pointer[sandbox.Firewall] // the firewall in the record
	deleted  atomic.Int64                     // since when it is deleted, in ms of host time, and can be brought back; 0 is not
}

func newOwner(a *Agent, id string, j *journal, r *record) *owner {
	o := &owner{
		agent: a, id: id, log: a.log.With("sandbox", id),
		inbox: make(chan func(), 16), done: make(chan struct{}),
		rec: r, journal: j, waiters: map[string][]chan *hostproto.Failure{},
	}
	o.leased.Store(len(r.Leases.Turns) > 0)
	o.auto.Store(r.Spec.Sleep == sandbox.SleepAuto)
	o.noteWalls()
	o.noteDeleted()
	return o
}

// loop runs until the agent stops or the sandbox is gone. ctx ends when the agent
// stops, and not before its jobs have been told.
func (o *owner) loop(ctx context.Context) {
	defer close(o.done)
	for {
		select {
		case f := <-o.inbox:
			f()
			if o.gone {
				o.agent.forget(o.id)
				return
			}
		case <-ctx.Done():
			o.drain()
			if l := o.live.Load(); l != nil { // it runs on without us
				l.over()
				l.guest.Close()
			}
			_ = o.journal.close()
			return
		}
	}
}

// drain serves the job that still runs until it has ended.
func (o *owner) drain() {
	ended := make(chan struct{})
	if o.job != nil {
		o.job.cancel(errStopping)
	}
	go func() { o.jobs.Wait(); close(ended) }()
	for {
		select {
		case f := <-o.inbox:
			f()
		case <-ended:
			for {
				select {
				case f := <-o.inbox:
					f()
				default:
					return
				}
			}
		}
	}
}

// call runs f in the owner's goroutine and waits for it. Where ctx ends first, f may
// run all the same: an owner that does not answer waits for its journal.
func (o *owner) call(ctx context.Context, f func() error) error {
	reply, err := o.ask(ctx, f)
	if err != nil {
		return err
	}
	select {
	case err := <-reply:
		return err
	case <-o.done:
		select {
		case err := <-reply: // it was the last that the owner did
			return err
		default:
			return errGone
		}
	case <-ctx.Done():
		return fault.Wrap(context.Cause(ctx), fault.Unavailable, "the host's journal does not answer; is its disk stalled?").Because("journal").After(retryMost)
	}
}

func (o *owner) ask(ctx context.Context, f func() error) (<-chan error, error) {
	reply := make(chan error, 1)
	select {
	case o.inbox <- func() { reply <- f() }:
		return reply, nil
	case <-o.done:
		return nil, errGone
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

var errGone = fault.New(fault.Unavailable, "the host agent stops; try again").After(time.Second)

// update changes the record, durably. Once it has begun it is waited for: what is
// undone must not be on record as done.
func (o *owner) update(ctx context.Context, f func(*record)) error {
	return o.decide(ctx, func() error { return o.write(f) })
}

// decide is update for what looks at the record before it changes it.
func (o *owner) decide(ctx context.Context, f func() error) error {
	reply, err := o.ask(ctx, f)
	if err != nil {
		return err
	}
	select {
	case err := <-reply:
		return err
	case <-o.done:
		return errGone
	}
}

// write changes a copy of the record, makes it durable, and only then believes it.
func (o *owner) write(f func(*record)) error {
	next := o.rec.clone()
	f(next)
	if err := o.journal.write(next); err != nil {
		return fault.Wrap(err, fault.Unavailable, "the host's journal cannot be written; is its disk full?").Because("journal")
	}
	o.rec = next
	o.leased.Store(len(next.Leases.Turns) > 0)
	o.auto.Store(next.Spec.Sleep == sandbox.SleepAuto)
	o.noteWalls()
	o.noteDeleted()
	o.deliver()
	return nil
}

func (r *record) clone() *record {
	data, err := json.Marshal(r)
	if err != nil {
		panic(err) // a record is plain data
	}
	var c record
	if err := json.Unmarshal(data, &c); err != nil {
		panic(err)
	}
	return &c
}

// addReport puts a fact into the record, to be delivered once it is durable.
func (r *record) addReport(rep hostproto.Report) {
	r.Seq++
	if rep.Event != "" { // it ends what ran, or begins something new
		r.Event = r.Seq
		if rep.Event != sandbox.EventRebooted { // what the guest does saves nothing
			rep.Clear = append(rep.Clear, r.healed()...)
		}
		rep.Clear = append(rep.Clear, r.heard()...)
	}
	r.timed(&rep)
	rep.Sandbox, rep.Seq, rep.Generation = r.Sandbox, r.Seq, r.Generation
	r.Unacked = append(r.Unacked, rep)
	if rep.Ended {
		r.Ended = append(r.Ended, rep)
		if n := len(r.Ended) - endedKept; n > 0 {
			r.Ended = r.Ended[n:]
		}
	}
}

// finish ends the operation at work with a fact. One that the host gave itself is
// unknown to the control plane, which learns of its event only.
func (r *record) finish(rep hostproto.Report, b sandbox.Backoff) {
	if cmd := r.Job.Command; !ownVerb(cmd.Verb) {
		rep.Operation, rep.Verb, rep.Ended = cmd.Operation, cmd.Verb, true
	}
	if r.Full { // the operation let it go
		r.Full = false
		rep.Clear = append(rep.Clear, diskFull)
	}
	auto := r.Job.Auto
	if auto != nil {
		rep.Cause, rep.Due = auto.Cause, auto.Due
	}
	r.Job = nil
	if rep.Ended || rep.Event != "" || len(rep.Set)+len(rep.Clear) > 0 {
		r.addReport(rep)
	}
	if auto != nil {
		r.tried(*auto, rep, b)
	}
}

func (r *record) ended(op string) *hostproto.Report {
	for i := range r.Ended {
		if r.Ended[i].Operation == op {
			return &r.Ended[i]
		}
	}
	return nil
}

// submit takes a command in: it is durable when submit returns nil.
func (o *owner) submit(cmd hostproto.Command, capture *captureRef) error {
	if rep := o.rec.ended(cmd.Operation); rep != nil {
		return o.repeat(*rep)
	}
	if j := o.rec.Job; j != nil {
		if j.Command.Operation == cmd.Operation {
			return nil
		}
		return o.write(func(r *record) { r.Next = &cmd })
	}
	if cmd.Generation < o.rec.Generation {
		return fault.New(fault.Conflict, "the sandbox has gone on to generation %d since this was asked", o.rec.Generation).Because("overtaken")
	}
	return o.begin(jobRecord{Command: cmd, Capture: capture})
}

// begin makes an operation the one at work, durably, and starts it.
func (o *owner) begin(j jobRecord) error {
	j.Attempt, j.Generation, j.Token, j.Began = 1, o.rec.Generation+1, newToken(), o.agent.now()
	j.Cancelled = j.Command.Cancelled
	err := o.write(func(r *record) {
		r.Job, r.Next = &j, nil
		if r.Spec.Version == "" {
			r.Spec, r.Name = j.Command.Spec, j.Command.Name
		}
		if n := j.Command.Name; n != "" {
			r.Name = n
		}
		if p := j.Command.Policy; p != nil && r.Timers == nil && j.Command.Verb == sandbox.Create {
			t := sandbox.NewTimers(r.Sandbox, *p)
			r.Timers = &t
		}
	})
	if err == nil {
		o.agent.captures.takeJob(j)
		o.start()
	}
	return err
}

// repeat reports the end of an operation again, unless that is still on its way. What
// it brought the sandbox to is not told again when something has happened since: it
// would be taken for news.
func (o *owner) repeat(rep hostproto.Report) error {
	for _, u := range o.rec.Unacked {
		if u.Operation == rep.Operation && u.Ended {
			return nil
		}
	}
	if rep.Seq != o.rec.Event {
		rep.Event, rep.Saved = "", false
	}
	rep.Set, rep.Clear = nil, nil
	return o.write(func(r *record) {
		r.Ended = slices.DeleteFunc(r.Ended, func(e hostproto.Report) bool { return e.Operation == rep.Operation })
		r.addReport(rep)
	})
}

// start begins the job that the record names.
func (o *owner) start() {
	ctx, cancel := context.WithCancelCause(o.agent.jobs)
	j := &job{o: o, rec: *o.rec.Job, memory: o.rec.Spec.Memory, cancel: cancel}
	cmd := j.rec.Command
	if j.log = o.log.With("op", cmd.Operation, "verb", cmd.Verb); cmd.Request != "" {
		j.log = j.log.With("request", cmd.Request)
	}
	_, s := o.agent.cfg.Span.Begin(ctx, cmd.Trace, "host "+string(cmd.Verb),
		"hutch.sandbox", o.id, "hutch.operation", cmd.Operation, "hutch.request", cmd.Request, "hutch.host", o.agent.cfg.ID)
	j.trace = s.Traceparent()
	o.job = j
	if j.rec.Auto != nil {
		o.agent.autos.Add(1)
	}
	o.uses.shutFor(j.rec.Command.Verb)
	p := o.plan(*o.rec, j)
	o.jobs.Go(func() {
		o.letGo(ctx)
		end := j.run(ctx, p)
		s.End(j.failed)
		o.inbox <- func() { o.jobEnded(j, end) }
		cancel(nil)
	})
}

// jobEnded writes how the operation ended and turns to what waited for it.
func (o *owner) jobEnded(j *job, end func(*record)) {
	if end == nil { // the agent stops; the journal has the open operation
		o.job = nil
		return
	}
	o.uses.close(false) // what runs on takes calls, whether the journal can be written or not
	if err := o.write(end); err != nil {
		// The journal is full or broken: the operation stays open and is ended later.
		o.log.Error("the end of an operation could not be written and is tried again", "op", j.rec.Command.Operation, "err", err)
		o.later(time.Second, func() { o.jobEnded(j, end) })
		return
	}
	o.job = nil
	if j.rec.Auto != nil {
		o.agent.autos.Add(-1)
		o.agent.overdue.next()
		if j.rec.Auto.Cause == sandbox.CauseIdle && o.live.Load() != nil {
			o.resample()
		}
	}
	o.tell(j.rec.Command.Operation)
	o.agent.sender(func(ctx context.Context) { o.agent.captures.dropJob(ctx, j.rec) })
	o.next()
}

// next turns to what waited: a command, or an end that a job was in the way of.
func (o *owner) next() {
	var err error
	switch {
	case o.rec.Job != nil:
		return
	case o.rec.Next != nil:
		err = o.begin(jobRecord{Command: *o.rec.Next})
	default:
		err = o.settle()
		o.timers()
		o.tellMissed()
	}
	if err != nil {
		o.later(time.Second, o.next)
	}
}

// later runs f in the owner's goroutine after d, unless the agent stops before.
func (o *owner) later(d time.Duration, f func()) {
	time.AfterFunc(d, func() {
		select {
		case o.inbox <- f:
		case <-o.done:
		}
	})
}

// cancelOperation ends the operation early where it is not committed.
func (o *owner) cancelOperation(op string) error {
	if next := o.rec.Next; next != nil && next.Operation == op {
		return o.write(func(r *record) {
			r.addReport(hostproto.Report{Operation: op, Verb: next.Verb, Ended: true, Failure: failure(errCancelled(next.Verb)), At: o.agent.now()})
			r.Next = nil
		})
	}
	j := o.rec.Job
	if j == nil || j.Command.Operation != op || j.Committed || j.Command.Verb == sandbox.Delete {
		return nil
	}
	err := o.write(func(r *record) { r.Job.Cancelled = true })
	if err == nil && o.job != nil { // else it is not begun anew yet, and is not then
		o.job.cancel(errCancelled(j.Command.Verb))
	}
	return err
}

// result gives a channel that receives how an operation ended: nil for success.
func (o *owner) result(op string) <-chan *hostproto.Failure {
	c := make(chan *hostproto.Failure, 1)
	if rep := o.rec.ended(op); rep != nil {
		c <- rep.Failure
		return c
	}
	o.waiters[op] = append(o.waiters[op], c)
	return c
}

func (o *owner) tell(op string) {
	rep := o.rec.ended(op)
	if rep == nil {
		return
	}
	for _, c := range o.waiters[op] {
		c <- rep.Failure
	}
	delete(o.waiters, op)
}

// progress tells of a step; it may get lost.
func (o *owner) progress(cmd hostproto.Command, step string, fraction float64) {
	o.agent.progress(hostproto.Report{
		Sandbox: cmd.Sandbox, Operation: cmd.Operation, Verb: cmd.Verb, Generation: cmd.Generation,
		Step: step, Progress: fraction, At: o.agent.now(),
	})
}

// deliver sends the facts in order, one at a time, until none is left.
func (o *owner) deliver() {
	if o.delivering || len(o.rec.Unacked) == 0 {
		if len(o.rec.Unacked) == 0 && o.rec.Phase == phaseErased && o.rec.Job == nil {
			o.vanish()
		}
		return
	}
	o.delivering = true
	rep := o.rec.Unacked[0]
	o.agent.sender(func(ctx context.Context) {
		for pause := retryFirst; ; pause = min(2*pause, retryMost) {
			err := o.agent.report(ctx, rep)
			if err == nil {
				break
			}
			o.log.Warn("a report was not taken and is sent again", "seq", rep.Seq, "op", rep.Operation, "err", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
		}
		select {
		case o.inbox <- func() { o.acknowledged(rep.Seq) }:
		case <-o.done:
		}
	})
}

// acknowledged drops a fact that the control plane has. It need not be durable: one
// that is sent twice is applied once.
func (o *owner) acknowledged(seq int64) {
	o.delivering = false
	next := o.rec.clone()
	for len(next.Unacked) > 0 && next.Unacked[0].Seq <= seq {
		next.Unacked = next.Unacked[1:]
	}
	if err := o.journal.write(next); err == nil {
		o.rec = next
	}
	o.deliver()
}

// vanish removes the last trace of a sandbox whose erasure has been taken note of.
func (o *owner) vanish() {
	if o.gone {
		return
	}
	if err := o.journal.remove(); err != nil {
		o.log.Error("the journal of a deleted sandbox could not be removed and is tried again", "err", err)
		o.later(retryMost, o.deliver)
		return
	}
	o.gone = true
}
