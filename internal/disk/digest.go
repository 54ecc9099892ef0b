package disk

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// digestTree names the contents of a tree by SHA-256: every path in the order of its
// directory entries, with kind, mode, owner, time in whole seconds, the bytes of a
// file or the target of a link, and extended attributes. A further name of a file
// (hard link) counts as a link to the first. Devices and sockets are refused.
func digestTree(ctx context.Context, root string) (string, error) {
	sum := sha256.New()
	first := map[[2]uint64]string{} // device and inode of a file with several names
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if st.Nlink > 1 && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			key := [2]uint64{st.Dev, st.Ino}
			if to, seen := first[key]; seen {
				field(sum, "name", name)
				field(sum, "same as", to)
				return nil
			}
			first[key] = name
		}
		return digestEntry(sum, name, path, &st)
	})
	if err != nil {
		return "", err
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// versionDigest names a template by all that a sandbox gets of it: the files (by their
// digest), what the image asks of those who run it, and whom commands run as. Images
// with the same files are different templates where they say something else.
func versionDigest(t Template) (string, error) {
	config, err := json.Marshal(t.Config)
	if err != nil {
		return "", err
	}
	account, err := json.Marshal(t.Account)
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	field(sum, "contents", t.contents())
	field(sum, "config", string(config))
	field(sum, "account", string(account))
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// digestEntry adds one path. Each field has its length before it, so that two trees
// never give the same bytes.
func digestEntry(sum hash.Hash, name, path string, st *unix.Stat_t) error {
	field(sum, "name", name)
	field(sum, "mode", fmt.Sprintf("%o", st.Mode))
	field(sum, "owner", fmt.Sprintf("%d:%d", st.Uid, st.Gid))
	field(sum, "time", fmt.Sprint(st.Mtim.Sec))
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		field(sum, "size", fmt.Sprint(st.Size))
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		if n, err := io.Copy(sum, f); err != nil {
			return err
		} else if n != st.Size {
			return fmt.Errorf("%s changed while it was read", path)
		}
	case unix.S_IFLNK:
		to, err := os.Readlink(path)
		if err != nil {
			return err
		}
		field(sum, "link", to)
		return nil
	case unix.S_IFDIR, unix.S_IFIFO:
	default:
		return fmt.Errorf("%s is a device or a socket, which no template has", path)
	}
	return digestXattrs(sum, path)
}

func digestXattrs(sum hash.Hash, path string) error {
	list, err := readXattr(func(b []byte) (int, error) { return unix.Llistxattr(path, b) })
	if err != nil {
		return &os.PathError{Op: "llistxattr", Path: path, Err: err}
	}
	for _, name := range slices.Sorted(strings.SplitSeq(string(list), "\x00")) {
		if !keptXattr(name) {
			continue
		}
		value, err := readXattr(func(b []byte) (int, error) { return unix.Lgetxattr(path, name, b) })
		if err != nil {
			return &os.PathError{Op: "lgetxattr", Path: path, Err: err}
		}
		field(sum, "xattr", name)
		field(sum, "value", string(value))
	}
	return nil
}

// keptXattr says which attributes belong to a template: a user's own, and file
// capabilities. Those of an overlay (trusted.overlay.*) would bend lookups in the
// layers, and the rest is a matter of the host.
func keptXattr(name string) bool {
	return strings.HasPrefix(name, "user.") || name == "security.capability"
}

// readXattr calls with a buffer that fits.
func readXattr(call func([]byte) (int, error)) ([]byte, error) {
	n, err := call(nil)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	if err != nil || n == 0 {
		return nil, err
	}
	b := make([]byte, n)
	n, err = call(b)
	return b[:max(n, 0)], err
}

func field(sum hash.Hash, name, value string) {
	var size [8]byte
	binary.BigEndian.PutUint64(size[:], uint64(len(value)))
	io.WriteString(sum, name)
	sum.Write(size[:])
	io.WriteString(sum, value)
}
