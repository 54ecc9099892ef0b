package guest

import (
	"sort"
	"sync"
	"sync/atomic"

	"github.com/hutchrun/hutch/internal/guestproto"
)

const (
	segmentMax  = guestproto.Chunk // bytes of one segment at most
	segmentCost = 64               // what keeping a segment costs beside its bytes
	leastOutput = 256 << 10        // a running command's limit never falls below this
)

// segment is a run of output of one stream. Its bytes are never changed once they
// are there, so a reader may hold on to them without a lock.
type segment struct {
	at     int64
	stream guestproto.Stream
	data   []byte
}

func (s segment) end() int64 { return s.at + int64(len(s.data)) }
func (s segment) cost() int  { return cap(s.data) + segmentCost }

// outputLog keeps a command's output by cursor: the head, and the tail, within a
// limit that counts what the keeping costs. What falls out between is counted. It
// never makes a writer wait but for a hold.
type outputLog struct {
	mu       sync.Mutex
	limit    int
	head     []segment
	headCost int
	headDone bool
	tail     []segment
	tailCost int
	end      int64
	holds    map[*hold]struct{}
	changed  chan struct{} // closed at the next change; nil while nobody waits
	used     *atomic.Int64 // what all logs together cost, this one's share in it
	share    int
}

// hold keeps what a lossless reader has not read yet from falling out; the log's
// writer waits instead.
type hold struct{ at int64 }

// newOutputLog makes an empty log; used is the sum that it keeps its share of.
func newOutputLog(limit int, used *atomic.Int64) *outputLog {
	return &outputLog{limit: limit, holds: map[*hold]struct{}{}, used: used}
}

// append adds output.
func (l *outputLog) append(stream guestproto.Stream, p []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(p) > 0 {
		if !l.headDone && l.headCost >= l.limit/2 {
			l.headDone = true
		}
		list, cost := &l.head, &l.headCost
		if l.headDone {
			list, cost = &l.tail, &l.tailCost
		}
		n := extend(list, cost, stream, l.end, p)
		l.end += int64(n)
		p = p[n:]
	}
	l.evict()
	l.wake()
}

// extend adds what fits to the last segment where it is of the same stream and has
// room, and to a new one otherwise. It returns how many bytes it took.
func extend(list *[]segment, cost *int, stream guestproto.Stream, at int64, p []byte) int {
	if n := len(*list); n > 0 {
		last := &(*list)[n-1]
		if room := segmentMax - len(last.data); last.stream == stream && last.end() == at && room > 0 {
			p = p[:min(len(p), room)]
			*cost -= last.cost()
			if need := len(last.data) + len(p); need > cap(last.data) {
				// A copy, for readers may hold the old bytes.
				grown := make([]byte, len(last.data), min(max(need, 2*cap(last.data)), segmentMax))
				copy(grown, last.data)
				last.data = grown
			}
			last.data = append(last.data, p...)
			*cost += last.cost()
			return len(p)
		}
	}
	p = p[:min(len(p), segmentMax)]
	s := segment{at: at, stream: stream, data: append([]byte(nil), p...)}
	*cost += s.cost()
	*list = append(*list, s)
	return len(p)
}

// evict drops the end of the head down to its half of the limit, and then the oldest
// of the tail until the limit holds, but nothing that a hold still needs.
func (l *outputLog) evict() {
	for n := len(l.head); n > 0 && l.headCost > l.limit/2 && !l.needed(l.head[n-1]); n-- {
		l.headCost -= l.head[n-1].cost()
		l.head[n-1] = segment{}
		l.head = l.head[:n-1]
		l.headDone = true
	}
	drop := 0
	for drop < len(l.tail) && l.headCost+l.tailCost > l.limit && !l.needed(l.tail[drop]) {
		l.tailCost -= l.tail[drop].cost()
		l.tail[drop] = segment{}
		drop++
	}
	l.tail = l.tail[drop:]
	l.used.Add(int64(l.headCost + l.tailCost - l.share))
	l.share = l.headCost + l.tailCost
}

func (l *outputLog) needed(s segment) bool {
	for h := range l.holds {
		if h.at < s.end() {
			return true
		}
	}
	return false
}

// setLimit changes the limit and drops what is above it. It returns what the log costs
// then: more than the limit only while a hold needs it.
func (l *outputLog) setLimit(limit int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.limit = limit
	l.evict()
	l.wake()
	return l.share
}

// full says whether a writer must wait for a hold, and gives the channel that the
// next change closes.
func (l *outputLog) full() (bool, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.share <= l.limit {
		return false, nil
	}
	return true, l.wait() // evict left more than the limit: a hold needs it
}

// read gives what is at a cursor: a piece of at most guestproto.Chunk bytes, or the
// end of the gap that begins there, or neither at the end. The channel is closed at
// the next change.
func (l *outputLog) read(cursor int64) (piece segment, gapEnd int64, next <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, list := range [][]segment{l.head, l.tail} {
		i := sort.Search(len(list), func(i int) bool { return list[i].end() > cursor })
		if i == len(list) {
			continue
		}
		s := list[i]
		if s.at > cursor {
			return segment{}, s.at, nil
		}
		skip := int(cursor - s.at)
		return segment{at: cursor, stream: s.stream, data: s.data[skip:len(s.data):len(s.data)]}, 0, nil
	}
	if cursor < l.end {
		return segment{}, l.end, nil
	}
	return segment{}, 0, l.wait()
}

// size gives the end of the output and how much of it has fallen out.
func (l *outputLog) size() (end, omitted int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	omitted = l.end
	for _, list := range [][]segment{l.head, l.tail} {
		for _, s := range list {
			omitted -= int64(len(s.data))
		}
	}
	return l.end, omitted
}

// cost is what the log keeps in memory, in bytes.
func (l *outputLog) cost() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.share
}

// hold begins to keep everything from a cursor on; move and release go with it.
func (l *outputLog) hold(at int64) *hold {
	h := &hold{at: at}
	l.mu.Lock()
	l.holds[h] = struct{}{}
	l.mu.Unlock()
	return h
}

func (l *outputLog) move(h *hold, at int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h.at = at
	l.evict()
	l.wake()
}

func (l *outputLog) release(h *hold) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.holds, h)
	l.evict()
	l.wake()
}

func (l *outputLog) wait() <-chan struct{} {
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	return l.changed
}

func (l *outputLog) wake() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}
