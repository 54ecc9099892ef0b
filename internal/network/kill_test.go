package network

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// TestMain is also the agent that TestKilledAgent kills.
func TestMain(m *testing.M) {
	if host := os.Getenv("NETWORK_TEST_AGENT"); host != "" {
		fmt.Fprintln(os.Stderr, agent(host, os.Getenv("NETWORK_TEST_TAG"), strings.Fields(os.Getenv("NETWORK_TEST_IDS"))))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// agent attaches and detaches its sandboxes, each in a goroutine, until it is killed.
func agent(path, tag string, ids []string) error {
	host, err := openSpace(path)
	if err != nil {
		return err
	}
	sparePause = 0
	m, err := open(context.Background(), Config{Tag: tag, Spares: 2}, host)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	failed := make(chan error)
	for _, id := range ids {
		go func() {
			for {
				if _, err := m.Attach(context.Background(), id); err != nil {
					failed <- err
				}
				if err := m.Detach(context.Background(), id); err != nil {
					failed <- err
				}
			}
		}()
	}
	return <-failed
}

// Killing the agent at any instant leaves nothing that the next one does not find,
// complete or remove.
func TestKilledAgent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	tag := unique()
	ids := []string{newID(), newID(), newID()}
	for _, id := range ids {
		w.forget(tag, id)
	}
	port := w.listen(w.internet, ":0", "internet")
	for round := range 12 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "NETWORK_TEST_AGENT="+spacesDir+"/"+w.name+"host", "NETWORK_TEST_TAG="+tag, "NETWORK_TEST_IDS="+strings.Join(ids, " "))
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		line, err := bufio.NewReader(out).ReadString('\n')
		if err != nil || line != "ready\n" {
			cmd.Process.Kill()
			cmd.Wait()
			t.Fatalf("the agent said %q, %v", line, err)
		}
		<-time.After(rand.N(60 * time.Millisecond)) // the instant is the point, not a wait for something
		must(t, cmd.Process.Kill())
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != -1 {
			t.Fatalf("the agent ended by itself with %d", code)
		}

		m, err := w.tryOpen(Config{Tag: tag})
		must(t, err)
		for _, id := range ids {
			if round%2 == 0 {
				_, err := m.Attach(context.Background(), id)
				must(t, err)
				g, err := openSpace(m.path(id, sideGuest))
				must(t, err)
				w.reaches(g, internetAddr, port, "internet")
				g.close()
			}
			must(t, m.Detach(context.Background(), id))
		}
		w.clean(m)
		must(t, m.Close())
		if t.Failed() {
			t.Fatalf("in round %d", round)
		}
	}
	links, err := w.host.links()
	must(t, err)
	for _, l := range links {
		if strings.HasPrefix(l.Attrs().Name, "hutch") {
			t.Errorf("%s is left", l.Attrs().Name)
		}
	}
}

// W3: many cycles leave no descriptor, no interface and no namespace behind. The
// host is busy meanwhile: interfaces come and go, so lists from the kernel are
// often cut short.
func TestCyclesOnABusyHost(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i := range 50 { // more than fits one message from the kernel
		must(t, addPair(w.host.nl, fmt.Sprintf("d%d", i), fmt.Sprintf("e%d", i), w.host, 0))
	}
	ctx, cancel := context.WithCancel(context.Background())
	var churn sync.WaitGroup
	churn.Go(func() {
		for ctx.Err() == nil {
			if l, err := w.host.link("churn"); err == nil && l != nil {
				w.host.nl.LinkDel(l)
			} else {
				addPair(w.host.nl, "churn", "chorn", w.host, 0)
			}
		}
	})
	defer churn.Wait()
	defer cancel()
	m := w.open(Config{})
	var workers sync.WaitGroup
	for range 4 {
		id := newID()
		w.forget(m.cfg.Tag, id)
		workers.Go(func() {
			for range 10 {
				if _, err := m.Attach(context.Background(), id); err != nil {
					t.Error(err)
				}
				if err := m.Detach(context.Background(), id); err != nil {
					t.Error(err)
				}
			}
		})
	}
	workers.Wait()
	w.clean(m)
}

// W3: descriptors stay bounded. The count is of this whole process, so this test
// runs before the parallel ones.
func TestNoDescriptorLeaks(t *testing.T) {
	w := newWorld(t)
	m := w.open(Config{})
	id := newID()
	w.forget(m.cfg.Tag, id)
	cycle := func() {
		for range 5 {
			_, err := m.Attach(context.Background(), id)
			must(t, err)
			m.Dial(context.Background(), id, 1)
			must(t, m.Detach(context.Background(), id))
		}
	}
	count := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		return len(list)
	}
	cycle()
	before := count()
	cycle()
	if after := count(); after > before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

// W3: an instance starts while the uplinks of another one in the same pool come and go.
func TestStartsBesideABusyInstance(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i := range 100 { // lists from the kernel take several messages, so that there is time between them
		must(t, addPair(w.host.nl, fmt.Sprintf("d%d", i), fmt.Sprintf("e%d", i), w.host, 0))
	}
	ctx, cancel := context.WithCancel(context.Background())
	var churn sync.WaitGroup
	for n := range 4 {
		churn.Go(func() {
			for i := n; ctx.Err() == nil; i += 4 {
				s := slotAt(DefaultPool, uint32(i%2000))
				if err := addPair(w.host.nl, s.link(), fmt.Sprintf("far%d", i), w.host, 0); err != nil {
					t.Error(err)
					return
				}
				l, err := w.host.nl.LinkByName(s.link())
				if err != nil {
					t.Error(err)
					return
				}
				w.host.nl.AddrAdd(l, &netlink.Addr{IPNet: ipNet(s.host.AsSlice(), 31)})
				w.host.nl.LinkDel(l)
			}
		})
	}
	defer churn.Wait()
	defer cancel()
	m := w.open(Config{})
	for range 600 {
		must(t, m.checkPool())
	}
}
