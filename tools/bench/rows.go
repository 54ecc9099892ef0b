package main

import (
	"fmt"
	"time"
)

// rowID names a row of the table; the table has them in this order.
type rowID int

const (
	rowCreate rowID = iota
	rowCreateExec
	rowExec
	rowExecProcess
	rowSleep
	rowWake
	rowFork
	rowStop
	rowResume
	rowSleep64
	rowWake64
	rowWake64Cold
	rowSleep1024
	rowWake1024
	rowWake1024Cold
	rowForkPause
	rowForkTen
	rowClone10
	rowClone2000
	rowClone20000
	rowFsync
	rowGitAdd
	rowPodman
	rowCreateHundred
	rowCreateTen
	rowIdleOwn
	rowIdlePSS
	rowIdleRSS
	rowIdleCgroup
	rowIdleCPU
	rowCrowdOwn
	rowCrowdPSS
	rowCrowdCPU
	rowCount
)

// row is what the document says of a row.
type row struct {
	what        string
	unit        unit
	hutch, bare string // what is measured on either side; bare is empty for nothing
}

// aim is what a row should be at most: a ratio to the bare runtime's median, or a median
// in the row's own unit. Zero is no aim.
type aim struct{ ratio, median float64 }

var aims = map[rowID]aim{
	rowCreateExec: {ratio: 1.5},
	rowExec:       {median: 10},
	rowWake:       {ratio: 1.3},
	rowWake64:     {ratio: 1.3},
	rowWake64Cold: {ratio: 1.3},
	rowWake1024:   {ratio: 1.3},
	rowForkPause:  {ratio: 1.2},
	rowClone10:    {median: 50},
	rowClone2000:  {median: 50},
	rowIdleOwn:    {median: 45},
	rowIdleCPU:    {median: 0.2},
	rowCrowdOwn:   {median: 45},
	rowCrowdCPU:   {median: 0.2},
}

// cell says what the aim is and whether it was met.
func (a aim) cell(u unit, median, ratio float64) string {
	var text string
	var met bool
	switch {
	case a.ratio > 0:
		text, met = fmt.Sprintf("× %g", a.ratio), ratio <= a.ratio
	case a.median > 0:
		text, met = fmt.Sprintf("%g %s", a.median, u), median <= a.median
	default:
		return ""
	}
	if met {
		return "≤ " + text
	}
	return "≤ " + text + ", **missed**"
}

