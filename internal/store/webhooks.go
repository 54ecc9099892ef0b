package store

import (
	"context"
	"strings"
	"time"
)

// Webhooks is what the delivery of webhooks needs of the database. Each method is one
// transaction of its own, and several servers may call them at once.
//
// A pending delivery is at the head of its lane when no pending one of the same
// webhook and lane has a lower number. Only heads are due and are claimed, which is
// what keeps the order: the one behind a head moves up when the head has ended. Those
// that are added to a lane have higher numbers than what is pending in it.
type Webhooks interface {
	// WebhookCursor gives the number of the last event that deliveries were made for; 0
	// before the first.
	WebhookCursor(ctx context.Context) (int64, error)
	// EnabledWebhooks gives every project's webhooks that are not disabled.
	EnabledWebhooks(ctx context.Context) ([]Webhook, error)
	// AddDeliveries writes the deliveries of the events behind from up to to, and moves
	// the cursor from one to the other. Where the cursor is not at from, another server
	// was quicker: Conflict with ReasonStale, and nothing is written. A delivery whose
	// id is there already is left as it is; one whose webhook is gone is left out.
	AddDeliveries(ctx context.Context, from, to int64, deliveries []Delivery) error
	// DueWebhooks says which webhooks have a delivery that can be claimed now, the one
	// that waits longest first, at most limit; those in without are left out of all of
	// the answer.
	DueWebhooks(ctx context.Context, now time.Time, without []string, limit int) (DueWebhooks, error)
	// ClaimDeliveries leases deliveries of one webhook that are at the head of their
	// lane, have come to their time and are under no lease that holds, oldest NextAt
	// first. It counts Attempts and Tries up: an attempt whose server dies counts too.
	// Disabled webhooks are no exception.
	ClaimDeliveries(ctx context.Context, c DeliveryClaim) ([]ClaimedDelivery, error)
	// SettleDelivery writes what came of a claimed delivery, its attempt, what that says
	// of the receiver and, where asked, that the webhook is disabled, and ends the lease.
	// Where the delivery is gone or under another lease: Conflict with ReasonStale, and
	// nothing is written. A lease that has run out and that nobody has taken is still
	// good. Of a delivery's attempts the last KeptAttempts are kept.
	SettleDelivery(ctx context.Context, s DeliverySettlement) error
	// ReplayDeliveries makes deliveries pending again. One that is not there is
	// inserted. One that has ended takes over Lane, Since and NextAt, and begins with no
	// tries; its attempts so far stay. One that is pending takes over Since, and NextAt
	// where that is sooner, begins with no tries, and stays in its lane and under its
	// lease. One whose webhook is gone is left out.
	ReplayDeliveries(ctx context.Context, deliveries []Delivery) error
	// Overfull gives the enabled webhooks that have more than so many pending deliveries.
	Overfull(ctx context.Context, most int) ([]Webhook, error)
	// DisableWebhook disables a webhook as SettleDelivery does. One that is gone or
	// disabled already is no error.
	DisableWebhook(ctx context.Context, id string, d WebhookDisabling) error
	// Webhook and Delivery: NotFound where there is none.
	Webhook(ctx context.Context, id string) (Webhook, error)
	Delivery(ctx context.Context, id string) (Delivery, error)
}

// KeptAttempts is how many lines of the delivery log one delivery has at most: its 3 days
// of tries and two replays.
const KeptAttempts = 64

// WebhookReader is what a transaction can read of webhooks.
type WebhookReader interface {
	// ProjectWebhook gives a webhook of a project; in a write transaction it stays as it
	// was read.
	ProjectWebhook(ctx context.Context, project, id string) (Webhook, error)
	// ProjectWebhooks is in the order of their making.
	ProjectWebhooks(ctx context.Context, project string, p Page) ([]Webhook, error)
	// PendingDeliveries counts what waits to be sent, by webhook; those without are left out.
	PendingDeliveries(ctx context.Context, webhooks ...string) (map[string]int64, error)
	// Deliveries gives a webhook's deliveries, the newest event first.
	Deliveries(ctx context.Context, f DeliveryFilter) ([]Delivery, error)
	// Attempts gives a delivery's log, oldest first.
	Attempts(ctx context.Context, delivery string) ([]DeliveryAttempt, error)
	// NumberedUpTo gives the highest number that was given to an event, as LastEvent does.
	NumberedUpTo(ctx context.Context) (int64, error)
}

// WebhookWriter is what a write transaction can change of webhooks.
type WebhookWriter interface {
	InsertWebhook(ctx context.Context, w Webhook) error
	// UpdateWebhook is to webhooks what UpdateSandbox is to sandboxes. What attempts say
	// of the receiver counts no version up: read the row in the same transaction.
	UpdateWebhook(ctx context.Context, w *Webhook) error
	// EndDeliveries marks what of a webhook waits to be sent as failed, for a reason. What
	// is under a lease is left to who holds it.
	EndDeliveries(ctx context.Context, webhook, why string, at time.Time) error
	// DeleteWebhook removes a webhook with all that is known of its deliveries.
	DeleteWebhook(ctx context.Context, project, id string) error
}

