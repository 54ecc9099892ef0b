package guest

import (
	"bytes"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/hutchrun/hutch/internal/guestproto"
)

// E2, E3: whatever is written in whatever pieces, a reader that starts anywhere gets
// each kept byte once and each lost one in exactly one gap, and the log costs no more
// than its limit.
func TestE3OutputLogIsExact(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(0, 300<<10).Draw(t, "limit")
		var used atomic.Int64
		l := newOutputLog(limit, &used)
		var all []byte
		streams := map[int64]guestproto.Stream{}
		for range rapid.IntRange(0, 30).Draw(t, "writes") {
			n := rapid.SampledFrom([]int{1, 3, 100, 4096, 32 << 10, 70 << 10}).Draw(t, "size")
			stream := guestproto.Stream(rapid.IntRange(1, 2).Draw(t, "stream"))
			p := bytes.Repeat([]byte{byte(len(all) >> 8)}, n)
			streams[int64(len(all))] = stream
			l.append(stream, p)
			all = append(all, p...)
			if rapid.IntRange(0, 9).Draw(t, "shrink") == 0 {
				limit = rapid.IntRange(0, limit).Draw(t, "smaller")
				l.setLimit(limit)
			}
		}
		if cost := l.cost(); cost > limit || int64(cost) != used.Load() {
			t.Fatalf("costs %d of %d, counted as %d", cost, limit, used.Load())
		}
		end, omitted := l.size()
		if end != int64(len(all)) {
			t.Fatalf("ends at %d, want %d", end, len(all))
		}
		from := rapid.Int64Range(0, end).Draw(t, "from")
		lost := int64(0)
		for cursor := from; cursor < end; {
			piece, gapEnd, _ := l.read(cursor)
			switch {
			case len(piece.data) > 0:
				if piece.at != cursor || !bytes.Equal(piece.data, all[cursor:piece.end()]) || len(piece.data) > guestproto.Chunk {
					t.Fatalf("at %d: %d other bytes", cursor, len(piece.data))
				}
				if s, ok := streams[cursor]; ok && s != piece.stream {
					t.Fatalf("at %d: stream %v, want %v", cursor, piece.stream, s)
				}
				cursor = piece.end()
			case gapEnd > cursor && gapEnd <= end:
				lost += gapEnd - cursor
				cursor = gapEnd
			default:
				t.Fatalf("stuck at %d of %d", cursor, end)
			}
		}
		if from == 0 && lost != omitted {
			t.Fatalf("%d lost, %d counted", lost, omitted)
		}
	})
}

// What a hold needs stays, the log says that it is full, and both end with the hold.
func TestOutputLogHold(t *testing.T) {
	t.Parallel()
	var used atomic.Int64
	l := newOutputLog(1<<10, &used)
	h := l.hold(0)
	l.append(1, make([]byte, 4<<10))
	if full, _ := l.full(); !full {
		t.Fatal("not full")
	}
	if _, omitted := l.size(); omitted != 0 {
		t.Fatalf("%d bytes fell out", omitted)
	}
	l.move(h, 4<<10)
	if full, _ := l.full(); full {
		t.Fatal("full though all has been read")
	}
	l.append(1, make([]byte, 4<<10))
	full, next := l.full()
	if !full {
		t.Fatal("not full again")
	}
	l.release(h)
	<-next
	if full, _ := l.full(); full || l.cost() > 1<<10 {
		t.Fatalf("full %v, costs %d", full, l.cost())
	}
}
