package main

import (
	"fmt"
	"strings"
)

// document writes the figures as docs/benchmarks.md has them.
func document(rounds int, m machine, f facts, r *results) string {
	var out strings.Builder
	p := func(format string, args ...any) { fmt.Fprintf(&out, format+"\n", args...) }
	p("# Benchmarks")
	p("")
	p("What the steps of a sandbox's life take through hutch's API, and what the same runtime takes alone: `hutch-runsc`")
	p("with a bundle made by hand, on an overlay on the same template image, without network (`--platform=systrap")
	p("--network=none --ignore-cgroups --overlay2=none`). Both were measured in turn in the same run. The ratio is")
	p("hutch's median to the bare one's: what hutch adds for the disk, the network, the guest agent, the API and what it")
	p("writes down durably. `make bench` makes this table anew; `go run ./tools/bench -o docs/benchmarks.md` also this page.")
	p("")
	p("- %s; %d cores, %s, %.1f GiB of memory", m.started.Format("2006-01-02 15:04 MST"), m.cores, m.cpu, float64(m.memory)/(1<<30))
	p("- %s, kernel %s; load average %s at the start, %s at the end", m.system, m.kernel, m.load, f.loadEnd)
	p("- %s; sandboxes of %d CPU, %.1f GiB of memory, %.1f GB of disk; the pool is a file on the machine's disk", f.runsc, f.like.CPUs, float64(f.like.MemoryBytes)/(1<<30), float64(f.like.DiskBytes)/1e9)
	p("- %d rounds after one that does not count; %d exec round trips a round", rounds, execsPerRound)
	if rounds < leastRounds {
		p("")
		p("**Fewer than %d rounds: this was a trial of the program, its figures mean little.**", leastRounds)
	}
	p("")
	p("| what | hutch median | min | p90 | bare median | ratio | aim |")
	p("|---|---:|---:|---:|---:|---:|---|")
	for id, row := range rows {
		h, b := r[id].hutch, r[id].bare
		p("| %s | %s | %s | %s | %s | %s | %s |", row.what, row.unit.cell(h.median()), row.unit.cell(h.min()), row.unit.cell(h.p90()),
			row.unit.cell(b.median()), ratio(h.median(), b.median()), aims[rowID(id)].cell(row.unit, h.median(), h.median()/b.median()))
	}
	p("")
	p("## What is measured")
	p("")
	p("| row | hutch | bare runtime |")
	p("|---|---|---|")
	for _, row := range rows {
		bare := row.bare
		if bare == "" {
			bare = "–"
		}
		p("| %s | %s | %s |", row.what, row.hutch, bare)
	}
	p("")
	p("Caches are warm on both sides: a wake reads its image from memory. The bare runtime has no limit on CPUs from a")
	p("control group, and writes its images to the machine's own file system without fsync. The disks that are cloned")
	p("are allocated whole and have %v extents; a clone's cost follows their number, not the size.", f.extents)
	return out.String()
}
