package receipt

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

func key(seed byte) ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed(bytes.Repeat([]byte{seed}, ed25519.SeedSize))
}

func public(k ed25519.PrivateKey) ed25519.PublicKey { return k.Public().(ed25519.PublicKey) }

func sample() Receipt {
	return Receipt{
		Operation: "op_1", Kind: Sleep, Project: "default", Sandbox: "sbx_1", Name: "otter & <ö>", Generation: 3, Host: "local",
		Template: "sha256:aa", SavedAt: Instant(time.Date(2026, 3, 1, 12, 0, 0, 5e6, time.UTC)), Disk: Disk{SizeBytes: 4e9},
		Memory: &Memory{Digest: "blake3:bb", Bytes: 7, Runtime: "gvisor 1"},
	}
}

func sign(t *testing.T, r Receipt) string {
	t.Helper()
	doc, err := Sign(r, key(1))
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

// X1: a receipt is what was signed, with whatever spaces; and says what it does not cover.
func TestSigned_X1(t *testing.T) {
	doc := sign(t, sample())
	want := sample()
	want.Version, want.Key = Version, KeyID(public(key(1)))
	var pretty bytes.Buffer
	if err := json.Indent(&pretty, []byte(doc), "", "  "); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{doc, doc + "\n", pretty.String()} {
		got, err := Verify([]byte(text), public(key(2)), public(key(1)))
		if err != nil {
			t.Fatal(err)
		}
		if *got.Memory != *want.Memory {
			t.Errorf("the memory is %+v", got.Memory)
		}
		got.Memory, want.Memory = nil, nil
		if got != want {
			t.Errorf("read %+v, signed %+v", got, want)
		}
		want.Memory = sample().Memory
	}
	for _, part := range []string{`"tree":null`, `"off_host":null`, `"saved_at":"2026-03-01T12:00:00.005Z"`} {
		if !strings.Contains(doc, part) {
			t.Errorf("%s is not in %s", part, doc)
		}
	}
	stopped := sample()
	stopped.Kind, stopped.Memory = Stop, nil
	if text := sign(t, stopped); !strings.Contains(text, `"memory":null`) {
		t.Errorf("a stop's memory: %s", text)
	}
}

// X1: a changed byte fails, each of them, in every bit; and so does one more or less.
func TestChangedByte_X1(t *testing.T) {
	doc := []byte(sign(t, sample()))
	for i := range doc {
		for bit := range 8 {
			changed := bytes.Clone(doc)
			changed[i] ^= 1 << bit
			if _, err := Verify(changed, public(key(1))); err == nil {
				t.Fatalf("bit %d of byte %d can be changed: %s", bit, i, changed)
			}
		}
		if _, err := Verify(append(bytes.Clone(doc[:i]), doc[i+1:]...), public(key(1))); err == nil {
			t.Fatalf("byte %d can be left out", i)
		}
	}
	for _, text := range []string{"", "null", "{}", `{"receipt":null}`, string(doc) + "{}", string(doc[:len(doc)-1]) + `,"more":1}`,
		strings.Replace(string(doc), `"receipt"`, `"Receipt"`, 1), strings.Replace(string(doc), `{"version":1`, `{"version":1,"version":1`, 1)} {
		if _, err := Verify([]byte(text), public(key(1))); !fault.Is(err, fault.DataCorrupt) && !fault.Is(err, fault.Unsupported) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// X1: another key's receipt is none of ours, also where it claims to be of our key.
func TestAnotherKey_X1(t *testing.T) {
	doc := sign(t, sample())
	if _, err := Verify([]byte(doc), public(key(2))); !fault.Is(err, fault.NotFound) {
		t.Errorf("with another key: %v", err)
	}
	forged, err := Sign(sample(), key(2))
	if err != nil {
		t.Fatal(err)
	}
	forged = strings.Replace(forged, KeyID(public(key(2))), KeyID(public(key(1))), 1)
	if _, err := Verify([]byte(forged), public(key(1))); !fault.Is(err, fault.DataCorrupt) {
		t.Errorf("forged: %v", err)
	}
	if _, err := Verify([]byte(doc)); !fault.Is(err, fault.NotFound) {
		t.Errorf("without a key: %v", err)
	}
}

func TestKeys(t *testing.T) {
	text := "# ours\n\n" + KeyText(public(key(1))) + "\n " + KeyText(public(key(2))) + " \n"
	keys, err := ParseKeys(text)
	if err != nil || len(keys) != 2 || !keys[1].Equal(public(key(2))) {
		t.Errorf("%v, %v", keys, err)
	}
	for _, bad := range []string{"", "# none", "hutch-ed25519:", "hutch-ed25519:AAAA", strings.TrimPrefix(KeyText(public(key(1))), keyPrefix)} {
		if _, err := ParseKeys(bad); !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
