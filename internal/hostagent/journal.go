package hostagent

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// phase is what the host holds of a sandbox when no operation is at work on it.
type phase string

const (
	phaseNone    phase = "none"    // nothing yet
	phaseRunning phase = "running" // processes, mounts, network
	phaseSaved   phase = "saved"   // a committed save: memory and its disk
	phaseStopped phase = "stopped" // a disk
	phaseDeleted phase = "deleted" // a disk, which nobody sees unless it is brought back
	phaseErased  phase = "erased"  // nothing more; kept until the report is taken
)

// record is all that the host must remember of one sandbox. It is written whole, so
// that the last line of the journal is the truth.
type record struct {
	Sandbox    string       `json:"sandbox"`
	Name       string       `json:"name"`
	Spec       sandbox.Spec `json:"spec"`
	Phase      phase        `json:"phase"`
	Generation int64        `json:"generation"`
	HostBoot   string       `json:"host_boot,omitempty"` // of the machine, when Phase became running
	Token      string       `json:"token,omitempty"`     // of the guest agent
	Agent      string       `json:"agent,omitempty"`     // digest of the agent layer that runs or was saved
	Save       int64        `json:"save,omitempty"`      // generation of the committed save
	Degraded   bool         `json:"degraded,omitempty"`  // the last save of what runs failed
	Silent     bool         `json:"silent,omitempty"`    // the agent inside does not answer
	Stalled    bool         `json:"stalled,omitempty"`   // the host's storage does not answer
	Full       bool         `json:"full,omitempty"`      // held, as the pool is full
	OOMKills   uint64       `json:"oom_kills,omitempty"` // those of the present boot that were reported
	OOMBoot    int64        `json:"oom_boot,omitempty"`  // the generation that they are of
	Cleaned    int64        `json:"cleaned,omitempty"`   // generation whose processes a clean-up has removed, 0 for none

	Timers *sandbox.Timers `json:"timers,omitempty"` // nil: made by a hutch without timers, or nothing yet
	Policy int64           `json:"policy,omitempty"` // the last change of the policy in Timers
	Leases sandbox.Leases  `json:"leases,omitzero"`  // the harness turns that are active
	Missed *asleep         `json:"missed,omitempty"` // the last sleep, until it is told what that missed

	Job  *jobRecord         `json:"job,omitempty"`
	Next *hostproto.Command `json:"next,omitempty"` // waits until Job has ended

	Seq     int64              `json:"seq"`
	Event   int64              `json:"event,omitempty"` // number of the last report with an event
	Unacked []hostproto.Report `json:"unacked,omitempty"`
	Ended   []hostproto.Report `json:"ended,omitempty"` // of the last operations, to answer repeats
}

// jobRecord is the operation at work.
type jobRecord struct {
	Command   hostproto.Command `json:"command"`
	Capture   *captureRef       `json:"capture,omitempty"`   // of a child of a fork: what it starts from
	Committed bool              `json:"committed,omitempty"` // past the point of no return
	Attempt   int               `json:"attempt"`
	Cancelled bool              `json:"cancelled,omitempty"`

	// What a boot in this operation gets, fixed before it begins so that nothing runs
	// that the journal does not know.
	Generation int64  `json:"generation"`
	Token      string `json:"token"`

	Began time.Time        `json:"began,omitzero"` // when it was taken in, in host time
	Auto  *sandbox.Verdict `json:"auto,omitempty"` // of what the host's timers asked for

	Event sandbox.Event `json:"event,omitempty"` // of settle: what happened
	Why   string        `json:"why,omitempty"`
	Until time.Time     `json:"until,omitzero"` // the last instant at which it is known to have run; zero is the end's own
}

// captureRef is what a fork's child starts from.
type captureRef struct {
	ID     string `json:"id"`     // the fork operation
	Memory bool   `json:"memory"` // of a live fork
	Token  string `json:"token,omitempty"`
	Agent  string `json:"agent,omitempty"`
}

// endedKept is how many ended operations a record remembers.
const endedKept = 8

// journal is the append-only file of one sandbox. Only its owner goroutine uses it.
type journal struct {
	path string
	file *os.File
	size int64
	last []byte // the line of the last record, nil for none
	// point is points.journal of this sandbox.
	point func(r *record, do func() error) error
}

// tempMark ends the name of a journal that is being rewritten.
const tempMark = ".tmp"

// compactAt is the size at which a journal is rewritten with its last record only.
const compactAt = 256 << 10

