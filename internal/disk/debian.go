package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

// DebianRecipe says what a Debian root file system is made of.
type DebianRecipe struct {
	// Suite is the release; empty is "bookworm".
	Suite string
	// Packages come on top of those that every sandbox has.
	Packages []string
	// Mirror is the address to take packages from. Empty takes what this host takes its
	// own from, see hostSources.
	Mirror string
}

// defaultSuite is what a recipe without a suite makes.
const defaultSuite = "bookworm"

// basePackages are in every Debian template, beside what apt itself needs.
var basePackages = []string{
	"bash", "ca-certificates", "coreutils", "curl", "git", "iproute2", "less", "procps", "python3", "sudo",
}

var (
	packageShape = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]+$`)
	suiteShape   = regexp.MustCompile(`^[a-z][a-z0-9-]*$`)
)

// BuildDebian makes a template of Debian packages with mmdebstrap. It takes a minute
// or two. Kinds: InvalidArgument (a name that is none), Unsupported (mmdebstrap or
// its parts are missing), NoCapacity, Unavailable (the packages cannot be had).
func (p *Pool) BuildDebian(ctx context.Context, recipe DebianRecipe, progress Progress) (Template, error) {
	if recipe.Suite == "" {
		recipe.Suite = defaultSuite
	}
	if !suiteShape.MatchString(recipe.Suite) {
		return Template{}, fault.New(fault.InvalidArgument, "%q is no Debian suite; name one like %q", recipe.Suite, defaultSuite)
	}
	for _, name := range recipe.Packages {
		if !packageShape.MatchString(name) {
			return Template{}, fault.New(fault.InvalidArgument, "%q is no Debian package; write package names as apt has them", name)
		}
	}
	if err := p.needTools(ctx, "mmdebstrap", "unshare"); err != nil {
		return Template{}, err
	}
	if err := p.room(ctx, ForNew); err != nil {
		return Template{}, err
	}
	w, err := p.begin("debian")
	if err != nil {
		return Template{}, err
	}
	defer p.end(w)
	tree := filepath.Join(w.path, "tree")
	progress.tell("packages", 0, 0)
	suite, err := p.bootstrap(ctx, w, recipe, tree, progress)
	if err != nil {
		return Template{}, err
	}
	progress.tell("files", 0, 0)
	account, err := finishDebian(tree)
	if err != nil {
		return Template{}, wrap(err, "the Debian template could not be finished")
	}
	return p.finishTemplate(ctx, w, Template{
		Origin: "debian",
		Ref:    suite,
		Config: ImageConfig{
			Env:     []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"},
			WorkDir: "/" + workspaceDir,
			User:    account.Name,
		},
		Account: account,
	}, progress)
}

// bootstrap runs mmdebstrap and gives the suite that it made.
//
// It runs in namespaces of its own: when it is killed, or this process is, the kernel
// kills everything in the process namespace and drops the mounts. Its mount namespace
// follows ours (slave), so that it holds no disk that is unmounted meanwhile.
func (p *Pool) bootstrap(ctx context.Context, w *work, recipe DebianRecipe, tree string, progress Progress) (string, error) {
	args, suite, err := p.bootstrapArgs(ctx, w, recipe, tree)
	if err != nil {
		return "", err
	}
	program, err := p.find("mmdebstrap")
	if err != nil {
		return "", err
	}
	cmd, err := p.command(ctx, "unshare", append([]string{
		"--mount", "--propagation", "slave", "--pid", "--fork", "--kill-child=SIGKILL", "--", program}, args...)...)
	if err != nil {
		return "", err
	}
	temp := filepath.Join(w.path, "tmp")
	if err := os.Mkdir(temp, 0o755); err != nil {
		return "", wrap(err, "the Debian template could not be begun")
	}
	cmd.Env = append(cmd.Env, "TMPDIR="+temp)
	cmd.Env = append(cmd.Env, p.proxies(ctx)...)
	err = finish(ctx, cmd, func(line string) {
		// It says what it begins: "I: installing essential packages...".
		if what, ok := strings.CutPrefix(line, "I: "); ok {
			progress.tell("packages: "+strings.TrimRight(what, "."), 0, 0)
		}
	})
	if err == nil || ctx.Err() != nil {
		return suite, wrap(err, "the Debian template could not be made")
	}
	if full := p.room(ctx, ForNew); full != nil {
		return "", full
	}
	return "", fault.Wrap(err, fault.Unavailable, "the packages of Debian %s could not be installed; check that this host's apt sources work and that every package exists, and try again", suite).After(time.Minute)
}

// bootstrapArgs decides where packages come from, in this order: the recipe's mirror;
// the host's own apt sources of that suite; mmdebstrap's own default where the host
// is not that Debian but has Debian's keys; else the host's own suite, as an Ubuntu
// host without those keys can make nothing else that it could check.
func (p *Pool) bootstrapArgs(ctx context.Context, w *work, recipe DebianRecipe, tree string) (args []string, suite string, err error) {
	packages := slices.Concat(basePackages, recipe.Packages)
	args = []string{"--mode=root", "--variant=apt", "--format=directory", "--dpkgopt=force-unsafe-io", "--include=" + strings.Join(packages, ",")}
	suite = recipe.Suite
	if recipe.Mirror != "" {
		return append(args, suite, tree, recipe.Mirror), suite, nil
	}
	sources := p.hostSources(ctx, suite)
	if sources == "" {
		if exists("/usr/share/keyrings/debian-archive-keyring.gpg") {
			return append(args, suite, tree), suite, nil
		}
		own := hostSuite()
		if sources = p.hostSources(ctx, own); sources == "" {
			return nil, "", fault.New(fault.Unsupported, "Debian %s cannot be had: this host has neither apt sources of it nor the package debian-archive-keyring; install that, or name a mirror", suite).Because("debian")
		}
		p.log.Warn("this host cannot check Debian's packages, its own suite is taken", "step", "template", "suite", own)
		suite = own
	}
	list := filepath.Join(w.path, "sources.list")
	if err := os.WriteFile(list, []byte(sources), 0o644); err != nil {
		return nil, "", wrap(err, "the Debian template could not be begun")
	}
	return append(args, suite, tree, list), suite, nil
}

// hostSources gives the host's apt sources for a suite, its updates and its security
// fixes, as lines of sources.list(5); "" where it has none. apt itself reads its
// configuration here. What a third party offers for the same suite has other names
// for its components or its origin and stays out.
func (p *Pool) hostSources(ctx context.Context, suite string) string {
	cmd, err := p.command(ctx, "apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)", "Created-By: Packages")
	if err != nil {
		return ""
	}
	out, err := cmd.Output()
	if err != nil {
		return ""
	}
	return sourceLines(string(out), suite)
}

// sourceLines picks the lines of a suite out of "URI SUITE COMPONENT ORIGIN" lines.
// The origin is empty until the host has fetched its package lists.
func sourceLines(targets, suite string) string {
	var lines []string
	for line := range strings.Lines(targets) {
		f := strings.Fields(line)
		if len(f) < 3 {
			continue
		}
		uri, release, component := f[0], f[1], f[2]
		base := release == suite
		ours := base || release == suite+"-updates" || release == suite+"-security"
		known := len(f) == 3 || f[3] == "Debian" || f[3] == "Ubuntu"
		free := component == "main" || component == "universe"
		if entry := fmt.Sprintf("deb %s %s %s", uri, release, component); ours && known && free && !slices.Contains(lines, entry) {
			lines = append(lines, entry)
		}
	}
	if !slices.ContainsFunc(lines, func(l string) bool { return strings.Contains(l, " "+suite+" ") }) {
		return "" // updates alone make no system
	}
	return strings.Join(lines, "\n") + "\n"
}

// hostSuite is the host's own release, see os-release(5).
func hostSuite() string {
	text, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "VERSION_CODENAME="); ok {
			return strings.Trim(v, `"'`)
		}
	}
	return ""
}

