package webhook

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

// MessageID is the id of an event's message to a webhook: the same for every attempt
// and replay, and another for every other event and webhook. The event's time is in it,
// so that an event that gets a number anew after a database was put back from a backup
// is not taken for the one that had it before.
func MessageID(webhook string, e store.Event) string {
	h := sha256.Sum256(fmt.Appendf(nil, "%s\n%d\n%d\n%s\n%s", webhook, e.Seq, e.At.UnixMilli(), e.Type, e.Sandbox))
	return "msg_" + strings.ToLower(base32.HexEncoding.WithPadding(base32.NoPadding).EncodeToString(h[:20]))
}

// message is the body: the envelope that Standard Webhooks recommends around the event
// as /v1/events gives it.
type message struct {
	Type      string `json:"type"`
	Timestamp string `json:"timestamp"`
	Data      event  `json:"data"`
}

type event struct {
	ID        string          `json:"id"`
	Seq       int64           `json:"seq"`
	Type      string          `json:"type"`
	Sandbox   string          `json:"sandbox"`
	Operation string          `json:"operation"`
	Actor     string          `json:"actor"`
	Key       string          `json:"key"`
	Data      json.RawMessage `json:"data"`
	At        string          `json:"at"`
}

// body is the same bytes for an event each time.
func body(e store.Event) ([]byte, error) {
	at := e.At.UTC().Format("2006-01-02T15:04:05.000Z")
	b, err := json.Marshal(message{Type: e.Type, Timestamp: at, Data: event{
		ID: e.ID, Seq: e.Seq, Type: e.Type, Sandbox: e.Sandbox, Operation: e.Operation, Actor: e.Actor, Key: e.Key, Data: e.Data, At: at,
	}})
	if err != nil {
		return nil, fmt.Errorf("webhook: encode event %d: %w", e.Seq, err)
	}
	return b, nil
}

// sign sets the three headers of Standard Webhooks, with a signature by each secret
// that holds at the instant.
func sign(h http.Header, secrets []store.WebhookSecret, id string, at time.Time, body []byte) error {
	var signatures []string
	for _, s := range secrets {
		if !s.Until.IsZero() && !at.Before(s.Until) {
			continue
		}
		w, err := standardwebhooks.NewWebhook(s.Value)
		if err != nil {
			return fmt.Errorf("webhook: a secret is not base64") // the library's text could show a part of it
		}
		signature, err := w.Sign(id, at, body)
		if err != nil {
			return fmt.Errorf("webhook: sign: %w", err)
		}
		signatures = append(signatures, signature)
	}
	if len(signatures) == 0 {
		return fmt.Errorf("webhook: no secret holds")
	}
	h.Set(standardwebhooks.HeaderWebhookID, id)
	h.Set(standardwebhooks.HeaderWebhookTimestamp, strconv.FormatInt(at.Unix(), 10))
	h.Set(standardwebhooks.HeaderWebhookSignature, strings.Join(signatures, " "))
	return nil
}

const secretPrefix = "whsec_"

// NewSecret makes a signing secret of 256 random bits.
func NewSecret() string {
	key := make([]byte, 32)
	rand.Read(key) // it never fails: crypto/rand ends the program instead
	return secretPrefix + base64.StdEncoding.EncodeToString(key)
}

// CheckSecret refuses what is no secret by Standard Webhooks: "whsec_" and 24 to 64
// bytes in base64. It never repeats the secret.
func CheckSecret(s string) error {
	encoded, ok := strings.CutPrefix(s, secretPrefix)
	if !ok {
		return fault.New(fault.InvalidArgument, "cannot take this signing secret: it does not begin with %s; leave it out and one is made", secretPrefix)
	}
	key, err := base64.StdEncoding.Strict().DecodeString(encoded)
	// The decoder passes over line ends, other libraries do not.
	if err != nil || len(key) < 24 || len(key) > 64 || strings.ContainsAny(encoded, "\r\n") {
		return fault.New(fault.InvalidArgument,
			"cannot take this signing secret: behind %s it must be 24 to 64 bytes in base64 with padding; leave it out and one is made", secretPrefix)
	}
	return nil
}

// Rotate puts a new secret in front. The one that was newest signs along for the
// overlap, so that receivers can change over without losing a message; older ones
// end at once. The same secret again changes nothing, so that a repeated call does not
// cut the overlap of the one before.
func Rotate(secrets []store.WebhookSecret, fresh string, now time.Time, overlap time.Duration) []store.WebhookSecret {
	if len(secrets) > 0 && secrets[0].Value == fresh {
		return secrets
	}
	out := []store.WebhookSecret{{Value: fresh}}
	if len(secrets) > 0 && overlap > 0 {
		out = append(out, store.WebhookSecret{Value: secrets[0].Value, Until: now.Add(overlap)})
	}
	return out
}
