package control

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/receipt"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// ensureSigningKey makes the key that the installation's receipts are signed with, at the
// first start of its first server. All servers of one database sign with it (ADR 0014).
func (c *Control) ensureSigningKey(ctx context.Context) error {
	if _, err := c.signingKeys(ctx); !fault.Is(err, fault.NotFound) {
		return err
	}
	public, secret, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	return c.store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
		if err := tx.Lock(ctx, "signing_key"); err != nil {
			return err
		}
		if there, err := tx.SigningKeys(ctx); err != nil || len(there) > 0 {
			return err // another server has made it
		}
		return tx.AddSigningKey(ctx, store.SigningKey{ID: receipt.KeyID(public), Secret: secret.Seed(), CreatedAt: c.instant()})
	})
}

// signingKeys gives the keys, NotFound where there is none yet.
func (c *Control) signingKeys(ctx context.Context) (keys []store.SigningKey, err error) {
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		keys, err = r.SigningKeys(ctx)
		return err
	})
	if err == nil && len(keys) == 0 {
		err = fault.New(fault.NotFound, "the installation has no key to sign receipts with yet; start its server")
	}
	return keys, err
}

// ReceiptKey is a public key of the installation's receipts.
type ReceiptKey struct {
	ID        string
	Text      string // as receipt.ParseKeys reads it
	CreatedAt time.Time
}

// ReceiptKeys gives the public keys that the installation's receipts are signed with,
// oldest first.
func (c *Control) ReceiptKeys(ctx context.Context) ([]ReceiptKey, error) {
	keys, err := c.signingKeys(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]ReceiptKey, len(keys))
	for i, k := range keys {
		if len(k.Secret) != ed25519.SeedSize {
			return nil, fault.New(fault.DataCorrupt, "the key %s of the installation is damaged; put the database back from a backup", k.ID)
		}
		public := ed25519.NewKeyFromSeed(k.Secret).Public().(ed25519.PublicKey)
		out[i] = ReceiptKey{ID: k.ID, Text: receipt.KeyText(public), CreatedAt: k.CreatedAt}
	}
	return out, nil
}

// ReceiptPage is one page of receipts, newest last.
type ReceiptPage struct {
	Receipts   []store.Receipt
	NextCursor string
}

// Receipts gives a page of a sandbox's receipts, newest last, also of a deleted one that
// is named by its id.
func (c *Control) Receipts(ctx context.Context, a Actor, ref string, q PageQuery) (ReceiptPage, error) {
	var out ReceiptPage
	page, err := c.page(q.Limit, q.Cursor)
	if err != nil {
		return out, err
	}
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		s, err := resolve(ctx, r, a, ref)
		if err != nil {
			return err
		}
		rows, err := r.Receipts(ctx, s.ID, page)
		out.Receipts, out.NextCursor = cut(page, rows, func(rc store.Receipt) store.Cursor { return store.Cursor{At: rc.At, ID: rc.Operation} })
		return err
	})
	return out, err
}

// receipt signs what a save was that a report tells of, in the transaction of its
// transition: so each committed save has one, and nothing else has. s is the row after it.
func (w *writer) receipt(ctx context.Context, s sandbox.Sandbox, op *sandbox.Operation, r hostproto.Report) error {
	kind := map[sandbox.Event]string{sandbox.EventSlept: receipt.Sleep, sandbox.EventStopped: receipt.Stop}[r.Event]
	if !r.Saved || kind == "" || op == nil {
		return nil
	}
	keys, err := w.SigningKeys(ctx)
	if err != nil {
		return err
	}
	if len(keys) == 0 || len(keys[len(keys)-1].Secret) != ed25519.SeedSize {
		return fault.New(fault.Internal, "the receipt of %s cannot be signed: the installation has no key", op.ID)
	}
	at := r.At
	rc := receipt.Receipt{
		Operation: op.ID, Kind: kind, Project: s.Project, Sandbox: s.ID, Name: s.Name, Generation: s.Generation, Host: s.Host,
		Template: s.Spec.Version, Disk: receipt.Disk{SizeBytes: s.Spec.Disk},
	}
	if save := r.Save; save != nil {
		if !save.At.IsZero() {
			at = save.At
		}
		if save.MemoryRoot != "" {
			rc.Memory = &receipt.Memory{Digest: "blake3:" + save.MemoryRoot, Bytes: save.MemoryBytes, Runtime: save.Runtime + " " + save.Version}
		}
	}
	rc.SavedAt = receipt.Instant(at)
	doc, err := receipt.Sign(rc, ed25519.NewKeyFromSeed(keys[len(keys)-1].Secret))
	if err != nil {
		return err
	}
	if err := w.AddReceipt(ctx, store.Receipt{Operation: op.ID, Project: s.Project, Sandbox: s.ID, Document: doc, At: r.At}); err != nil {
		return err
	}
	return w.event(ctx, "receipt.issued", s.ID, op.ID, map[string]any{"document": doc})
}
