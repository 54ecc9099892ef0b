package sshgate

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/crypto/ssh"

	"github.com/hutchrun/hutch/internal/fault"
)

// HostKey reads the host key in a file, and makes it at the first call: a whole key is
// in place under its name, or none. A file that is there and is no key is an error, as a
// new key would turn every client away.
func HostKey(path string) (ssh.Signer, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := makeHostKey(path); err != nil {
			return nil, err
		}
		text, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, err
	}
	signer, err := ssh.ParsePrivateKey(text)
	if err != nil {
		return nil, fault.Wrap(err, fault.FailedPrecondition, "%s is no SSH host key; put it back from a backup, or remove it and have a new one made, which clients have to be told of", path)
	}
	return signer, nil
}

func makeHostKey(path string) (err error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	block, err := ssh.MarshalPrivateKey(key, "hutch")
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".hostkey-") // 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	if _, err = f.Write(pem.EncodeToMemory(block)); err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	// A link, not a rename: of two that begin at once the first one's key stays.
	if err := os.Link(f.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
