package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/hutchrun/hutch/api"
)

// wait is how long the server may hold an answer.
const wait = "2m"

// client speaks to the server.
type client struct{ api *api.Client }

func newClient(url, key string) (*client, error) {
	direct := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256}}
	c, err := api.NewClient(url, api.WithHTTPClient(direct), api.WithRequestEditorFn(func(_ context.Context, req *http.Request) error {
		req.Header.Set("Authorization", "Bearer "+key)
		return nil
	}))
	return &client{c}, err
}

// decode reads an answer.
func decode[T any](res *http.Response, err error) (T, error) {
	var out T
	if err != nil {
		return out, err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		return out, err
	}
	if res.StatusCode >= http.StatusBadRequest {
		return out, fmt.Errorf("%s: %s", res.Status, text)
	}
	return out, json.Unmarshal(text, &out)
}

// change reads the answer of a verb, whose operation has ended well.
func change(res *http.Response, err error) (api.Sandbox, error) {
	c, err := decode[api.Change](res, err)
	if err == nil && c.Operation != nil && c.Operation.Status != api.OperationStatusSucceeded {
		err = fmt.Errorf("the %s of %s is %s: %+v", c.Operation.Kind, c.Sandbox.ID, c.Operation.Status, c.Operation.Error)
	}
	return c.Sandbox, err
}

func (c *client) create(ctx context.Context, body api.CreateSandbox) (api.Sandbox, error) {
	return change(c.api.CreateSandbox(ctx, &api.CreateSandboxParams{Wait: wait}, body))
}

// accept makes a sandbox and does not wait until it is ready.
func (c *client) accept(ctx context.Context) (api.Sandbox, error) {
	r, err := decode[api.Change](c.api.CreateSandbox(ctx, &api.CreateSandboxParams{}, api.CreateSandbox{}))
	return r.Sandbox, err
}

func (c *client) get(ctx context.Context, ref string) (api.Sandbox, error) {
	return decode[api.Sandbox](c.api.GetSandbox(ctx, ref, &api.GetSandboxParams{}))
}

func (c *client) remove(ctx context.Context, id string) error {
	_, err := change(c.api.DeleteSandbox(ctx, id, &api.DeleteSandboxParams{Wait: wait}))
	return err
}

// life is what one sandbox goes through, one operation after the other.
func (c *client) life(ctx context.Context, done func(time.Duration)) error {
	began := time.Now()
	next := func(err error) error {
		if err == nil {
			done(time.Since(began))
			began = time.Now()
		}
		return err
	}
	s, err := c.create(ctx, api.CreateSandbox{})
	if err := next(err); err != nil {
		return err
	}
	for _, verb := range []func() (*http.Response, error){
		func() (*http.Response, error) {
			return c.api.SleepSandbox(ctx, s.ID, &api.SleepSandboxParams{Wait: wait})
		},
		func() (*http.Response, error) {
			return c.api.WakeSandbox(ctx, s.ID, &api.WakeSandboxParams{Wait: wait}, api.Boot{})
		},
		func() (*http.Response, error) {
			return c.api.StopSandbox(ctx, s.ID, &api.StopSandboxParams{Wait: wait})
		},
		func() (*http.Response, error) {
			return c.api.ResumeSandbox(ctx, s.ID, &api.ResumeSandboxParams{Wait: wait}, api.Boot{})
		},
	} {
		_, err := change(verb())
		if err := next(err); err != nil {
			return err
		}
	}
	return next(c.remove(ctx, s.ID))
}

// series are durations that were measured.
type series struct {
	mu   sync.Mutex
	list []time.Duration
}

func (s *series) add(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, d)
}

// at is the smallest that a part of them does not exceed; 0 of none.
func (s *series) at(part float64) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.list) == 0 {
		return 0
	}
	slices.Sort(s.list)
	return s.list[min(len(s.list)-1, int(part*float64(len(s.list))))]
}

func (s *series) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.list)
}

// over counts those that exceed a limit.
func (s *series) over(limit time.Duration) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, d := range s.list {
		if d > limit {
			n++
		}
	}
	return n
}

// crowd runs do in n goroutines and gives the first error.
func crowd(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			if err := do(ctx, i); err != nil {
				cancel(err)
			}
		})
	}
	all.Wait()
	return context.Cause(ctx)
}