var crcTable = crc32.MakeTable(crc32.Castagnoli)

func journalPath(dir, id string) string { return filepath.Join(dir, id+".journal") }

// journalIDs lists the sandboxes that have a journal in dir.
func journalIDs(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, e := range entries {
		if id, ok := strings.CutSuffix(e.Name(), ".journal"); ok {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids, nil
}

// openJournal opens or makes the journal of a sandbox and reads its last whole
// record. A torn last line, which a power cut leaves, is as if it was never written.
func openJournal(dir, id string) (*journal, *record, error) {
	path := journalPath(dir, id)
	data, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		return nil, nil, err
	}
	last, whole := lastRecord(data)
	fresh := data == nil
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, nil, err
	}
	j := &journal{path: path, file: f, size: whole, point: func(_ *record, do func() error) error { return do() }}
	if last != nil {
		j.last = bytes.Clone(data[bytes.LastIndexByte(data[:whole-1], '\n')+1 : whole])
	}
	if err := f.Truncate(whole); err != nil {
		_ = f.Close()
		return nil, nil, err
	}
	if _, err := f.Seek(whole, 0); err != nil {
		_ = f.Close()
		return nil, nil, err
	}
	if fresh {
		if err := syncDir(dir); err != nil {
			_ = f.Close()
			return nil, nil, err
		}
	}
	return j, last, nil
}

// lastRecord finds the last line whose checksum holds, and where it ends. What lies
// behind the first bad line is not believed.
func lastRecord(data []byte) (*record, int64) {
	var last *record
	var end int64
	scan := bufio.NewScanner(bytes.NewReader(data))
	scan.Buffer(make([]byte, 0, 64<<10), 64<<20)
	for scan.Scan() {
		line := scan.Bytes()
		if int(end)+len(line) >= len(data) || len(line) < 9 { // no newline behind it
			break
		}
		var sum uint32
		if _, err := fmt.Sscanf(string(line[:8]), "%08x", &sum); err != nil || crc32.Checksum(line[9:], crcTable) != sum {
			break
		}
		var r record
		if err := json.Unmarshal(line[9:], &r); err != nil {
			break
		}
		last = &r
		end += int64(len(line)) + 1
	}
	return last, end
}

func encodeRecord(r *record) ([]byte, error) {
	body, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, "%08x %s\n", crc32.Checksum(body, crcTable), body), nil
}

// write appends the record and makes it durable. When it fails the record before it
// is the last one still: whoever reads the journal after that believes what the
// owner believes.
func (j *journal) write(r *record) error {
	return j.point(r, func() error { return j.append(r) })
}

func (j *journal) append(r *record) error {
	line, err := encodeRecord(r)
	if err != nil {
		return err
	}
	if j.size+int64(len(line)) > compactAt && j.size > int64(len(j.last)) {
		if err := j.compact(); err != nil {
			return err
		}
	}
	_, err = j.file.Write(line)
	if err == nil {
		err = j.file.Sync()
	}
	if err != nil {
		// A part of the line may be there, or all of it where only the sync failed.
		_ = j.file.Truncate(j.size)
		_, _ = j.file.Seek(j.size, 0)
		return err
	}
	j.size += int64(len(line))
	j.last = line
	return nil
}

// compact puts a file with the last record only in the journal's place.
func (j *journal) compact() error {
	f, err := os.OpenFile(j.path+tempMark, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if _, err = f.Write(j.last); err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = os.Rename(j.path+tempMark, j.path)
	}
	if err != nil {
		_ = f.Close()
		return err
	}
	_ = j.file.Close()
	j.file, j.size = f, int64(len(j.last)) // also where the next line fails: the old file has no name any more
	return syncDir(filepath.Dir(j.path))
}

func (j *journal) close() error { return j.file.Close() }

func (j *journal) remove() error {
	return j.point(nil, func() error {
		_ = j.file.Close()
		for _, path := range []string{j.path + tempMark, j.path} {
			if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
				return err
			}
		}
		return syncDir(filepath.Dir(j.path))
	})
}

// openJournal opens a sandbox's journal with its fault point.
func (a *Agent) openJournal(id string) (*journal, *record, error) {
	j, r, err := openJournal(a.cfg.Dir, id)
	if err == nil && a.cfg.points.journal != nil {
		j.point = func(r *record, do func() error) error { return a.cfg.points.journal(id, r, do) }
	}
	return j, r, err
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
