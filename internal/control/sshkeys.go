package control

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// SSHKey is a public key that opens a project's sandboxes over SSH.
type SSHKey = store.SSHKey

// SSHKeyPage is one page of SSH keys.
type SSHKeyPage struct {
	SSHKeys    []SSHKey
	NextCursor string
}

// scopesSSH are what an SSH key opens: to work in sandboxes.
const scopesSSH = ScopeRead | ScopeExec

// Bounds of a public key: RSA with 16,384 bits has 2.8 kB in base64.
const (
	maxSSHKey  = 8 << 10
	minRSABits = 2048
)

var sshKeyTypes = []string{
	"ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa",
	"sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com",
}

// AddSSHKeyRequest registers a public key.
type AddSSHKeyRequest struct {
	Idempotency Idempotency
	Name        string // for people; "" is the key's comment
	Project     string // "" is the actor's; another is for the operator
	PublicKey   string // a line of an authorized_keys file without options
}

// AddSSHKey registers a public key: its holder works in the project's sandboxes over SSH.
// Who adds one may do that too.
func (c *Control) AddSSHKey(ctx context.Context, a Actor, r AddSSHKeyRequest) (SSHKey, error) {
	var blob []byte
	var kind string
	check := func() (err error) {
		var comment string
		if kind, blob, comment, err = parseSSHKey(r.PublicKey); err != nil {
			return err
		}
		if r.Name == "" {
			r.Name = comment
		}
		if r.Name == "" {
			r.Name = kind
		}
		if n := utf8.RuneCountInString(r.Name); n > maxKeyName || !printable(r.Name) {
			return invalid("name", "%s is no name for an SSH key: use 1 to %d printable characters", shown(r.Name), maxKeyName)
		}
		return a.Need(scopesSSH)
	}
	again := func(ctx context.Context, rd store.Reader, seen store.Request) (SSHKey, error) {
		return sshKeyByID(ctx, rd, a, seen.Resource)
	}
	key, _, err := once(ctx, c, a, r.Idempotency, check, again, func(ctx context.Context, w *writer) (SSHKey, error) {
		p, err := project(ctx, w, a, r.Project)
		if err != nil {
			return SSHKey{}, err
		}
		k := SSHKey{
			ID: c.newID("sshk"), Project: p.ID, Name: r.Name, Fingerprint: SSHFingerprint(blob),
			PublicKey: kind + " " + base64.StdEncoding.EncodeToString(blob), CreatedAt: w.at,
		}
		w.memo.Outcome, w.memo.Resource, w.project = string(sandbox.Done), k.ID, p.ID
		if err := w.InsertSSHKey(ctx, k); err != nil {
			return SSHKey{}, err
		}
		return k, w.event(ctx, "ssh_key.added", "", "", map[string]any{"ssh_key_id": k.ID, "name": k.Name, "fingerprint": k.Fingerprint})
	})
	return key, err
}

// SSHFingerprint is how a public key in SSH's wire format is called.
func SSHFingerprint(blob []byte) string {
	sum := sha256.Sum256(blob)
	return "SHA256:" + base64.RawStdEncoding.EncodeToString(sum[:])
}

// parseSSHKey reads "TYPE BASE64 COMMENT". A line with options is refused: hutch would
// not keep to them.
func parseSSHKey(line string) (kind string, blob []byte, comment string, err error) {
	bad := func(why string) error {
		return invalid("public_key", "this is no public key of SSH that can be used: %s; give a line as in ~/.ssh/id_ed25519.pub", why)
	}
	line = strings.TrimSpace(line)
	switch {
	case len(line) > maxSSHKey:
		return "", nil, "", bad("it is too long")
	case strings.Contains(line, "PRIVATE KEY"):
		return "", nil, "", bad("it is a private key, which nobody else may see")
	case strings.ContainsAny(line, "\n\r"):
		return "", nil, "", bad("it has more than one line")
	}
	kind, rest, _ := strings.Cut(line, " ")
	if !slices.Contains(sshKeyTypes, kind) {
		return "", nil, "", bad("its type is none of " + strings.Join(sshKeyTypes, ", "))
	}
	text, comment, _ := strings.Cut(strings.TrimSpace(rest), " ")
	blob, err = base64.StdEncoding.DecodeString(text)
	if err != nil {
		return "", nil, "", bad("its second word is no base64")
	}
	parts := sshStrings(blob)
	if len(parts) < 2 || string(parts[0]) != kind {
		return "", nil, "", bad("its parts do not fit together")
	}
	if kind == "ssh-rsa" && (len(parts) != 3 || len(bytes.TrimLeft(parts[2], "\x00"))*8 < minRSABits) {
		return "", nil, "", bad("an RSA key has 2048 bits or more")
	}
	return kind, blob, strings.TrimSpace(comment), nil
}

