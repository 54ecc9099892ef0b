package sandbox

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"time"
)

// OperationID is the id of an operation that nobody asked for. It follows from what
// caused it, so that whoever decides on it (a host alone, the control plane for a host
// that is away, either one again after a crash) makes the same operation. tries counts
// the operations of the same cause that failed. It looks like every other operation's
// id: 128 bits of a UUIDv7, whose time is the due time, so that ids sort by it.
func OperationID(sandbox string, generation int64, cause Cause, due time.Time, tries int) string {
	ms := due.UnixMilli()
	sum := sha256.Sum256(fmt.Appendf(nil, "hutch operation 1\n%s\n%d\n%s\n%d\n%d\n", sandbox, generation, cause, ms, tries))
	hi := uint64(ms)<<16 | 0x7000 | uint64(binary.BigEndian.Uint16(sum[0:]))&0x0fff
	lo := 1<<63 | binary.BigEndian.Uint64(sum[2:])&(1<<62-1)
	return "op_" + suffix(hi, lo)
}

// alphabet is Crockford's base32 in lower case, as TypeIDs have it
// (github.com/jetify-com/typeid, spec).
const alphabet = "0123456789abcdefghjkmnpqrstvwxyz"

// suffix writes 128 bits in 26 characters, two zero bits first.
func suffix(hi, lo uint64) string {
	var out [26]byte
	for i := len(out) - 1; i >= 0; i-- {
		out[i] = alphabet[lo&31]
		lo = lo>>5 | hi<<59
		hi >>= 5
	}
	return string(out[:])
}
