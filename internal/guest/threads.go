package guest

import (
	"runtime"
	"sync"

	"github.com/hutchrun/hutch/internal/fault"
)

// mostIdle is how many prepared threads wait for work.
const mostIdle = 16

// threads runs functions on system threads that were prepared in some way: given a
// user's rights, or put into a control group. Both belong to a thread, and a thread
// that has them must never run anything else, so it is locked to its goroutine and
// ends with it. Under gVisor a new thread costs milliseconds: a few are kept.
type threads struct {
	mu     sync.Mutex
	idle   map[string][]*thread
	count  int // of the idle
	closed bool
	all    sync.WaitGroup
}

// thread is one prepared thread's goroutine, as the others see it.
type thread struct{ jobs chan job }

type job struct {
	fn     func() error
	result chan error
}

// do runs fn on a thread that prepare has prepared; equal keys stand for equal
// preparations. A panic of fn becomes an error.
func (t *threads) do(key string, prepare, fn func() error) error {
	w := t.take(key)
	if w == nil {
		w = &thread{jobs: make(chan job)}
		t.all.Go(func() { t.serve(key, prepare, w) })
	}
	j := job{fn: fn, result: make(chan error, 1)}
	w.jobs <- j
	return <-j.result
}

func (t *threads) serve(key string, prepare func() error, w *thread) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	err := prepare()
	for j := range w.jobs {
		if err != nil {
			j.result <- err
			return
		}
		healthy := run(j)
		if !healthy || !t.park(key, w) {
			return
		}
	}
}

// run does one job. It tells whether the thread may do another.
func run(j job) (healthy bool) {
	err := error(fault.New(fault.Internal, "the operation broke off in the guest agent"))
	defer func() {
		if p := recover(); p != nil {
			err = fault.Wrap(panicError(p), fault.Internal, "the operation broke off in the guest agent")
		}
		j.result <- err
	}()
	err = j.fn()
	return true
}

func (t *threads) take(key string) *thread {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.pop(key)
}

func (t *threads) pop(key string) *thread {
	list := t.idle[key]
	if len(list) == 0 {
		return nil
	}
	w := list[len(list)-1]
	if list = list[:len(list)-1]; len(list) == 0 {
		delete(t.idle, key)
	} else {
		t.idle[key] = list
	}
	t.count--
	return w
}

// park makes a thread wait for work of its key. When too many wait, one of another
// key, or this one, ends.
func (t *threads) park(key string, w *thread) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return false
	}
	if t.count >= mostIdle {
		for other := range t.idle {
			close(t.pop(other).jobs)
			break
		}
	}
	if t.idle == nil {
		t.idle = map[string][]*thread{}
	}
	t.idle[key] = append(t.idle[key], w)
	t.count++
	return true
}

// close ends the idle threads, and waits for those that work.
func (t *threads) close() {
	t.mu.Lock()
	t.closed = true
	for key := range t.idle {
		for w := t.pop(key); w != nil; w = t.pop(key) {
			close(w.jobs)
		}
	}
	t.mu.Unlock()
	t.all.Wait()
}
