package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/hutchrun/hutch/api"
)

// wait is how long the server may hold an answer.
const wait = "2m"

// client speaks to the server without the command line, whose process start would be
// measured.
type client struct{ api *api.Client }

func newClient(url, key string) (*client, error) {
	c, err := api.NewClient(url, api.WithRequestEditorFn(func(_ context.Context, req *http.Request) error {
		req.Header.Set("Authorization", "Bearer "+key)
		return nil
	}))
	return &client{c}, err
}

// decode reads an answer of the generated client.
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

// change waits for a verb's end.
func change(res *http.Response, err error) (api.Sandbox, error) {
	c, err := decode[api.Change](res, err)
	if err != nil {
		return api.Sandbox{}, err
	}
	return c.Sandbox, succeeded(c.Operation)
}

// succeeded says why an operation has not; none is one that had nothing to do.
func succeeded(op *api.Operation) error {
	switch {
	case op == nil || op.Status == api.OperationStatusSucceeded:
		return nil
	case op.Error != nil:
		return fmt.Errorf("the %s %s: %s: %s", op.Kind, op.Status, op.Error.Code, op.Error.Message)
	default:
		return fmt.Errorf("the %s is %s after %s", op.Kind, op.Status, wait)
	}
}

// create makes a sandbox of the default size.
func (c *client) create(ctx context.Context) (api.Sandbox, error) {
	return c.createAs(ctx, api.CreateSandbox{Template: "base"})
}

func (c *client) createAs(ctx context.Context, as api.CreateSandbox) (api.Sandbox, error) {
	return change(c.api.CreateSandbox(ctx, &api.CreateSandboxParams{Wait: wait}, as))
}

func (c *client) sleep(ctx context.Context, ref string) error {
	_, err := change(c.api.SleepSandbox(ctx, ref, &api.SleepSandboxParams{Wait: wait}))
	return err
}

func (c *client) wake(ctx context.Context, ref string) error {
	_, err := change(c.api.WakeSandbox(ctx, ref, &api.WakeSandboxParams{Wait: wait}, api.Boot{}))
	return err
}

func (c *client) stop(ctx context.Context, ref string) error {
	_, err := change(c.api.StopSandbox(ctx, ref, &api.StopSandboxParams{Wait: wait}))
	return err
}

func (c *client) resume(ctx context.Context, ref string) error {
	_, err := change(c.api.ResumeSandbox(ctx, ref, &api.ResumeSandboxParams{Wait: wait}, api.Boot{}))
	return err
}

func (c *client) remove(ctx context.Context, ref string) error {
	_, err := change(c.api.DeleteSandbox(ctx, ref, &api.DeleteSandboxParams{Wait: wait, Permanent: true}))
	return err
}

// fork makes one live copy.
func (c *client) fork(ctx context.Context, ref string) (api.Sandbox, error) {
	copies, err := c.forkMany(ctx, ref, 1)
	if err != nil {
		return api.Sandbox{}, err
	}
	return copies[0], nil
}

// forkMany makes live copies of one instant.
func (c *client) forkMany(ctx context.Context, ref string, count int64) ([]api.Sandbox, error) {
	r, err := decode[api.ForkResult](c.api.ForkSandbox(ctx, ref, &api.ForkSandboxParams{Wait: wait},
		api.ForkSandbox{Mode: api.ForkSandboxModeLive, Count: &count}))
	if err != nil {
		return nil, err
	}
	if err := succeeded(&r.Operation); err != nil {
		return nil, err
	}
	var copies []api.Sandbox
	for _, f := range r.Forks {
		if err := succeeded(f.Operation); err != nil {
			return nil, err
		}
		copies = append(copies, f.Sandbox)
	}
	if len(copies) != int(count) {
		return nil, fmt.Errorf("%d forks were made, not %d", len(copies), count)
	}
	return copies, nil
}

// exec runs `true` and reads the stream to its exit.
func (c *client) exec(ctx context.Context, ref string) error {
	_, err := c.output(ctx, ref, nil, "true")
	return err
}

// startUntil starts a program that goes on, and returns when it has said a line.
func (c *client) startUntil(ctx context.Context, ref, line string, args ...string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // leaves the stream; the program goes on
	said := false
	_, err := c.output(ctx, ref, func(s string) {
		if s == line {
			said = true
			cancel()
		}
	}, args...)
	if said {
		return nil
	}
	return fmt.Errorf("the program in the sandbox ended early: %w", err)
}

// output runs a program, reads the stream to its exit and gives what it wrote. heard,
// which may be nil, gets each piece as it comes, without blanks around it.
func (c *client) output(ctx context.Context, ref string, heard func(string), args ...string) (string, error) {
	res, err := c.api.StartCommand(ctx, ref, &api.StartCommandParams{Follow: true},
		api.StartCommand{Command: api.CommandLine{Args: args}})
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(res.Body) // what there is will do for a message
		return "", fmt.Errorf("exec: %s: %s", res.Status, text)
	}
	var out strings.Builder
	for d := json.NewDecoder(res.Body); ; {
		var event api.CommandEvent
		if err := d.Decode(&event); err != nil {
			return "", fmt.Errorf("the stream of %s was cut: %w", args[0], err)
		}
		switch {
		case event.Error != nil:
			return "", errors.New(event.Error.Message)
		case event.Exit != nil && event.Exit.Code != 0:
			return "", fmt.Errorf("%s ended with %d: %s", args[0], event.Exit.Code, out.String())
		case event.Exit != nil:
			_, err := io.Copy(io.Discard, res.Body) // so that the connection is used again
			return out.String(), err
		case len(event.Data) > 0:
			out.Write(event.Data)
			if heard != nil {
				heard(strings.TrimSpace(string(event.Data)))
			}
		}
	}
}

func (c *client) template(ctx context.Context, name string) (api.Template, error) {
	return decode[api.Template](c.api.GetTemplate(ctx, name))
}

// removeAll deletes every sandbox.
func (c *client) removeAll(ctx context.Context) error {
	limit := api.Limit(1000) // the most that a page has; a run has three at a time
	list, err := decode[api.SandboxList](c.api.ListSandboxes(ctx, &api.ListSandboxesParams{Limit: &limit}))
	if err != nil {
		return err
	}
	var errs []error
	for _, s := range list.Sandboxes {
		errs = append(errs, c.remove(ctx, s.ID))
	}
	return errors.Join(errs...)
}
