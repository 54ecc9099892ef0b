package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// settle is how long a mount or a loop device may stay busy after its user is gone:
// another process that is just starting holds a copy of the mount table until it has
// its own root, and udev opens each new device for a moment. A process that has made
// its copy of our mounts private (MS_PRIVATE) holds them until it ends.
const settle = 30 * time.Second

// Loop is a loop device in use.
type Loop struct {
	Device   string // /dev/loopN
	Backing  string // path of its file
	DirectIO bool   // its file is read and written past the page cache
}

// attach gives a loop device for a file. One that already serves the file is taken
// over, as two devices on one file would corrupt it.
func attach(ctx context.Context, path string, readOnly bool) (string, error) {
	if found, err := loopsOf(path); err != nil {
		return "", err
	} else if len(found) > 0 {
		return found[0].Device, nil
	}
	mode, flags := os.O_RDWR, uint32(unix.LO_FLAGS_DIRECT_IO)
	if readOnly {
		mode, flags = os.O_RDONLY, flags|unix.LO_FLAGS_READ_ONLY
	}
	file, err := os.OpenFile(path, mode, 0)
	if err != nil {
		return "", wrap(err, "the image %s could not be opened", path)
	}
	defer file.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return "", fault.Wrap(err, fault.Unsupported, "this machine gives no loop devices; load the kernel's loop module").Because("loop")
	}
	defer control.Close()

	var device string
	err = poll(ctx, func() (bool, error) {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return false, err
		}
		device = fmt.Sprintf("/dev/loop%d", n)
		err = configure(device, mode, file, flags)
		// Somebody else was faster with the same free device, or removes it.
		if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENXIO) || errors.Is(err, os.ErrNotExist) {
			return false, nil
		}
		return true, err
	})
	return device, wrap(err, "the image %s could not be attached to a loop device", path)
}

func configure(device string, mode int, file *os.File, flags uint32) error {
	dev, err := os.OpenFile(device, mode, 0)
	if err != nil {
		return err
	}
	defer dev.Close()
	config := unix.LoopConfig{Fd: uint32(file.Fd()), Size: blockSize}
	config.Info.Flags = flags
	copy(config.Info.File_name[:len(config.Info.File_name)-1], file.Name())
	return unix.IoctlLoopConfigure(int(dev.Fd()), &config)
}

// detach frees every loop device of a file and waits until the kernel has let go of
// it. A device that is still mounted stays for that long, and then the answer is
// Unavailable.
func detach(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, settle)
	defer cancel()
	err := poll(ctx, func() (bool, error) {
		found, err := loopsOf(path)
		if err != nil || len(found) == 0 {
			return true, err
		}
		for _, l := range found {
			if err := clearLoop(l.Device); err != nil {
				return false, err
			}
		}
		return false, nil
	})
	if errors.Is(err, context.DeadlineExceeded) {
		return fault.Wrap(err, fault.Unavailable, "the image %s is still in use; end what uses it and try again", path).After(settle)
	}
	return wrap(err, "the image %s could not be detached from its loop device", path)
}

func clearLoop(device string) error {
	dev, err := os.OpenFile(device, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer dev.Close()
	// With other openers the kernel frees the device when the last of them closes it.
	err = unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_CLR_FD, 0)
	if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.EBUSY) {
		return nil
	}
	return err
}

// loopsOf finds the devices that serve a file.
func loopsOf(path string) ([]Loop, error) {
	return loops(func(backing string) bool { return backing == path })
}

// loopsUnder finds the devices that serve files whose path begins with prefix.
func loopsUnder(prefix string) ([]Loop, error) {
	return loops(func(backing string) bool { return strings.HasPrefix(backing, prefix) })
}

// loops lists devices by the path of their file, as /sys/block/loopN/loop shows it.
// Devices of others are not opened: an opener keeps a device from being freed.
func loops(want func(backing string) bool) ([]Loop, error) {
	paths, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	var found []Loop
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil { // freed since it was listed
			continue
		}
		backing := strings.TrimSuffix(string(text), "\n")
		if !want(backing) {
			continue
		}
		dir := filepath.Dir(path)
		direct, _ := os.ReadFile(filepath.Join(dir, "dio"))
		found = append(found, Loop{
			Device:   "/dev/" + filepath.Base(filepath.Dir(dir)),
			Backing:  backing,
			DirectIO: strings.TrimSpace(string(direct)) == "1",
		})
	}
	return found, nil
}
