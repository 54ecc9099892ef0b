package disk

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// keyed is a lock per name. The zero value is ready.
type keyed struct {
	mu    sync.Mutex
	names map[string]*keyedLock // those that are held or waited for
}

type keyedLock struct {
	token chan struct{} // holds one token while the lock is free
	users int
}

// lock waits for a name, or for the end of the context. The caller calls unlock once.
func (k *keyed) lock(ctx context.Context, name string) (unlock func(), err error) {
	k.mu.Lock()
	if k.names == nil {
		k.names = map[string]*keyedLock{}
	}
	l := k.names[name]
	if l == nil {
		l = &keyedLock{token: make(chan struct{}, 1)}
		l.token <- struct{}{}
		k.names[name] = l
	}
	l.users++
	k.mu.Unlock()

	leave := func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(k.names, name)
		}
	}
	select {
	case <-l.token:
		return func() { l.token <- struct{}{}; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, wrap(ctx.Err(), "%s could not be used, as another operation on it did not end", name)
	}
}

// lockFile takes the lock of a file, which the kernel gives up when this process
// dies. Closing the file gives it up too.
func lockFile(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = poll(ctx, func() (bool, error) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) {
			return false, nil
		}
		return true, err
	})
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// lockedByOther says whether a living process holds the lock of a directory.
func lockedByOther(dir string) bool {
	f, err := os.Open(dir)
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// poll asks until the answer is yes, for what the kernel announces nowhere.
func poll(ctx context.Context, done func() (bool, error)) error {
	wait := time.Millisecond
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
			wait = min(wait*2, 50*time.Millisecond)
		}
	}
}
