package control

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base32"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// A secret is "hutch_" and 256 random bits in lower-case base32: 52 characters.
const (
	secretPrefix = "hutch_"
	secretBytes  = 32
	secretLength = len(secretPrefix) + 52
	shownPrefix  = len(secretPrefix) + 6 // what is kept to tell keys apart: 30 bits of 256
)

var secretEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// random gives the text of 256 random bits.
func random() string {
	bits := make([]byte, secretBytes)
	rand.Read(bits) // never fails: it ends the process instead
	return secretEncoding.EncodeToString(bits)
}

// newSecret makes a secret and the hash that is kept of it.
func newSecret() (secret string, hash []byte) {
	secret = secretPrefix + random()
	sum := sha256.Sum256([]byte(secret))
	return secret, sum[:]
}

// APIKey is a key as its project sees it.
type APIKey struct {
	store.APIKey
	Scopes Scopes
}

func keyOf(k store.APIKey) APIKey { return APIKey{APIKey: k, Scopes: scopesOf(k.Scopes)} }

// CreateKeyRequest asks for an API key.
type CreateKeyRequest struct {
	Idempotency Idempotency
	Name        string    // for people; 1 to 100 characters
	Project     string    // "" is the actor's; another is for the operator
	Scopes      []string  // none is ScopesProject
	Expires     time.Time // zero is never
}

// CreateKey makes an API key. It can do no more than its maker's. The secret is given here
// and never again, not even to a repeat of the same request key: that gives the key with an
// empty secret.
func (c *Control) CreateKey(ctx context.Context, a Actor, r CreateKeyRequest) (key APIKey, secret string, err error) {
	var scopes Scopes
	check := func() (err error) {
		if n := utf8.RuneCountInString(r.Name); n < 1 || n > maxKeyName || !printable(r.Name) {
			return invalid("name", "%s is no name for an API key: use 1 to %d printable characters", shown(r.Name), maxKeyName)
		}
		if scopes, err = ParseScopes(r.Scopes); err != nil {
			return err
		}
		if !r.Expires.IsZero() && !r.Expires.After(c.instant()) {
			return invalid("expires_at", "a key cannot expire at %s, which is over; name a later time, or none", r.Expires.UTC().Format(time.RFC3339))
		}
		return a.Need(scopes)
	}
	again := func(ctx context.Context, rd store.Reader, seen store.Request) (APIKey, error) {
		k, err := keyByID(ctx, rd, a, seen.Resource)
		return keyOf(k), err
	}
	secret, hash := newSecret()
	key, replayed, err := once(ctx, c, a, r.Idempotency, check, again, func(ctx context.Context, w *writer) (APIKey, error) {
		p, err := project(ctx, w, a, r.Project)
		if err != nil {
			return APIKey{}, err
		}
		k := store.APIKey{
			ID: c.newID("key"), Project: p.ID, Name: r.Name, Hash: hash, Prefix: secret[:shownPrefix], Scopes: scopes.text(),
			CreatedAt: w.at, ExpiresAt: r.Expires.UTC().Truncate(time.Millisecond),
		}
		w.memo.Outcome, w.memo.Resource, w.project = string(sandbox.Done), k.ID, p.ID
		if err := w.InsertAPIKey(ctx, k); err != nil {
			return APIKey{}, err
		}
		return keyOf(k), w.event(ctx, "key.created", "", "", map[string]any{"key_id": k.ID, "name": k.Name, "scopes": scopes.Names()})
	})
	if err != nil || replayed {
		secret = ""
	}
	return key, secret, err
}

// RotateKey gives a key another secret: the one before opens nothing any more. It is like
// CreateKey in how the secret is given.
func (c *Control) RotateKey(ctx context.Context, a Actor, id string, idem Idempotency) (key APIKey, secret string, err error) {
	again := func(ctx context.Context, rd store.Reader, seen store.Request) (APIKey, error) {
		k, err := keyByID(ctx, rd, a, seen.Resource)
		return keyOf(k), err
	}
	secret, hash := newSecret()
	key, replayed, err := once(ctx, c, a, idem, nil, again, func(ctx context.Context, w *writer) (APIKey, error) {
		k, err := keyByID(ctx, w, a, id)
		if err != nil {
			return APIKey{}, err
		}
		if err := a.Need(scopesOf(k.Scopes)); err != nil { // or its secret could be had by who may do less
			return APIKey{}, err
		}
		k.Hash, k.Prefix, k.RotatedAt = hash, secret[:shownPrefix], w.at
		w.memo.Outcome, w.memo.Resource, w.project = string(sandbox.Done), k.ID, k.Project
		if err := w.UpdateAPIKey(ctx, k); err != nil {
			return APIKey{}, err
		}
		return keyOf(k), w.event(ctx, "key.rotated", "", "", map[string]any{"key_id": k.ID, "name": k.Name})
	})
	if err != nil || replayed {
		secret = ""
	}
	return key, secret, err
}

