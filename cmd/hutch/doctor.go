package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/cli"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime/gvisor"
)

// finding is one line of the doctor's report.
type finding struct {
	Check  string `json:"check"`
	Status string `json:"status"` // ok, warning, missing
	Detail string `json:"detail"`
	Do     string `json:"do,omitempty"` // what to do about it
}

const (
	statusOK      = "ok"
	statusWarning = "warning"
	statusMissing = "missing"
)

func doctorCommand(env cli.Env) *cobra.Command {
	var (
		at            place
		erase         []string
		asJSON, clean bool
		yes           bool
	)
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what is missing on this machine and what is left that nobody owns",
		Long: "Say what this machine lacks for running sandboxes, what to do about it, and which runtimes really work: each is tried. " +
			"Then list what the installation in --data has left that nobody owns: processes, mounts, loop devices, namespaces, interfaces, network rules, control groups, half-made files.\n\n" +
			"With --clean, remove it. Beside a server, all that its journals know is left alone. " +
			"Where no server runs, sandboxes that go on without one end as by a power cut, which is asked about first (where there is no terminal to ask on, --yes is needed); " +
			"disks, saved memory and the database stay, and the next `hutch up` goes on from them. " +
			"A whole disk that no journal knows is removed only with --erase and its sandbox's id. Another installation's things are never touched.",
		Example: "hutch doctor\nhutch doctor --json\nhutch doctor --clean --yes --data /srv/hutch\nhutch doctor --clean --erase sbx_4x2mbq0t7d",
		GroupID: "server",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, _, err := at.find(cmd, env)
			if err != nil {
				return err
			}
			if len(erase) > 0 && !clean {
				return fault.New(fault.InvalidArgument, "--erase goes with --clean")
			}
			if yes && !clean {
				return fault.New(fault.InvalidArgument, "--yes goes with --clean")
			}
			if clean {
				return cleanUp(cmd.Context(), env, l, cleaning{erase: erase, yes: yes, asJSON: asJSON})
			}
			return diagnose(cmd.Context(), l).report(env.Stdout, asJSON)
		},
	}
	at.flags(cmd)
	cmd.Flags().BoolVar(&clean, "clean", false, "remove what nobody owns")
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "with --clean: do not ask before sandboxes that run are ended")
	cmd.Flags().StringSliceVar(&erase, "erase", nil, "with --clean: also the disk and the saves of this sandbox, which no journal knows")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	return cmd
}

// diagnosis is all that the doctor finds.
type diagnosis struct {
	Checks    []finding `json:"checks"`
	Healthy   bool      `json:"healthy"`   // nothing is missing
	Orphans   []orphan  `json:"orphans"`   // what nobody owns
	Sandboxes []string  `json:"sandboxes"` // that go on without a server
}

// report prints the findings; what is missing makes the command fail. An orphan is a
// warning: it takes up room and harms nothing.
func (d diagnosis) report(out io.Writer, asJSON bool) error {
	missing := 0
	for _, f := range d.Checks {
		if f.Status == statusMissing {
			missing++
		}
	}
	if d.Healthy = missing == 0; asJSON {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		if err := enc.Encode(d); err != nil {
			return err
		}
	} else {
		for _, f := range d.Checks {
			fmt.Fprintf(out, "%-8s %-16s %s\n", f.Status, f.Check, f.Detail)
			if f.Do != "" {
				fmt.Fprintf(out, "%-8s %-16s → %s\n", "", "", f.Do)
			}
		}
		for _, o := range d.Orphans {
			fmt.Fprintf(out, "%-8s %-16s %s\n", "orphan", o.Kind, o.Name)
			if o.Kept != "" {
				fmt.Fprintf(out, "%-8s %-16s → %s\n", "", "", o.Kept)
			}
		}
	}
	if missing > 0 {
		return fault.New(fault.FailedPrecondition, "%d of %d checks found something missing; do what the lines say", missing, len(d.Checks))
	}
	return nil
}

func diagnose(ctx context.Context, l layout) diagnosis {
	d := diagnosis{Checks: []finding{checkRoot()}, Orphans: []orphan{}, Sandboxes: []string{}}
	for _, tool := range []struct{ name, pkg string }{
		{"mkfs.xfs", "xfsprogs"}, {"mke2fs", "e2fsprogs"}, {"mkfs.erofs", "erofs-utils"}, {"mmdebstrap", "mmdebstrap"},
	} {
		d.Checks = append(d.Checks, checkTool(tool.name, tool.pkg))
	}
	d.Checks = append(d.Checks, checkFilesystems()...)
	d.Checks = append(d.Checks, checkGVisor(ctx, l), checkKVM(), checkSpace(l))
	orphans, waiting, err := findOrphans(ctx, l)
	d.Orphans, d.Sandboxes = append(d.Orphans, orphans...), append(d.Sandboxes, waiting...)
	d.Checks = append(d.Checks, checkServer(l, waiting), checkOrphans(l, orphans, err))
	return d
}

// findOrphans looks at the installation as it is.
func findOrphans(ctx context.Context, l layout) ([]orphan, []string, error) {
	if os.Geteuid() != 0 {
		return nil, nil, fault.New(fault.PermissionDenied, "only root sees what is left; use `sudo hutch doctor`")
	}
	live, err := l.live()
	if err != nil {
		return nil, nil, err
	}
	s, err := newSurvey(l, live)
	if err != nil {
		return nil, nil, err
	}
	defer s.close()
	return s.orphans(ctx)
}

