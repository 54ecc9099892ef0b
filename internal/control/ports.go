package control

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"slices"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

const (
	// tokenPrefix begins a connection token; 256 random bits follow, as in a key.
	tokenPrefix = "hutchp_"
	// grantsMost is how many grants a sandbox has at most: each request to its ports
	// reads them.
	grantsMost = 100
	// tokenMost bounds the life of a connection token; a stop ends it earlier.
	tokenMost = 30 * 24 * time.Hour
)

// GrantPortRequest asks that a port be opened to callers without an API key.
type GrantPortRequest struct {
	Idempotency Idempotency
	Port        int       // 0, for a token only, is every port
	Public      bool      // to everybody, until it is revoked; else to who has the token
	Expires     time.Time // of a token; zero is an hour from now
}

// GrantPort opens a port. A public one that is public already is given as it is. The
// token is given here and never again, not even to a repeat of the same request key.
func (c *Control) GrantPort(ctx context.Context, a Actor, ref string, r GrantPortRequest) (grant store.PortGrant, s sandbox.Sandbox, token string, err error) {
	type made struct {
		grant   store.PortGrant
		sandbox sandbox.Sandbox
	}
	now := c.instant()
	check := func() error {
		switch {
		case r.Port < 0 || r.Port > 65535 || r.Port == 0 && r.Public:
			return invalid("port", "%d is no port; use one between 1 and 65535", r.Port)
		case r.Public && !r.Expires.IsZero():
			return invalid("expires_at", "a public port does not expire; revoke it, or make a token that expires")
		case !r.Expires.IsZero() && (!r.Expires.After(now) || r.Expires.After(now.Add(tokenMost))):
			return invalid("expires_at", "a token cannot expire at %s; name a time in the next 30 days", r.Expires.UTC().Format(time.RFC3339))
		}
		return nil
	}
	find := func(ctx context.Context, rd store.Reader, id string) (made, error) {
		s, err := resolve(ctx, rd, a, ref)
		if err != nil {
			return made{}, err
		}
		grants, err := rd.PortGrants(ctx, s.ID)
		for _, g := range grants {
			if g.ID == id {
				return made{g, s}, err
			}
		}
		if err == nil {
			err = noGrant(id)
		}
		return made{}, err
	}
	again := func(ctx context.Context, rd store.Reader, seen store.Request) (made, error) {
		return find(ctx, rd, seen.Resource)
	}
	secret := tokenPrefix + random()
	m, replayed, err := once(ctx, c, a, r.Idempotency, check, again, func(ctx context.Context, w *writer) (made, error) {
		s, err := resolve(ctx, w, a, ref)
		if err != nil {
			return made{}, err
		}
		g := store.PortGrant{ID: c.newID("prt"), Project: s.Project, Sandbox: s.ID, Port: r.Port, CreatedAt: w.at}
		if !r.Public {
			if g.ExpiresAt = r.Expires.UTC().Truncate(time.Millisecond); r.Expires.IsZero() {
				g.ExpiresAt = w.at.Add(time.Hour)
			}
			sum := sha256.Sum256([]byte(secret))
			g.Hash = sum[:]
		}
		switch s.State {
		case sandbox.Creating, sandbox.Ready, sandbox.Sleeping:
		case sandbox.Deleted:
			return made{}, fault.New(fault.FailedPrecondition, "cannot open a port of %s: it is deleted", s.Name).Because("state_deleted")
		default: // tokens end at a stop, so one that is made now would be of a boot that is over
			if !r.Public {
				return made{}, fault.New(fault.FailedPrecondition, "cannot make a token for %s: it is %s, and tokens end at a stop; start it with `hutch resume %s`",
					s.Name, s.State, s.Name).Because("state_" + string(s.State))
			}
		}
		grants, err := w.PortGrants(ctx, s.ID)
		if err != nil {
			return made{}, err
		}
		alive := 0
		for _, old := range grants {
			if old.Public() && r.Public && old.Port == r.Port {
				w.memo.Outcome, w.memo.Resource = string(sandbox.Done), old.ID
				return made{old, s}, nil
			}
			if expired(old, w.at) {
				if err := w.DeletePortGrant(ctx, s.ID, old.ID); err != nil {
					return made{}, err
				}
				continue
			}
			alive++
		}
		if alive >= grantsMost {
			return made{}, fault.New(fault.QuotaExceeded, "%s has %d open grants, the most there can be; revoke one with `hutch ports revoke %s ID`", s.Name, alive, s.Name).Because("port_grants")
		}
		w.memo.Outcome, w.memo.Resource = string(sandbox.Done), g.ID
		if err := w.InsertPortGrant(ctx, g); err != nil {
			return made{}, err
		}
		return made{g, s}, w.event(ctx, "port.opened", s.ID, "", map[string]any{"grant_id": g.ID, "port": g.Port, "public": g.Public()})
	})
	if err != nil || replayed || r.Public {
		secret = ""
	}
	return m.grant, m.sandbox, secret, err
}

