package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// place is one end of a copy: a path in a sandbox, or one here.
type place struct {
	ref  string // the sandbox; "" is here
	path string
}

// parsePlace reads `NAME:PATH` or a local path. A local path with a colon needs a
// slash before it, as `./a:b`.
func parsePlace(s string) place {
	ref, inside, ok := strings.Cut(s, ":")
	if !ok || ref == "" || strings.ContainsAny(ref, `/\`) || ref == "." || ref == ".." {
		return place{path: s}
	}
	return place{ref: ref, path: inside}
}

func (a *app) cpCommand() *cobra.Command {
	var asJSON bool
	var user string
	cmd := &cobra.Command{
		Use:   "cp FROM TO",
		Short: "Copy a file into a sandbox, or out of one",
		Long: "Copy a file into a sandbox, or out of one. A path in a sandbox is NAME:PATH; a relative one starts at the default " +
			"directory. `-` is stdin or stdout. The target appears when all of it is there. A copy that breaks off is taken up again " +
			"where it was; what is left of a large one when hutch itself ends goes on when the same copy is asked for again. For directories: " +
			"tar c DIR | hutch exec NAME -- tar x.",
		Example: "hutch cp data.csv demo:/workspace/data.csv\nhutch cp demo:/etc/os-release .\nhutch cp demo:report.html -",
		Args:    named("FROM", "TO"),
	}
	addJSON(cmd, &asJSON)
	cmd.Flags().StringVarP(&user, "user", "u", "", "as whom the file is read or written in the sandbox")
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		from, to := parsePlace(args[0]), parsePlace(args[1])
		var info copied
		var err error
		stop := a.progress.spin()
		switch {
		case from.ref == "" && to.ref != "":
			info, err = a.upload(ctx, c, user, from.path, to)
		case from.ref != "" && to.ref == "":
			info, err = a.download(ctx, c, user, from, to.path)
		case from.ref != "":
			err = fault.New(fault.Unsupported, "cp cannot copy from sandbox to sandbox; copy to here first").Because("cp_between_sandboxes")
		default:
			err = fault.New(fault.InvalidArgument, "neither %s nor %s is in a sandbox; write one of them as NAME:PATH", args[0], args[1])
		}
		stop()
		if err != nil {
			return err
		}
		if asJSON && to.path == "-" && to.ref == "" {
			return writeJSON(a.env.Stderr, info) // stdout has the file
		}
		if asJSON {
			return a.printJSON(info)
		}
		if a.progress.visible() {
			a.note("%s, %s", clean(info.Path), formatDisk(info.Bytes))
		}
		return nil
	})
	return cmd
}

// copied is the document of a copy.
type copied struct {
	Sandbox string `json:"sandbox"`
	Source  string `json:"source"` // path of the source, as it was typed
	Path    string `json:"path"`   // of the target
	Bytes   int64  `json:"bytes"`
}

// errDirectory refuses a directory.
func errDirectory(name string) error {
	return fault.New(fault.Unsupported, "cannot copy %s: it is a directory, and cp copies single files; send it as an archive: tar c DIR | hutch exec NAME -- tar x", name).
		Because("cp_directory")
}

// upload streams a local file into a sandbox.
func (a *app) upload(ctx context.Context, c *client, user, from string, to place) (copied, error) {
	info := copied{Sandbox: to.ref, Source: from}
	target, err := a.remoteTarget(ctx, c, user, to, from)
	if err != nil {
		return info, err
	}
	count := &counter{a: a, what: "copying " + from}
	edit := func(_ context.Context, req *http.Request) error { return nil }
	params := &api.WriteFileParams{Path: target, User: user}
	body := a.env.Stdin
	if from != "-" {
		file, stat, err := openLocal(from)
		if err != nil {
			return info, err
		}
		defer file.Close()
		params.Mode = fmt.Sprintf("%04o", stat.Mode().Perm())
		body, count.size = file, stat.Size()
		edit = func(_ context.Context, req *http.Request) error {
			req.ContentLength = stat.Size()
			req.GetBody = func() (io.ReadCloser, error) { // for another attempt
				again, err := os.Open(from)
				if err != nil {
					return nil, err
				}
				count.n.Store(0)
				return struct {
					io.Reader
					io.Closer
				}{count.reader(again), again}, nil
			}
			if stat.Size() == 0 {
				req.Body = http.NoBody
			}
			return nil
		}
	}
	if file, ok := body.(*os.File); ok && count.size >= resumeFrom {
		written, err := a.uploadInParts(ctx, c, to.ref, params, file, count)
		if !inPlace(err) {
			info.Path, info.Bytes = written.Path, written.Size
			return info, err
		}
		if _, err := file.Seek(0, io.SeekStart); err != nil {
			return info, localFault("read", from, err)
		}
		count.n.Store(0)
	}
	written, err := read[api.FileInfo](c.WriteFileWithBody(ctx, to.ref, params, "application/octet-stream", count.reader(body), edit))
	if err != nil && interrupted(ctx) {
		return info, fault.New(fault.Cancelled, "the copy was given up; %s:%s is as it was, unless all of the file had arrived", to.ref, target)
	}
	if err != nil {
		return info, err
	}
	info.Path, info.Bytes = written.Path, written.Size
	return info, nil
}

// openLocal opens a regular file.
func openLocal(name string) (*os.File, fs.FileInfo, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, nil, localFault("read", name, err)
	}
	stat, err := file.Stat()
	switch {
	case err != nil:
		err = localFault("read", name, err)
	case stat.IsDir():
		err = errDirectory(name)
	case !stat.Mode().IsRegular():
		err = fault.New(fault.InvalidArgument, "cannot copy %s: it is no regular file; pass its contents on stdin and write - for FROM", name)
	}
	if err != nil {
		file.Close()
		return nil, nil, err
	}
	return file, stat, nil
}

func localFault(verb, name string, err error) error {
	kind := fault.Internal
	switch {
	case errors.Is(err, fs.ErrNotExist):
		kind = fault.NotFound
	case errors.Is(err, fs.ErrPermission):
		kind = fault.PermissionDenied
	}
	if pathErr, ok := errors.AsType[*fs.PathError](err); ok {
		err = pathErr.Err
	}
	return fault.Wrap(err, kind, "cannot %s %s on this machine; check the path", verb, name)
}

// remoteTarget is where a file goes in a sandbox: below the path where that is a
// directory.
func (a *app) remoteTarget(ctx context.Context, c *client, user string, to place, from string) (string, error) {
	name := filepath.Base(from)
	intoDirectory := to.path == "" || strings.HasSuffix(to.path, "/")
	if !intoDirectory {
		stat, err := read[api.FileInfo](c.StatFile(ctx, to.ref, &api.StatFileParams{Path: to.path, User: user}))
		if err != nil && !fault.Is(err, fault.NotFound) {
			return "", err
		}
		intoDirectory = err == nil && stat.Type == api.FileInfoTypeDirectory
	}
	if !intoDirectory {
		return to.path, nil
	}
	if from == "-" {
		return "", fault.New(fault.InvalidArgument, "%s:%s is a directory; name the file that stdin goes to", to.ref, to.path)
	}
	return path.Join(to.path, name), nil
}

// download streams a sandbox's file to a local one, which appears when all of it is
// there.
func (a *app) download(ctx context.Context, c *client, user string, from place, to string) (copied, error) {
	info := copied{Sandbox: from.ref, Source: from.path, Path: to}
	if from.path == "" {
		return info, fault.New(fault.InvalidArgument, "%s: names no file; write NAME:PATH", from.ref)
	}
	stat, err := read[api.FileInfo](c.StatFile(ctx, from.ref, &api.StatFileParams{Path: from.path, User: user}))
	if err != nil {
		return info, err
	}
	if stat.Type == api.FileInfoTypeDirectory {
		return info, errDirectory(from.ref + ":" + from.path)
	}
	d := &fetch{a: a, c: c, user: user, from: from, stat: stat, count: &counter{a: a, what: "copying " + from.path, size: stat.Size}}
	if to == "-" {
		err = d.all(ctx, a.env.Stdout)
	} else {
		if dir, statErr := os.Stat(to); statErr == nil && dir.IsDir() {
			info.Path = filepath.Join(to, path.Base(from.path))
		}
		err = d.file(ctx, info.Path)
	}
	info.Bytes = d.at
	if interrupted(ctx) {
		return info, fault.New(fault.Cancelled, "the copy was given up; %s is as it was%s", info.Path, d.goesOn())
	}
	return info, err
}

// fileMode gives the permission bits that a copy has.
func fileMode(stat api.FileInfo) os.FileMode {
	bits, err := strconv.ParseUint(stat.Mode, 8, 32)
	if err != nil || stat.Type != api.FileInfoTypeFile {
		return 0o644
	}
	return os.FileMode(bits) & 0o777
}

// counter shows how far a copy is.
type counter struct {
	a      *app
	what   string
	size   int64 // 0 is unknown
	n      atomic.Int64
	failed atomic.Bool // reading failed, rather than writing
}

func (c *counter) reader(r io.Reader) io.Reader {
	return readerFunc(func(p []byte) (int, error) {
		n, err := r.Read(p)
		if err != nil && err != io.EOF {
			c.failed.Store(true)
		}
		if total := c.n.Add(int64(n)); c.a.progress.visible() {
			text := c.what + "  " + formatDisk(total)
			if c.size > 0 {
				text += " of " + formatDisk(c.size)
			}
			c.a.progress.change(text)
		}
		return n, err
	})
}

type readerFunc func([]byte) (int, error)

// Read calls the function.
func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