// proxies carries the host's proxy for apt over; apt takes it from the environment.
func (p *Pool) proxies(ctx context.Context) []string {
	var env []string
	for _, scheme := range []string{"http", "https"} {
		cmd, err := p.command(ctx, "apt-config", "dump", "--format", "%v", "Acquire::"+scheme+"::Proxy")
		if err != nil {
			return nil
		}
		value := os.Getenv(scheme + "_proxy")
		if out, err := cmd.Output(); err == nil && len(out) > 0 && string(out) != "DIRECT" {
			value = strings.TrimSpace(string(out))
		}
		if value != "" {
			env = append(env, scheme+"_proxy="+value)
		}
	}
	return env
}

// finishDebian takes out what only the build needed and adds what a sandbox needs.
func finishDebian(dir string) (Account, error) {
	// Nobody else has written this tree, but packages have; the same care costs nothing.
	root, err := os.OpenRoot(dir)
	if err != nil {
		return Account{}, err
	}
	defer root.Close()
	for _, name := range []string{"dev", "run", "tmp"} {
		if err := clearDir(root, name); err != nil {
			return Account{}, err
		}
	}
	// The host's, copied for the time of the build, and what dpkg was told for it: not
	// to sync each file, as the whole tree is synced or thrown away.
	for _, name := range []string{"etc/hostname", "etc/resolv.conf", "etc/dpkg/dpkg.cfg.d/99mmdebstrap"} {
		if err := root.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			return Account{}, err
		}
	}
	if err := root.WriteFile("etc/default/locale", []byte("LANG=C.UTF-8\n"), 0o644); err != nil {
		return Account{}, err
	}
	return prepareTree(dir, "", "")
}

// clearDir removes what a directory holds.
func clearDir(root *os.Root, name string) error {
	d, err := root.Open(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer d.Close()
	list, err := d.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, entry := range list {
		if err := root.RemoveAll(filepath.Join(name, entry)); err != nil {
			return err
		}
	}
	return nil
}