// Authenticate gives the actor that a secret stands for, or Unauthenticated, or RateLimited
// where the key is used more often than its project allows.
func (c *Control) Authenticate(ctx context.Context, secret string) (Actor, error) {
	refused := fault.New(fault.Unauthenticated, "the API key is not valid; `hutch keys create NAME` makes one")
	if len(secret) != secretLength || !strings.HasPrefix(secret, secretPrefix) {
		return Actor{}, refused
	}
	// The row is found by the hash of the secret, so how long the search takes tells
	// nothing about the secret.
	hash := sha256.Sum256([]byte(secret))
	var key store.APIKey
	var owner Project
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		if key, err = r.APIKeyByHash(ctx, hash[:]); err != nil {
			return err
		}
		owner, err = r.Project(ctx, key.Project)
		return err
	})
	if fault.Is(err, fault.NotFound) || err == nil && subtle.ConstantTimeCompare(hash[:], key.Hash) != 1 {
		return Actor{}, refused
	}
	if err != nil {
		return Actor{}, err
	}
	now := c.instant()
	if !key.ExpiresAt.IsZero() && !now.Before(key.ExpiresAt) {
		return Actor{}, fault.New(fault.Unauthenticated, "the API key expired at %s; have another made with `hutch keys create NAME`",
			key.ExpiresAt.Format(time.RFC3339)).Because("expired")
	}
	if err := c.rates.allow(key.ID, owner.Rate, now); err != nil {
		return Actor{}, err
	}
	c.uses.note(key.ID, now)
	return Actor{Project: key.Project, KeyID: key.ID, Scopes: scopesOf(key.Scopes)}, nil
}

// KeyQuery selects a page of API keys. Project "" is the actor's; another is for the
// operator.
type KeyQuery struct {
	PageQuery
	Project string
}

// Keys gives a page of a project's API keys, in the order of their making.
func (c *Control) Keys(ctx context.Context, a Actor, q KeyQuery) (APIKeyPage, error) {
	var out APIKeyPage
	page, err := c.page(q.Limit, q.Cursor)
	if err != nil {
		return out, err
	}
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		p, err := project(ctx, r, a, q.Project)
		if err != nil {
			return err
		}
		rows, err := r.APIKeys(ctx, p.ID, page)
		rows, out.NextCursor = cut(page, rows, func(k store.APIKey) store.Cursor { return store.Cursor{At: k.CreatedAt, ID: k.ID} })
		for _, k := range rows {
			out.APIKeys = append(out.APIKeys, keyOf(k))
		}
		return err
	})
	return out, err
}

// keyByID finds a key of the actor's project; the operator's finds those of all.
func keyByID(ctx context.Context, r store.Reader, a Actor, id string) (store.APIKey, error) {
	owner := a.Project
	if a.Operator() {
		owner = ""
	}
	k, err := r.APIKey(ctx, owner, id)
	if fault.Is(err, fault.NotFound) {
		return k, fault.New(fault.NotFound, "there is no API key %s; `hutch keys ls` lists those that are", shown(id)).Because("key")
	}
	return k, err
}

// DeleteKey ends a key: the next call with its secret is refused. A stream that it began
// goes on to its end.
func (c *Control) DeleteKey(ctx context.Context, a Actor, id string, idem Idempotency) error {
	again := func(context.Context, store.Reader, store.Request) (struct{}, error) { return struct{}{}, nil }
	_, _, err := once(ctx, c, a, idem, nil, again, func(ctx context.Context, w *writer) (struct{}, error) {
		k, err := keyByID(ctx, w, a, id)
		if err != nil {
			return struct{}{}, err
		}
		w.memo.Outcome, w.memo.Resource, w.project = string(sandbox.Done), id, k.Project
		if err := w.DeleteAPIKey(ctx, k.Project, id); err != nil {
			return struct{}{}, err
		}
		return struct{}{}, w.event(ctx, "key.deleted", "", "", map[string]any{"key_id": id})
	})
	return err
}