func checkRoot() finding {
	if os.Geteuid() != 0 {
		return finding{"root", statusMissing, "not root", "run hutch as root: sudo hutch doctor"}
	}
	return finding{"root", statusOK, "running as root", ""}
}

func checkTool(name, pkg string) finding {
	path, err := exec.LookPath(name)
	if err != nil {
		return finding{name, statusMissing, "not installed", "apt-get install " + pkg}
	}
	return finding{name, statusOK, path, ""}
}

func checkFilesystems() []finding {
	data, _ := os.ReadFile("/proc/filesystems")
	known := strings.Fields(string(data))
	has := func(name string) bool {
		for _, k := range known {
			if k == name {
				return true
			}
		}
		return exec.Command("modprobe", "-q", name).Run() == nil
	}
	var out []finding
	for _, fs := range []string{"overlay", "xfs", "ext4"} {
		if has(fs) {
			out = append(out, finding{fs, statusOK, "the kernel has it", ""})
		} else {
			out = append(out, finding{fs, statusMissing, "the kernel does not have it", "use a kernel with " + fs})
		}
	}
	if has("erofs") {
		out = append(out, finding{"erofs", statusOK, "the kernel has it", ""})
	} else {
		out = append(out, finding{"erofs", statusWarning, "the kernel does not have it", "templates are kept as ext4 images, which is somewhat larger"})
	}
	return out
}

// checkGVisor boots a sandbox for real.
func checkGVisor(ctx context.Context, l layout) finding {
	runsc, err := findBinary("hutch-runsc")
	if err != nil {
		return finding{"gvisor", statusMissing, fault.Of(err).Message, ""}
	}
	driver := gvisor.New(gvisor.Config{Runsc: runsc, CgroupParent: l.probeCgroup()})
	defer driver.RemoveGroup()
	defer driver.Close()
	if err := gvisor.BecomeSubreaper(); err != nil {
		return finding{"gvisor", statusMissing, err.Error(), ""}
	}
	begin := time.Now()
	caps, err := driver.Probe(ctx)
	if err != nil {
		return finding{"gvisor", statusMissing, "does not work: " + fault.Of(err).Message, ""}
	}
	return finding{"gvisor", statusOK, fmt.Sprintf("works (%s; a sandbox booted in %s)", caps.Version, time.Since(begin).Round(time.Millisecond)), ""}
}

// checkKVM tells what to expect of microVMs; no runtime of this version needs them.
func checkKVM() finding {
	if _, err := os.Stat("/dev/kvm"); err != nil {
		return finding{"kvm", statusWarning, "no /dev/kvm: sandboxes run on gvisor, which needs none", ""}
	}
	return finding{"kvm", statusOK, "/dev/kvm is there; sandboxes run on gvisor, which needs none", ""}
}

func checkSpace(l layout) finding {
	var st unix.Statfs_t
	dir := l.data
	for unix.Statfs(dir, &st) != nil {
		if dir == "/" {
			return finding{"space", statusWarning, "the free space cannot be read", ""}
		}
		dir = filepath.Dir(dir)
	}
	free := int64(st.Bavail) * st.Frsize
	f := finding{"space", statusOK, fmt.Sprintf("%s has %.1f GB free", dir, float64(free)/1e9), ""}
	if _, err := os.Stat(l.poolFile()); err == nil {
		f.Detail += "; the pool lies in a file, a partition of its own (XFS with reflink, or btrfs) is faster"
	}
	if free < 5e9 {
		f.Status, f.Do = statusWarning, "free some space: templates and sandboxes need about 5 GB to begin with"
	}
	return f
}

// checkServer says whether a server runs, and what goes on without one.
func checkServer(l layout, waiting []string) finding {
	live, err := l.live()
	switch {
	case err != nil:
		return finding{"server", statusWarning, "the state of " + l.data + " cannot be read: " + err.Error(), ""}
	case live:
		info, _ := l.readServer()
		return finding{"server", statusOK, fmt.Sprintf("runs at %s (pid %d) on %s", info.URL, info.PID, l.data), ""}
	case len(waiting) == 0:
		return finding{"server", statusOK, "none runs on " + l.data + ", and no sandbox", ""}
	}
	count, them, run := howMany(waiting)
	return finding{"server", statusWarning, fmt.Sprintf("none runs on %s; %s still %s without a server: %s", l.data, count, run, strings.Join(waiting, ", ")),
		"`hutch up" + l.dataFlag() + "` takes " + them + " over"}
}

// howMany says how many sandboxes there are, and how to speak of them.
func howMany(ids []string) (count, them, run string) {
	if len(ids) == 1 {
		return "1 sandbox", "it", "runs"
	}
	return fmt.Sprintf("%d sandboxes", len(ids)), "them", "run"
}

// checkOrphans says how much is there that nobody owns.
func checkOrphans(l layout, orphans []orphan, err error) finding {
	switch {
	case err != nil:
		return finding{"orphans", statusWarning, "what is left cannot be looked for: " + fault.Of(err).Message, ""}
	case len(orphans) == 0:
		return finding{"orphans", statusOK, "nothing is left that nobody owns", ""}
	}
	return finding{"orphans", statusWarning, fmt.Sprintf("%d things of %s are left that nobody owns", len(orphans), l.data),
		"hutch doctor --clean --data " + l.data + " removes them"}
}
