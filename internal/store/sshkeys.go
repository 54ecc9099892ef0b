package store

import (
	"context"
	"time"
)

// SSHKey is a public key that opens the sandboxes of a project over SSH.
type SSHKey struct {
	ID          string
	Project     string
	Name        string
	Fingerprint string // "SHA256:" and the unpadded base64 of the key's SHA-256
	PublicKey   string // type and base64, as in an authorized_keys file, without a comment
	CreatedAt   time.Time
}

// SSHKeyReader reads SSH keys.
type SSHKeyReader interface {
	SSHKey(ctx context.Context, project, id string) (SSHKey, error) // project "" is any
	SSHKeys(ctx context.Context, project string, p Page) ([]SSHKey, error)
	// SSHKeysByFingerprint gives the key in each project that has it, oldest first.
	SSHKeysByFingerprint(ctx context.Context, fingerprint string) ([]SSHKey, error)
}

// SSHKeyWriter writes SSH keys.
type SSHKeyWriter interface {
	// InsertSSHKey: Conflict with ReasonExists where the project has the key already.
	InsertSSHKey(ctx context.Context, k SSHKey) error
	DeleteSSHKey(ctx context.Context, project, id string) error
}