// sshStrings splits a sequence of strings of RFC 4251; nil where it is none.
func sshStrings(b []byte) (out [][]byte) {
	for len(b) > 0 {
		if len(b) < 4 {
			return nil
		}
		n := binary.BigEndian.Uint32(b)
		if uint64(n) > uint64(len(b)-4) {
			return nil
		}
		out, b = append(out, b[4:4+n]), b[4+n:]
	}
	return out
}

// SSHKeys gives a page of a project's SSH keys, in the order of their making.
func (c *Control) SSHKeys(ctx context.Context, a Actor, q KeyQuery) (SSHKeyPage, error) {
	var out SSHKeyPage
	page, err := c.page(q.Limit, q.Cursor)
	if err != nil {
		return out, err
	}
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		p, err := project(ctx, r, a, q.Project)
		if err != nil {
			return err
		}
		rows, err := r.SSHKeys(ctx, p.ID, page)
		out.SSHKeys, out.NextCursor = cut(page, rows, func(k SSHKey) store.Cursor { return store.Cursor{At: k.CreatedAt, ID: k.ID} })
		return err
	})
	return out, err
}

func sshKeyByID(ctx context.Context, r store.Reader, a Actor, id string) (SSHKey, error) {
	owner := a.Project
	if a.Operator() {
		owner = ""
	}
	k, err := r.SSHKey(ctx, owner, id)
	if fault.Is(err, fault.NotFound) {
		return k, fault.New(fault.NotFound, "there is no SSH key %s; `hutch ssh-keys ls` lists those that are", shown(id)).Because("ssh_key")
	}
	return k, err
}

// DeleteSSHKey ends a key: the next login with it is refused. Connections that stand go on.
func (c *Control) DeleteSSHKey(ctx context.Context, a Actor, id string, idem Idempotency) error {
	again := func(context.Context, store.Reader, store.Request) (struct{}, error) { return struct{}{}, nil }
	_, _, err := once(ctx, c, a, idem, nil, again, func(ctx context.Context, w *writer) (struct{}, error) {
		k, err := sshKeyByID(ctx, w, a, id)
		if err != nil {
			return struct{}{}, err
		}
		w.memo.Outcome, w.memo.Resource, w.project = string(sandbox.Done), id, k.Project
		if err := w.DeleteSSHKey(ctx, k.Project, id); err != nil {
			return struct{}{}, err
		}
		return struct{}{}, w.event(ctx, "ssh_key.deleted", "", "", map[string]any{"ssh_key_id": id, "fingerprint": k.Fingerprint})
	})
	return err
}

// SSHActors gives whom the holder of a public key, in SSH's wire format, acts for: one
// for each project that has the key, the one that registered it first at the front.
// NotFound where nobody did.
func (c *Control) SSHActors(ctx context.Context, blob []byte) (actors []Actor, err error) {
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		keys, err := r.SSHKeysByFingerprint(ctx, SSHFingerprint(blob))
		for _, k := range keys {
			actors = append(actors, Actor{Project: k.Project, KeyID: k.ID, Scopes: scopesSSH})
		}
		return err
	})
	if err == nil && len(actors) == 0 {
		err = fault.New(fault.NotFound, "nobody registered this SSH key; `hutch ssh-keys add` does")
	}
	return actors, err
}
