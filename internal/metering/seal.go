package metering

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
)

// seal is the hash of all that a meter was told and made so far: of the seal before, a fact
// and the entries that it completed. The meter carries it, so that a fact or an entry that
// was changed, added or taken out later is seen, whatever else would still add up.
func seal(before string, f Fact, entries []Entry) string {
	sum := sha256.Sum256([]byte(text(struct {
		Before  string
		Fact    Fact
		Entries []Entry
	}{before, f, entries})))
	return hex.EncodeToString(sum[:])
}

// text writes what always can be written as JSON.
func text(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("metering: encode %T: %v", v, err))
	}
	return string(b)
}

// replayed gives the facts to a meter once more and compares what it makes of them with
// what is kept, to the last byte. Where Verify's other checks ask whether the ledger is
// right, this asks whether it is what was written. A meter from before there were seals is
// sealed from its next fact on.
func (v *verifier) replayed(entries []Entry) {
	kept, facts := v.account.Meter, v.account.Facts
	if kept.Facts < 0 || kept.Facts > int64(len(facts)) {
		v.say("the meter was given %d facts under its seal, and %d are kept", kept.Facts, len(facts))
		return
	}
	m, sealed := Meter{Project: kept.Project, Sandbox: kept.Sandbox}, ""
	var made []Entry
	for i, f := range facts {
		next, entries, err := m.Next(f, v.prices)
		if err != nil {
			v.say("fact %d (%s of the event %q) cannot have been taken: %v", i+1, f.Kind, f.Event, err)
			return
		}
		if int64(len(facts)-i) <= kept.Facts {
			sealed = seal(sealed, f, entries)
		}
		m, made = next, append(made, entries...)
	}
	for _, e := range entries {
		if same := slices.ContainsFunc(made, func(w Entry) bool { return w.N == e.N && text(w) == text(e) }); !same {
			v.say("entry %d is not what was written", e.N)
		}
	}
	if m.Facts, m.Seal = kept.Facts, kept.Seal; text(m) != text(kept) {
		v.say("the meter is not what its facts make it: it says %q since %s, and they say %q since %s",
			kept.Reason, stamp(kept.Since), m.Reason, stamp(m.Since))
	}
	if sealed != kept.Seal {
		v.say("the facts are not those that the meter was given: their seal differs")
	}
}
