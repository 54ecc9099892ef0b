package disk

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// Use says what space is taken for, and so how much of it may be taken.
type Use int

const (
	// ForNew is what need not exist: a new sandbox, a fork, a snapshot. It is refused
	// below 10 % free.
	ForNew Use = iota
	// ForKept is what exists already and has to go on: a wake, a resume, a recovery.
	ForKept
)

// Usage is the state of the pool, in bytes.
type Usage struct {
	Total    int64
	Free     int64 // what may still be written; the reserve is not part of it
	Reserved int64 // held for saves now
	LowMark  int64 // below so many free, new disks and forks are refused
	StopMark int64 // below so many free, sandboxes that write have to wait
	Low      bool  // Free is below LowMark
	File     bool  // the pool lies in a file; a partition of its own would be better
}

// Usage reads how full the pool is.
func (p *Pool) Usage(ctx context.Context) (Usage, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(p.dir, &st); err != nil {
		return Usage{}, wrap(err, "the pool's free space could not be read")
	}
	u := Usage{
		Total:    int64(st.Blocks) * st.Frsize,
		Free:     int64(st.Bavail) * st.Frsize,
		Reserved: fileSize(p.reserveFile()),
		File:     exists(p.poolFile()),
	}
	u.LowMark, u.StopMark = u.Total/100*lowWater, u.Total/100*stopWater
	u.Low = u.Free < u.LowMark
	return u, nil
}

// Headroom is what sandboxes may still write, in bytes.
type Headroom struct {
	Left  int64 // below 0 all that write have to wait: a write that finds no space damages its disk
	Clear int64 // once so much is left they may go on; more than 0, so that they do not flap
}

// Headroom says how far the pool is from the mark at which writers have to wait. What
// was written and is not on disk yet is not in it: the file systems of disks hold that
// in memory.
func (p *Pool) Headroom(ctx context.Context) (Headroom, error) {
	u, err := p.Usage(ctx)
	if err != nil {
		return Headroom{}, err
	}
	return Headroom{Left: u.Free - u.StopMark, Clear: u.Total / 100}, nil
}

// room refuses what should not take space now.
func (p *Pool) room(ctx context.Context, use Use) error {
	if use == ForKept {
		return nil
	}
	u, err := p.Usage(ctx)
	if err != nil {
		return err
	}
	if u.Low {
		return fault.New(fault.NoCapacity, "nothing new can be made: this host's disk pool has %s of %s free and keeps %d %% for what exists; "+
			"`hutch df` shows what takes the space: delete sandboxes, or make the pool larger", size(u.Free), size(u.Total), lowWater).Because("pool_full")
	}
	return nil
}

// size writes bytes for people, in units of 1000 as disks are sold in.
func size(n int64) string {
	if n < 1e9 {
		return strconv.FormatFloat(float64(n)/1e6, 'f', 0, 64) + " MB"
	}
	return strconv.FormatFloat(float64(n)/1e9, 'f', 1, 64) + " GB"
}

func (p *Pool) reserveFile() string { return p.path("reserve") }

// borrow makes room for a save, out of the reserve where the rest of the pool does
// not have it, and keeps others from taking that room until giveBack. A capture for
// new sandboxes gets nothing of the reserve. NoCapacity where there is not enough, or
// saved memory has its quota.
func (p *Pool) borrow(ctx context.Context, s *Staging, need int64, use Use) error {
	p.reserveMu.Lock()
	defer p.reserveMu.Unlock()
	u, err := p.Usage(ctx)
	if err != nil {
		return err
	}
	reserve := u.Reserved
	if use == ForNew {
		reserve = 0
	} else if err := p.withinQuota(u, need); err != nil {
		return err
	}
	// The file system needs some blocks for itself.
	need += need/64 + 4<<20
	free := u.Free - p.promised()
	if need > free+reserve {
		return fault.New(fault.NoCapacity, "a save of %s does not fit: this host's disk pool has %s free and %s in reserve; "+
			"`hutch df` shows what takes the space: delete sandboxes, or make the pool larger", size(need), size(max(free, 0)), size(u.Reserved)).Because("pool_full")
	}
	if need > free {
		keep := u.Reserved - (need - free)
		if err := os.Truncate(p.reserveFile(), keep-keep%blockSize); err != nil {
			return wrap(err, "the reserve for saves could not be used")
		}
	}
	if p.borrowed == nil {
		p.borrowed = map[*Staging]int64{}
	}
	p.borrowed[s] = need
	return nil
}

// withinQuota refuses a save of need bytes where saved memory would take more than its
// share of the pool.
func (p *Pool) withinQuota(u Usage, need int64) error {
	quota := p.memoryQuota(u)
	if have := p.savedMemory(); have+need > quota {
		return fault.New(fault.NoCapacity, "a save of %s does not fit: saved memory takes %s of this host's disk pool and may take %s; "+
			"`hutch df` shows whose it is: wake, stop or delete some that sleep", size(need), size(have), size(quota)).Because("memory_quota")
	}
	return nil
}

// memoryQuota is what saved memory may take of the pool.
func (p *Pool) memoryQuota(u Usage) int64 {
	if p.cfg.MemoryQuota > 0 {
		return p.cfg.MemoryQuota
	}
	return u.Total / 2
}

// savedMemory is what all memory images take, those that are being written included.
func (p *Pool) savedMemory() int64 {
	files, _ := filepath.Glob(p.path("saves", "*", "*", memName, "*")) // fails for a bad pattern only
	var sum int64
	for _, path := range files {
		sum += allocated(path)
	}
	return sum
}

// giveBack ends what borrow began.
func (p *Pool) giveBack(s *Staging) {
	p.reserveMu.Lock()
	delete(p.borrowed, s)
	p.reserveMu.Unlock()
	p.refill()
}

// promised is what the saves under way have still to write. The caller holds
// reserveMu.
func (p *Pool) promised() int64 {
	var sum int64
	for s, need := range p.borrowed {
		for _, name := range names(s.MemDir()) {
			need -= allocated(filepath.Join(s.MemDir(), name))
		}
		sum += max(need, 0)
	}
	return sum
}

// refill takes the reserve back to its size, out of what is free above the low-water
// mark only, so that it never takes the last space from what runs.
func (p *Pool) refill() {
	p.reserveMu.Lock()
	defer p.reserveMu.Unlock()
	u, err := p.Usage(context.Background())
	if err != nil {
		p.log.Warn("the reserve for saves could not be looked at", "step", "refill", "err", err)
		return
	}
	goal := p.cfg.Reserve
	if goal == 0 {
		goal = u.Total / 20
	}
	want := min(goal, u.Reserved+u.Free-p.promised()-u.LowMark)
	want -= want % blockSize
	if want <= u.Reserved {
		return
	}
	f, err := os.OpenFile(p.reserveFile(), os.O_RDWR|os.O_CREATE, 0o600)
	if err == nil {
		err = errors.Join(unix.Fallocate(int(f.Fd()), 0, 0, want), f.Close())
	}
	if err != nil {
		p.log.Warn("the reserve for saves could not be filled", "step", "refill", "err", err)
	}
}

// fileSize is 0 for a file that is not there.
func fileSize(path string) int64 {
	st, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return st.Size()
}

// allocated is what a file takes in the pool, 0 for one that is not there.
func allocated(path string) int64 {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return 0
	}
	return st.Blocks * statBlock
}

// statBlock is the unit of st_blocks, see stat(2).
const statBlock = 512
