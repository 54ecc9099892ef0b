package store

import (
	"context"
	"time"
)

// ReceiptReader is what a transaction can read of the receipts of saves.
type ReceiptReader interface {
	// Receipts gives a sandbox's receipts, newest last; Page.After is an operation.
	Receipts(ctx context.Context, sandboxID string, p Page) ([]Receipt, error)
	// SigningKeys gives the keys that receipts are signed with, oldest first.
	SigningKeys(ctx context.Context) ([]SigningKey, error)
}

// ReceiptWriter is what a write transaction can add.
type ReceiptWriter interface {
	// AddReceipt: Conflict with ReasonExists where the operation has one.
	AddReceipt(ctx context.Context, r Receipt) error
	AddSigningKey(ctx context.Context, k SigningKey) error
}

// Receipt is the signed record of one save that was committed (X1).
type Receipt struct {
	Operation string // that made the save
	Project   string
	Sandbox   string
	Document  string // as it was signed
	At        time.Time
}

// SigningKey is a key of the installation.
type SigningKey struct {
	ID        string
	Secret    []byte // the seed of an Ed25519 key
	CreatedAt time.Time
}
