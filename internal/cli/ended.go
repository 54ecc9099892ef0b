package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// lookTimeout bounds the question what became of a sandbox.
const lookTimeout = 5 * time.Second

// ending is what a sandbox did to the commands in it.
type ending struct {
	what   string // in words; "" where it did nothing
	next   string
	reason string // as a program reads it
}

// sandboxEnding looks at the sandbox of a command whose stream has ended. The verb's
// context may be over already.
func (f *follower) sandboxEnding(ctx context.Context) ending {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookTimeout)
	defer cancel()
	sb, err := read[api.Sandbox](f.c.GetSandbox(ctx, f.ref, &api.GetSandboxParams{}))
	switch {
	case fault.Is(err, fault.NotFound):
		return ending{what: f.ref + " was deleted or renamed", next: "`hutch ls` lists what there is", reason: "deleted"}
	case err != nil: // what happened is not known
		return ending{}
	}
	return endingOf(sb)
}

// endingOf says how the state of a sandbox ends commands. A sandbox that sleeps keeps
// them.
func endingOf(sb api.Sandbox) ending {
	resume := fmt.Sprintf("`hutch resume %s` boots it from its disk", sb.Name)
	switch {
	case sb.State == api.StateFailed && sb.Reason == "oom_killed":
		return ending{
			fmt.Sprintf("%s ran out of memory (it has %s) and was ended as a whole", sb.Name, formatMemory(sb.MemoryBytes)),
			resume + ", `hutch new --memory SIZE` makes one with more memory", sb.Reason,
		}
	case sb.State == api.StateFailed && sb.Reason == "host_restarted":
		return ending{"the host of " + sb.Name + " was restarted", resume, sb.Reason}
	case sb.State == api.StateFailed && sb.Reason == "crashed":
		return ending{sb.Name + " crashed", resume + fmt.Sprintf(", `hutch get %s` says more", sb.Name), sb.Reason}
	case sb.State == api.StateFailed:
		return ending{
			fmt.Sprintf("%s failed (%s)", sb.Name, orDash(sb.Reason)), resume + fmt.Sprintf(", `hutch get %s` says more", sb.Name), "failed",
		}
	case sb.State == api.StateStopped && sb.Reason == "exited":
		return ending{sb.Name + " was powered off from inside", resume, sb.Reason}
	case sb.State == api.StateStopped && sb.Reason == "auto_stop":
		return ending{sb.Name + " was stopped: " + sb.Message, resume + fmt.Sprintf(", and `hutch edit %s --ttl TIME` then changes its auto-stop", sb.Name), sb.Reason}
	case sb.State == api.StateStopped, sb.State == api.StateArchived:
		return ending{sb.Name + " was stopped", resume, "stopped"}
	case sb.State == api.StateDeleted, sb.Operation != nil && sb.Operation.Kind == "delete":
		return ending{sb.Name + " was deleted", "`hutch ls` lists what there is", "deleted"}
	case sb.Operation != nil && sb.Operation.Kind == "stop":
		return ending{sb.Name + " is being stopped", fmt.Sprintf("`hutch get %s --wait` shows the end of it", sb.Name), "stopped"}
	}
	return ending{}
}

// endedWith is the failure of a stream in words of what the sandbox did, where it was
// the sandbox that ended it; err otherwise. The exit code of the command is not known
// then, and none is made up.
func (f *follower) endedWith(ctx context.Context, err error) error {
	if !f.opened || f.id == "" {
		return err
	}
	end := f.sandboxEnding(ctx)
	if end.what == "" && fault.Is(err, fault.NotFound) {
		end = ending{
			f.ref + " was started anew meanwhile, which forgets its commands", fmt.Sprintf("`hutch commands ls %s` lists those since", f.ref), "restarted",
		}
	}
	if end.what == "" {
		return err
	}
	return fault.Wrap(&responseError{}, fault.FailedPrecondition, "the command %s ended with its sandbox, so its exit code is not known: %s; %s", f.id, end.what, end.next).
		Because(end.reason)
}
