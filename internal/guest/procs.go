package guest

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/hutchrun/hutch/internal/guestproto"
)

// process is one line of the process table.
type process struct {
	pid, parent    int
	group, session int
	comm           string
	state          byte  // as in /proc/PID/stat: Z is a zombie
	ticks          int64 // CPU time of it and of the children it has collected, in 1/100 s
}

// parseStat reads /proc/PID/stat (proc(5)). comm is in parentheses and may hold any
// byte, parentheses too: the last one ends it.
func parseStat(text []byte) (process, error) {
	errForm := errors.New("not of the form of /proc/PID/stat")
	open, shut := bytes.IndexByte(text, '('), bytes.LastIndexByte(text, ')')
	if open < 1 || shut < open {
		return process{}, errForm
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text[:open])))
	f := strings.Fields(string(text[shut+1:]))
	if err != nil || len(f) < 15 {
		return process{}, errForm
	}
	number := func(i int) int64 {
		n, err := strconv.ParseInt(f[i], 10, 64)
		if err != nil {
			return 0
		}
		return n
	}
	return process{
		pid: pid, parent: int(number(1)), group: int(number(2)), session: int(number(3)),
		comm: string(text[open+1 : shut]), state: f[0][0],
		ticks: number(11) + number(12) + number(13) + number(14),
	}, nil
}

// readProcesses lists the processes of a mounted proc file system, by pid. Ones that
// end meanwhile are left out.
func readProcesses(proc string) []process {
	dir, err := os.Open(proc)
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	var out []process
	for _, name := range names {
		if name[0] < '0' || name[0] > '9' {
			continue
		}
		text, err := os.ReadFile(filepath.Join(proc, name, "stat"))
		if err != nil {
			continue
		}
		if p, err := parseStat(text); err == nil {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b process) int { return a.pid - b.pid })
	return out
}

// processes lists the sandbox's processes but for PID 1 and zombies; without Init,
// those of the sessions of the commands that run.
func (g *Guest) processes() []process {
	sessions := map[int]bool{}
	if !g.cfg.Init {
		for _, c := range g.commands.live() {
			sessions[c.pid] = true
		}
	}
	return slices.DeleteFunc(readProcesses("/proc"), func(p process) bool {
		return p.state == 'Z' || p.pid == os.Getpid() || (!g.cfg.Init && !sessions[p.session])
	})
}

// describe gives processes their users' names.
func (g *Guest) describe(list []process) []*guestproto.Process {
	users := g.accounts()
	var out []*guestproto.Process
	for _, p := range list {
		d := &guestproto.Process{Pid: int32(p.pid), ParentPid: int32(p.parent), Comm: clipText(p.comm)}
		if info, err := os.Stat("/proc/" + strconv.Itoa(p.pid)); err == nil {
			if st, ok := info.Sys().(*syscall.Stat_t); ok {
				d.User = account{name: users.userName(st.Uid), uid: st.Uid}.label()
			}
		}
		out = append(out, d)
	}
	return out
}
