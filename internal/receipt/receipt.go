// Package receipt is the signed record of a save (X1): what it says, how it is signed,
// and how anyone who has the installation's public key checks it without a server. It
// does no I/O and reads no clock.
package receipt

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

// Version is that of the form of a receipt.
const Version = 1

// The kinds of saves.
const (
	Sleep = "sleep" // memory and disk
	Stop  = "stop"  // the disk
)

// Receipt says of one save that was committed what was saved. A field that is null says
// that nothing is known or promised of its subject yet, and not that there is nothing.
type Receipt struct {
	Version    int     `json:"version"`
	Operation  string  `json:"operation"` // that made the save; it has one receipt
	Kind       string  `json:"kind"`
	Project    string  `json:"project"`
	Sandbox    string  `json:"sandbox"`
	Name       string  `json:"name"` // of the sandbox, at that time
	Generation int64   `json:"generation"`
	Host       string  `json:"host"`
	Template   string  `json:"template"` // the digest of its version
	SavedAt    string  `json:"saved_at"` // RFC 3339, UTC, milliseconds
	Disk       Disk    `json:"disk"`
	Memory     *Memory `json:"memory"`   // null where none was saved
	OffHost    *string `json:"off_host"` // the position in the off-host copy; null while there is none
	Key        string  `json:"key"`      // the id of the key that signed it
}

// Disk is the saved disk.
type Disk struct {
	SizeBytes int64 `json:"size_bytes"`
	// Tree is the root of the tree of the disk's chunks. It is null while no tree is kept:
	// the signature then covers that the disk was saved, and not its contents.
	Tree *string `json:"tree"`
}

// Memory is the saved memory.
type Memory struct {
	Digest  string `json:"digest"` // "blake3:" and the digest over all of its files, in hexadecimal
	Bytes   int64  `json:"bytes"`
	Runtime string `json:"runtime"` // that it needs, with its version
}

// Instant writes a time as receipts have it.
func Instant(t time.Time) string {
	return t.UTC().Truncate(time.Millisecond).Format("2006-01-02T15:04:05.000Z")
}

// signed is the document: the receipt and the signature over its bytes.
type signed struct {
	Receipt   json.RawMessage `json:"receipt"`
	Signature string          `json:"signature"` // Ed25519, base64
}

// context goes before what is signed, so that no other signature of the key is one of a
// receipt.
const context = "hutch receipt 1\n"

// Sign gives the document of a receipt, in one line.
func Sign(r Receipt, key ed25519.PrivateKey) (string, error) {
	r.Version, r.Key = Version, KeyID(key.Public().(ed25519.PublicKey))
	body, err := encode(r)
	if err != nil {
		return "", fault.Wrap(err, fault.Internal, "the receipt cannot be written")
	}
	sig := ed25519.Sign(key, append([]byte(context), body...))
	doc, err := encode(signed{Receipt: body, Signature: base64.StdEncoding.EncodeToString(sig)})
	if err != nil {
		return "", fault.Wrap(err, fault.Internal, "the receipt cannot be written")
	}
	return string(doc), nil
}

// encode writes JSON without spaces, and the characters of HTML as they are.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}

// Verify gives the receipt of a document that one of the keys has signed. Between its
// words there may be other spaces than were signed; every other byte counts. What is
// wrong is DataCorrupt, a key that is not there NotFound with reason "key".
func Verify(doc []byte, keys ...ed25519.PublicKey) (Receipt, error) {
	r, sig, err := parse(doc)
	if err != nil {
		return Receipt{}, err
	}
	for _, key := range keys {
		if KeyID(key) != r.Key {
			continue
		}
		body, err := encode(r)
		if err != nil || !ed25519.Verify(key, append([]byte(context), body...), sig) {
			return Receipt{}, corrupt("its signature does not fit what it says; it was changed after it was signed")
		}
		return r, nil
	}
	return Receipt{}, fault.New(fault.NotFound, "the receipt is signed with the key %s, which is not among those given; "+
		"`hutch receipts key` of the installation that issued it shows its key", shown(r.Key)).Because("key")
}

// parse reads a document, which must be written as Sign writes it: a document that says
// the same in another way is not the one that was signed.
func parse(doc []byte) (Receipt, []byte, error) {
	var s signed
	var r Receipt
	d := json.NewDecoder(bytes.NewReader(doc))
	if err := d.Decode(&s); err != nil {
		return r, nil, corrupt("it is no receipt of hutch")
	}
	if err := json.Unmarshal(s.Receipt, &r); err != nil {
		return r, nil, corrupt("it is no receipt of hutch")
	}
	if r.Version != Version {
		return r, nil, fault.New(fault.Unsupported, "the receipt has the form %d, and this hutch knows the form %d; use a newer one", r.Version, Version).
			Because("receipt_version")
	}
	sig, err := base64.StdEncoding.DecodeString(s.Signature)
	if err != nil {
		return r, nil, corrupt("its signature cannot be read")
	}
	body, err := encode(r)
	if err != nil {
		return r, nil, corrupt("it is no receipt of hutch")
	}
	want, err := encode(signed{Receipt: body, Signature: base64.StdEncoding.EncodeToString(sig)})
	var got bytes.Buffer
	if err != nil || json.Compact(&got, doc) != nil || !bytes.Equal(got.Bytes(), want) {
		return r, nil, corrupt("it is not written as hutch writes receipts; something in it was changed")
	}
	return r, sig, nil
}

func corrupt(why string) error {
	return fault.New(fault.DataCorrupt, "the receipt does not hold: %s", why).Because("receipt")
}

// shown is a text of a document that may be anything.
func shown(s string) string {
	if len(s) > 40 {
		s = s[:40] + "…"
	}
	return strings.ToValidUTF8(s, "?")
}

// KeyID names a public key: the beginning of its digest.
func KeyID(key ed25519.PublicKey) string {
	sum := sha256.Sum256(key)
	return "key_" + hex.EncodeToString(sum[:8])
}

// keyPrefix begins a public key in text.
const keyPrefix = "hutch-ed25519:"

// KeyText writes a public key in one line, as ParseKeys reads it.
func KeyText(key ed25519.PublicKey) string { return keyPrefix + base64.StdEncoding.EncodeToString(key) }

// ParseKeys reads public keys, one a line. Empty lines, and those that begin with #, are
// left out.
func ParseKeys(text string) ([]ed25519.PublicKey, error) {
	var keys []ed25519.PublicKey
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		coded, ok := strings.CutPrefix(line, keyPrefix)
		key, err := base64.StdEncoding.DecodeString(coded)
		if !ok || err != nil || len(key) != ed25519.PublicKeySize {
			return nil, fault.New(fault.InvalidArgument, "%q is no public key; it begins with %s, as `hutch receipts key` writes it", shown(line), keyPrefix).
				Because("key")
		}
		keys = append(keys, key)
	}
	if len(keys) == 0 {
		return nil, fault.New(fault.InvalidArgument, "there is no public key; `hutch receipts key` writes that of the installation").Because("key")
	}
	return keys, nil
}