var rows = [rowCount]row{
	rowCreate: {"create to first exec reply", milliseconds,
		"`POST sandboxes?wait`, then `POST commands?follow=true` of `true` to its exit: a disk, a network, the guest agent",
		"`runsc run --detach` to the first line that PID 1 (`sh -c 'echo up; …'`) writes into a pipe"},
	rowCreateExec: {"create to first exec reply, beside a bare exec", milliseconds,
		"the row above",
		"the row above and one `runsc exec ID true`"},
	rowExec: {"exec round trip", milliseconds,
		"`POST commands?follow=true` of `true` to its exit, on an open connection",
		"`runsc exec ID true`, a process on the host"},
	rowExecProcess: {"exec round trip of the command line", milliseconds,
		"`hutch exec NAME -- true`, a process on the host",
		"`runsc exec ID true`"},
	rowSleep: {"sleep", milliseconds,
		"`POST sleep?wait`: memory, a clone of the disk, digests, fsync, commit, end",
		"`runsc pause`, `runsc checkpoint --leave-running --compression=none`, `kill -9`, `runsc delete`: no disk, no digest, no fsync"},
	rowWake: {"wake to first exec reply", milliseconds,
		"`POST wake?wait`, then an exec of `true`: digests checked, disk mounted, identity and clock set",
		"`runsc restore --detach --background` to the next line of PID 1, a Perl loop that writes one every 5 ms"},
	rowFork: {"live fork to the fork's first exec reply", milliseconds,
		"`POST fork?wait`, then an exec of `true` in the fork",
		"`runsc checkpoint --leave-running` and `runsc restore` of a second sandbox to PID 1's next line, on the same tree: no disk is copied"},
	rowStop: {"stop", milliseconds,
		"`POST stop?wait`: programs end in order, file systems are synced and unmounted",
		"`kill -9`, `runsc delete`"},
	rowResume: {"resume to first exec reply", milliseconds,
		"`POST resume?wait`, then an exec of `true`",
		"`runsc run --detach` again on the same tree to PID 1's first line"},
	rowSleep64: {"sleep, 64 MiB in use", milliseconds,
		"as sleep, of a sandbox in which a program has written 64 MiB",
		"as sleep, of a Perl program that has written 64 MiB"},
	rowWake64: {"wake to first exec reply, 64 MiB in use", milliseconds,
		"as wake",
		"as wake"},
	rowWake64Cold: {"the same, 64 MiB, from a cold page cache", milliseconds,
		"as wake, after /proc/sys/vm/drop_caches",
		"as wake, after /proc/sys/vm/drop_caches"},
	rowSleep1024: {"sleep, 1 GiB in use", milliseconds,
		"as sleep, of a sandbox in which a program has written 1 GiB",
		"as sleep, of a Perl program that has written 1 GiB"},
	rowWake1024: {"wake to first exec reply, 1 GiB in use", milliseconds,
		"as wake",
		"as wake"},
	rowWake1024Cold: {"the same, 1 GiB, from a cold page cache", milliseconds,
		"as wake, after /proc/sys/vm/drop_caches",
		"as wake, after /proc/sys/vm/drop_caches"},
	rowForkPause: {"pause of the source in a live fork", milliseconds,
		"the longest time in which a program in the source that looks at the clock all the time could not",
		"`runsc checkpoint --leave-running` as a whole"},
	rowForkTen: {"10 live forks at once", milliseconds,
		"`POST fork?wait` with a count of 10, to the last one's readiness",
		""},
	rowClone10: {"clone of an 8 GB disk, 10 extents", milliseconds,
		"the one system call (ioctl FICLONE), made by this program on a file of its own in the pool; not through the API",
		""},
	rowClone2000: {"clone of an 8 GB disk, 2,000 extents", milliseconds,
		"the same",
		""},
	rowClone20000: {"clone of an 8 GB disk, 20,000 extents", milliseconds,
		"the same",
		""},
	rowFsync: {"write of 4 KiB and fsync", milliseconds,
		"mean of 100 in a program in a sandbox, in /workspace",
		"no bare runtime: the same program on the machine itself, on the disk that has the pool's file"},
	rowGitAdd: {"git add of 600 files", milliseconds,
		"in a sandbox, in /workspace",
		"no bare runtime: on the machine itself, on the disk that has the pool's file"},
	rowPodman: {"podman run of true on the same root", milliseconds,
		"",
		"no bare runtime: `podman run --rm --network=none --rootfs ROOT true`, where podman is installed"},
	rowCreateHundred: {"create, 100 one after the other", milliseconds,
		"`POST sandboxes?wait`, each; all of them go on running",
		""},
	rowCreateTen: {"create, 10 at a time", milliseconds,
		"ten calls of `POST sandboxes?wait` at once, to the last answer; ten times, all go on running",
		""},
	rowIdleOwn: {"idle sandbox: memory without files (PSS)", mebibytes,
		"anonymous and shared memory of all of its processes on the host; pages that are shared count in parts",
		"the same, PID 1 is `sleep infinity`"},
	rowIdlePSS: {"idle sandbox: memory, PSS", mebibytes,
		"the row above with mapped files, as the runtime's binary and the guest's programs, which sandboxes on a machine share",
		"the same"},
	rowIdleRSS: {"idle sandbox: memory, RSS", mebibytes,
		"sum of all of its processes; pages that they share count several times",
		"the same"},
	rowIdleCgroup: {"idle sandbox: memory, control group", mebibytes,
		"anonymous and shared memory that its control group is charged with, without page cache",
		""},
	rowIdleCPU: {"idle sandbox: CPU of one core", percent,
		"time on a CPU of all its threads in 10 s, from 3 s after its last exec",
		"the same 10 s"},
	rowCrowdOwn: {"one of 50 idle sandboxes: memory without files (PSS)", mebibytes,
		"as above, of 50 sandboxes that run on the machine and were only created", ""},
	rowCrowdPSS: {"one of 50 idle sandboxes: memory, PSS", mebibytes,
		"the same", ""},
	rowCrowdCPU: {"one of 50 idle sandboxes: CPU of one core", percent,
		"the same, over 10 s", ""},
}

// results hold a series a row and side.
type results [rowCount]struct{ hutch, bare series }

// side chooses one of a row's two series.
type side func(r *results, row rowID) *series

func hutchSide(r *results, row rowID) *series { return &r[row].hutch }
func bareSide(r *results, row rowID) *series  { return &r[row].bare }

// time measures what do takes, and adds it to the rows. A call that fails is no
// measurement.
func (r *results) time(on side, do func() error, into ...rowID) error {
	begin := time.Now()
	err := do()
	took := time.Since(begin)
	if err != nil {
		return fmt.Errorf("%s: %w", rows[into[0]].what, err)
	}
	for _, row := range into {
		r.add(on, row, inMilliseconds(took))
	}
	return nil
}

func (r *results) add(on side, row rowID, v float64) {
	s := on(r, row)
	*s = append(*s, v)
}

func inMilliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func inMebibytes(bytes int64) float64 { return float64(bytes) / (1 << 20) }