// DeliveryFilter selects deliveries of one webhook. The zero Before is the newest, a Limit
// of 0 is all.
type DeliveryFilter struct {
	Webhook string
	Status  DeliveryStatus // "" is any
	Sandbox string         // an id; "" is any
	Limit   int
	Before  DeliveryCursor
}

// DeliveryCursor is the place of a delivery in the list, which may be gone.
type DeliveryCursor struct {
	Seq int64
	ID  string
}

// Webhook is an address that a project's events are sent to.
type Webhook struct {
	ID          string
	Project     string
	URL         string
	Description string
	Types       []string        // the event types that it wants, as "sandbox.ready" or "sandbox.*"; none is all
	Secrets     []WebhookSecret // that sign, newest first
	After       int64           // events up to this number are not sent by themselves
	// FailingSince is when an attempt failed after which none succeeded, with the error of
	// the last one; zero where the last one succeeded.
	FailingSince time.Time
	FailingError string
	// DisabledAt is zero for one that is sent to.
	DisabledAt     time.Time
	DisabledReason string
	CreatedAt      time.Time
	Version        int64
}

// WebhookSecret is a signing secret. It is kept as it is, since signing needs it, and
// is left out of what is printed or logged.
type WebhookSecret struct {
	Value string    // "whsec_" and base64
	Until time.Time // it signs until then; zero is for good
}

// String and GoString keep a secret out of texts.
func (WebhookSecret) String() string   { return "[secret]" }
func (WebhookSecret) GoString() string { return "[secret]" }

// DeliveryStatus is how far a delivery has come.
type DeliveryStatus string

// Pending is to be sent, now or later; Delivered was taken by the receiver with a 2xx;
// Failed was given up, and what is behind it in its lane goes on.
const (
	DeliveryPending   DeliveryStatus = "pending"
	DeliveryDelivered DeliveryStatus = "delivered"
	DeliveryFailed    DeliveryStatus = "failed"
)

// Delivery is one event on its way to one webhook.
type Delivery struct {
	ID        string // also the message id that receivers see; the same for every attempt and replay
	Webhook   string
	Project   string
	Sandbox   string // "" for events of none
	Seq       int64  // the event's
	Type      string // the event's
	Lane      string // deliveries of one webhook and lane go one after the other, by Seq
	Status    DeliveryStatus
	Error     string    // why the last attempt did not succeed, or why it was given up
	Attempts  int       // ever
	Tries     int       // since Since: they choose the wait before the next
	Since     time.Time // made, or last replayed; the time to give up counts from here
	NextAt    time.Time // not sent before
	EndedAt   time.Time // zero while pending
	CreatedAt time.Time
}

// DeliveryAttempt is a line of the delivery log.
type DeliveryAttempt struct {
	Number int // Delivery.Attempts when it was made; one whose server died leaves a gap
	At     time.Time
	Took   time.Duration
	Status int    // the HTTP status; 0 where there was no answer
	Error  string // "" for a success
}

// DueWebhooks is the answer of Webhooks.DueWebhooks. Next is when the next head that
// is not yet due can be claimed, by its time or by the end of its lease; zero is never.
type DueWebhooks struct {
	IDs  []string
	Next time.Time
}

// DeliveryClaim asks for at most Limit deliveries of a webhook.
type DeliveryClaim struct {
	Webhook string
	Limit   int
	Now     time.Time
	Until   time.Time // when the lease runs out
	Lease   string    // names this claim and no other
}

// ClaimedDelivery is a delivery under a lease, after the count. Event has no number
// where the event is no longer kept.
type ClaimedDelivery struct {
	Delivery Delivery
	Webhook  Webhook
	Event    Event
}

// DeliverySettlement is what came of a claimed delivery.
type DeliverySettlement struct {
	ID      string
	Lease   string
	Status  DeliveryStatus
	Error   string
	NextAt  time.Time        // of Pending
	At      time.Time        // EndedAt of the others
	Attempt *DeliveryAttempt // nil where nothing was sent
	// Health is what the attempt says of the receiver: 1 that it is well, -1 that it is
	// not, 0 nothing.
	Health  int
	Disable *WebhookDisabling // nil leaves the webhook as it is
}

// WebhookDisabling says why a webhook is not sent to any more. What waits for it is
// marked as failed at once, but for what is under a lease.
type WebhookDisabling struct {
	Reason string
	At     time.Time
	// Failing is the Webhook.FailingSince that the decision rests on: where that is another
	// by now, the webhook stays enabled. The zero time decides without it.
	Failing time.Time
	Event   Event // tells of it
}

// TypeMatches says whether an event type is among those that a filter names; "sandbox.*" and
// "*" stand for all that begin so, and an empty filter for all.
func TypeMatches(filter []string, typ string) bool {
	for _, t := range filter {
		kind, all := strings.CutSuffix(t, "*")
		if t == typ || all && strings.HasPrefix(typ, kind) {
			return true
		}
	}
	return len(filter) == 0
}
