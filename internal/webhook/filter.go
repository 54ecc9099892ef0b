package webhook

import (
	"regexp"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

// maxTypes is the longest filter of a webhook.
const maxTypes = 50

var typePattern = regexp.MustCompile(`^(\*|[a-z][a-z0-9_]*(\.[a-z0-9_]+)*(\.\*)?)$`)

// CheckTypes refuses a filter that could never match. Types that no event has today are
// taken: a later version may have them.
func CheckTypes(types []string) error {
	if len(types) > maxTypes {
		return fault.New(fault.InvalidArgument, "cannot filter by %d event types; the most is %d, and sandbox.* stands for all of a kind", len(types), maxTypes)
	}
	for _, t := range types {
		if len(t) > 100 || !typePattern.MatchString(t) {
			return fault.New(fault.InvalidArgument, "cannot filter by the event type %.100q: give one such as sandbox.ready, all of a kind as sandbox.*, or * for all", t)
		}
	}
	return nil
}

// Wants says whether an event is to be sent to a webhook: it is of the webhook's
// project and passes its filter.
func Wants(w store.Webhook, e store.Event) bool {
	return w.Project == e.Project && store.TypeMatches(w.Types, e.Type)
}