func expired(g store.PortGrant, now time.Time) bool {
	return !g.ExpiresAt.IsZero() && !now.Before(g.ExpiresAt)
}

func noGrant(id string) error {
	return fault.New(fault.NotFound, "there is no grant %s; `hutch ports ls NAME` lists those that are", shown(id)).Because("grant")
}

// PortGrants gives who may reach a sandbox's ports without a key, oldest first.
func (c *Control) PortGrants(ctx context.Context, a Actor, ref string) (grants []store.PortGrant, s sandbox.Sandbox, err error) {
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		if s, err = resolve(ctx, r, a, ref); err != nil {
			return err
		}
		grants, err = r.PortGrants(ctx, s.ID)
		return err
	})
	now := c.instant()
	return slices.DeleteFunc(grants, func(g store.PortGrant) bool { return expired(g, now) }), s, err
}

// RevokePort ends a grant: the next request with it is refused. A connection that it
// opened goes on to its end.
func (c *Control) RevokePort(ctx context.Context, a Actor, ref, id string, idem Idempotency) error {
	again := func(context.Context, store.Reader, store.Request) (struct{}, error) { return struct{}{}, nil }
	_, _, err := once(ctx, c, a, idem, nil, again, func(ctx context.Context, w *writer) (out struct{}, err error) {
		s, err := resolve(ctx, w, a, ref)
		if err != nil {
			return out, err
		}
		w.memo.Outcome, w.memo.Resource = string(sandbox.Done), id
		if err := w.DeletePortGrant(ctx, s.ID, id); fault.Is(err, fault.NotFound) {
			return out, noGrant(id)
		} else if err != nil {
			return out, err
		}
		return out, w.event(ctx, "port.closed", s.ID, "", map[string]any{"grant_id": id})
	})
	return err
}

// PortCredential is what a request to a port shows; each may be empty.
type PortCredential struct {
	Token string // a connection token
	Key   string // an API key with the scope exec
}

// Port gives the way to a port of a sandbox that is named by its id, as Guest does for a
// session: it wakes the sandbox. Who may not reach the port is told the same of a sandbox
// that is there as of one that is not, and wakes nothing.
func (c *Control) Port(ctx context.Context, id string, port int, cred PortCredential) (Access, error) {
	var a Actor
	var err error
	if cred.Key != "" {
		if a, err = c.Authenticate(ctx, cred.Key); err != nil {
			return Access{}, err
		}
		if err := a.Need(ScopeExec); err != nil {
			return Access{}, err
		}
	}
	refused := fault.New(fault.Unauthenticated, "the port needs a connection token that is valid; `hutch ports connect` makes one, `hutch ports share` opens the port to all").
		Because("port_token")
	var s sandbox.Sandbox
	var grants []store.PortGrant
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		if s, err = r.Sandbox(ctx, id); err != nil {
			return err
		}
		grants, err = r.PortGrants(ctx, id)
		return err
	})
	if fault.Is(err, fault.NotFound) || err == nil && s.State == sandbox.Deleted {
		return Access{}, refused
	}
	if err != nil {
		return Access{}, err
	}
	if cred.Key == "" || a.Project != s.Project {
		g := admits(grants, port, cred.Token, c.instant())
		if g == nil {
			return Access{}, refused
		}
		a = Actor{Project: s.Project, KeyID: g.ID, Scopes: ScopeExec}
	}
	if !s.Policy.Walls().Admits(port) {
		return Access{}, fault.New(fault.PermissionDenied, "the firewall of %s admits nobody to its port %d; `hutch firewall %s show` shows its rules", s.Name, port, s.Name).Because("firewall")
	}
	return c.Guest(ctx, a, id, hostproto.UseSession)
}

// admits finds the grant that lets a caller with a token, "" for none, reach a port.
func admits(grants []store.PortGrant, port int, token string, now time.Time) *store.PortGrant {
	sum := sha256.Sum256([]byte(token))
	for i, g := range grants {
		switch {
		case expired(g, now) || g.Port != 0 && g.Port != port:
		case g.Public():
			return &grants[i]
		case strings.HasPrefix(token, tokenPrefix) && subtle.ConstantTimeCompare(sum[:], g.Hash) == 1:
			return &grants[i]
		}
	}
	return nil
}
