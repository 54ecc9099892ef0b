package disk

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/hutchrun/hutch/internal/fault"
)

// GuestPath is where a guest finds its agent, PID 1.
const GuestPath = "/" + agentName + "/guest"

// mountPoints are the directories that a guest mounts over, with their modes. The
// agent layer has them, so that every template boots, even one with nothing in it.
var mountPoints = []struct {
	name string
	mode os.FileMode
}{
	{"dev", 0o755}, {"proc", 0o555}, {"run", 0o755}, {"sys", 0o555}, {"tmp", os.ModeSticky | 0o777},
}

// InstallAgent makes the agent layer of a guest binary and gives its digest. The same
// binary gives the same layer. A layer stays while sandboxes that booted with it run,
// so a new version lies beside the old one.
func (p *Pool) InstallAgent(ctx context.Context, binary string) (digest string, err error) {
	w, err := p.begin("agent")
	if err != nil {
		return "", err
	}
	defer p.end(w)
	layer := filepath.Join(w.path, "layer")
	digest, err = makeLayer(layer, binary)
	if err != nil {
		return "", wrap(err, "the guest agent %s could not be installed", binary)
	}
	if _, err := publish(layer, p.path("agents", digest)); err != nil {
		return "", wrap(err, "the guest agent %s could not be installed", binary)
	}
	return digest, nil
}

// DeleteAgent removes an agent layer. One that is not there is deleted already.
// FailedPrecondition while a mounted disk has it.
func (p *Pool) DeleteAgent(ctx context.Context, digest string) error {
	dir, err := p.agentDir(digest)
	if fault.Is(err, fault.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	table, err := mounts()
	if err != nil {
		return err
	}
	for _, m := range table {
		if strings.HasPrefix(m.option("lowerdir"), dir+":") {
			return fault.New(fault.FailedPrecondition, "the agent layer %s cannot be deleted: a sandbox runs on it at %s; stop that first", digest, m.Target).Because("in_use")
		}
	}
	return wrap(p.discard(dir), "the agent layer %s could not be deleted", digest)
}

// makeLayer builds the tree of an agent layer; its digest is that of the binary.
func makeLayer(layer, binary string) (digest string, err error) {
	// Modes are set apart from creation, which the umask takes bits from.
	mkdir := func(name string, mode os.FileMode) error {
		path := filepath.Join(layer, name)
		if err := os.Mkdir(path, 0o755); err != nil {
			return err
		}
		return os.Chmod(path, mode)
	}
	if err := mkdir("", 0o755); err != nil {
		return "", err
	}
	if err := mkdir(agentName, 0o755); err != nil {
		return "", err
	}
	for _, m := range mountPoints {
		if err := mkdir(m.name, m.mode); err != nil {
			return "", err
		}
	}
	from, err := os.Open(binary)
	if err != nil {
		return "", err
	}
	defer from.Close()
	to, err := os.OpenFile(filepath.Join(layer, GuestPath), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return "", err
	}
	defer to.Close()
	sum := sha256.New()
	if _, err := io.Copy(io.MultiWriter(to, sum), from); err != nil {
		return "", err
	}
	return hex.EncodeToString(sum.Sum(nil)), to.Chmod(0o755)
}

// agentDir gives the directory of an agent layer.
func (p *Pool) agentDir(digest string) (string, error) {
	if err := checkDigest(digest); err != nil {
		return "", err
	}
	dir := p.path("agents", digest)
	if !exists(dir) {
		return "", fault.New(fault.NotFound, "there is no agent layer %s on this host; install it first", digest)
	}
	return dir, nil
}

var digestShape = regexp.MustCompile(`^[0-9a-f]{64}$`)

func checkDigest(digest string) error {
	if !digestShape.MatchString(digest) {
		return fault.New(fault.InvalidArgument, "%q is no digest; it has 64 hexadecimal digits", digest)
	}
	return nil
}
