package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hutchrun/hutch/api"
)

// lifecycles measures how many operations end in a second, and how long each takes its
// client.
func (b *bench) lifecycles(ctx context.Context) (err error) {
	b.found.operations, b.found.perSecond, err = b.work(ctx)
	return err
}

// work loads the server for a time.
func (b *bench) work(ctx context.Context) (*series, float64, error) {
	took := &series{}
	began := time.Now()
	err := crowd(ctx, b.workers, func(ctx context.Context, _ int) error {
		for time.Since(began) < b.load {
			if err := b.api.life(ctx, took.add); err != nil {
				return err
			}
		}
		return nil
	})
	return took, float64(took.count()) / time.Since(began).Seconds(), err
}

// follow measures how long events take to many clients while there is a load. Each client
// gets each event once, in order: anything else is an error.
func (b *bench) follow(ctx context.Context) error {
	streaming, stop := context.WithCancel(ctx)
	defer stop()
	after, err := b.lastEvent(ctx)
	if err != nil {
		return err
	}
	delays := &series{}
	var last atomic.Int64 // the number at which the clients may end
	var open, all sync.WaitGroup
	broken := make(chan error, b.streams)
	for range b.streams {
		open.Add(1)
		all.Go(func() { broken <- b.stream(streaming, after, &last, open.Done, delays) })
	}
	open.Wait()
	_, rate, err := b.work(ctx)
	if err != nil {
		return err
	}
	end, err := b.lastEvent(ctx)
	if err != nil {
		return err
	}
	last.Store(end)
	if _, err := b.work1(ctx); err != nil { // so that each client sees one event more, and its end
		return err
	}
	all.Wait()
	for range b.streams {
		if err := <-broken; err != nil {
			return err
		}
	}
	b.found.followed, b.found.streamed, b.found.perSecondFollowed = delays, end-after, rate
	return nil
}

func (b *bench) work1(ctx context.Context) (*series, error) {
	took := &series{}
	return took, b.api.life(ctx, took.add)
}

// lastEvent gives the number of the newest event.
func (b *bench) lastEvent(ctx context.Context) (int64, error) {
	for {
		page, err := decode[api.EventList](b.events(ctx, b.seen, "application/json"))
		if err != nil || len(page.Events) == 0 {
			return b.seen, err
		}
		b.seen = page.Events[len(page.Events)-1].Seq
	}
}

func (b *bench) events(ctx context.Context, after int64, accept string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("%s/v1/events?after=%d&limit=1000", b.proc.URL, after), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+b.proc.Key)
	req.Header.Set("Accept", accept)
	return http.DefaultClient.Do(req)
}

// stream follows the events from a number on to the last that matters.
func (b *bench) stream(ctx context.Context, after int64, last *atomic.Int64, open func(), delays *series) error {
	res, err := b.events(ctx, after, "text/event-stream")
	open()
	if err != nil {
		return err
	}
	defer res.Body.Close()
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, is := strings.CutPrefix(lines.Text(), "data: ")
		if !is {
			continue
		}
		var e api.Event
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			return err
		}
		if e.Seq != after+1 {
			return fmt.Errorf("a client got event %d after %d", e.Seq, after)
		}
		after = e.Seq
		delays.add(time.Since(e.At.Time))
		if end := last.Load(); end != 0 && after >= end {
			return nil
		}
	}
	return fmt.Errorf("a stream ended after event %d: %w", after, lines.Err())
}

// make makes n sandboxes, many at a time, and gives how many a second.
func (b *bench) make(ctx context.Context, n int, body func(i int) api.CreateSandbox, made func(i int, s api.Sandbox)) (float64, error) {
	var next atomic.Int64
	began := time.Now()
	err := crowd(ctx, 2*b.workers, func(ctx context.Context, _ int) error {
		for {
			i := int(next.Add(1)) - 1
			if i >= n {
				return nil
			}
			s, err := b.api.create(ctx, body(i))
			if err != nil {
				return err
			}
			made(i, s)
		}
	})
	return float64(n) / time.Since(began).Seconds(), err
}

// timed makes sandboxes whose auto-stops fall due one after the other, and measures how
// late they are stopped.
func (b *bench) timed(ctx context.Context) error {
	trial := make([]string, max(20, b.timers/50))
	rate, err := b.make(ctx, len(trial), func(int) api.CreateSandbox { return api.CreateSandbox{} }, func(i int, s api.Sandbox) { trial[i] = s.ID })
	if err != nil {
		return err
	}
	for _, id := range trial {
		if err := b.api.remove(ctx, id); err != nil {
			return err
		}
	}
	// They all have to be there before the first falls due.
	first := time.Now().Add(time.Duration(1.3*float64(b.timers)/rate*float64(time.Second)) + 5*time.Second)
	after, err := b.lastEvent(ctx)
	if err != nil {
		return err
	}
	index := make(map[string]int, b.timers)
	var mu sync.Mutex
	b.found.creations, err = b.make(ctx, b.timers, func(i int) api.CreateSandbox {
		due := first.Add(time.Duration(i) * b.spread / time.Duration(b.timers))
		return api.CreateSandbox{TTLSeconds: api.Seconds(fmt.Sprint(max(1, int64(time.Until(due).Seconds()))))}
	}, func(i int, s api.Sandbox) {
		mu.Lock()
		defer mu.Unlock()
		index[s.ID] = i
	})
	if err != nil {
		return err
	}
	if b.found.memoryRunning, err = b.proc.Memory(); err != nil {
		return err
	}
	if late := time.Since(first.Add(-time.Second)); late > 0 { // auto-stops are whole seconds, rounded down
		return fmt.Errorf("the sandboxes were made %s too late for their timers; is the machine overloaded?", late)
	}
	b.found.late, b.found.heard = &series{}, &series{}
	ctx, cancel := context.WithTimeout(ctx, time.Until(first)+5*b.spread+time.Minute)
	defer cancel()
	return b.stops(ctx, after, index, make([]time.Time, b.timers))
}

// stops follows the events until every sandbox has stopped by itself.
func (b *bench) stops(ctx context.Context, after int64, index map[string]int, deadlines []time.Time) error {
	ids := make([]string, 0, len(index))
	for id := range index {
		ids = append(ids, id)
	}
	var next atomic.Int64
	err := crowd(ctx, b.workers, func(ctx context.Context, _ int) error {
		for {
			i := int(next.Add(1)) - 1
			if i >= len(ids) {
				return nil
			}
			s, err := b.api.get(ctx, ids[i])
			if err != nil {
				return err
			}
			if s.Deadline.At == nil {
				return fmt.Errorf("%s has no deadline", s.ID)
			}
			deadlines[index[s.ID]] = s.Deadline.At.Time
		}
	})
	if err != nil {
		return err
	}
	res, err := b.events(ctx, after, "text/event-stream")
	if err != nil {
		return err
	}
	defer res.Body.Close()
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, is := strings.CutPrefix(lines.Text(), "data: ")
		if !is {
			continue
		}
		var e api.Event
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			return err
		}
		if i, ours := index[e.Sandbox]; ours && e.Type == "sandbox.stopped" {
			b.found.late.add(e.At.Sub(deadlines[i]))
			b.found.heard.add(time.Since(deadlines[i]))
			if b.found.late.count() == len(index) {
				return nil
			}
		}
	}
	return fmt.Errorf("only %d of %d were stopped: %w", b.found.late.count(), len(index), lines.Err())
}
