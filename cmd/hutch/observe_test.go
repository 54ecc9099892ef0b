package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/cli"
	"github.com/hutchrun/hutch/internal/config"
	"github.com/hutchrun/hutch/internal/telemetry/telemetrytest"
)

// On real sandboxes: a create is one trace from the call to the runtime, the metrics tell
// of it, the server says that it is ready and, while it stops, that it is not; and what the
// user keeps secret is in no line of the log.
func TestObserved(t *testing.T) {
	c := telemetrytest.New(t)
	metrics, err := freeAddress()
	if err != nil {
		t.Fatal(err)
	}
	s, err := newServer()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.remove(); err != nil {
			t.Error(err)
		}
	})
	s.pool = "3GB"
	s.args = []string{"--metrics-listen", metrics, "--drain", "5s"}
	s.env = []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + c.URL, "OTEL_BSP_SCHEDULE_DELAY=50"}
	if err := s.start(); err != nil {
		t.Fatal(err)
	}
	small := filepath.Join(s.dir, "small.tar")
	writeFile(t, small, dockerTar(t, map[string]string{"etc/os-release": "ID=small\n"}))
	if _, err := s.try(5*time.Minute, nil, "templates", "build", "base", "--from-oci", small); err != nil {
		t.Fatal(err)
	}
	const canary = "canary-5b1d"
	out, err := s.try(time.Minute, nil, "new", "--name", "box", "--memory", "128MiB", "--disk", "1GB", "--env", "TOKEN="+canary, "--json")
	if err != nil {
		t.Fatal(err)
	}
	var made struct {
		Operation struct {
			RequestID string `json:"request_id"`
		}
	}
	if err := json.Unmarshal([]byte(out.stdout), &made); err != nil || made.Operation.RequestID == "" {
		t.Errorf("the operation is of %q: %v in %s", made.Operation.RequestID, err, out.stdout)
	}
	if _, err := s.try(time.Minute, strings.NewReader(canary), "exec", "box", "--env", "SECRET="+canary, "--", "/.hutch/guest", "--version"); err != nil {
		t.Error(err)
	}
	names := map[string]telemetrytest.Span{}
	c.Wait(t, func(spans []telemetrytest.Span) bool {
		for _, s := range spans {
			names[s.Name] = s
		}
		return names["operation create"].ID != "" && names["step init"].ID != "" && names["runtime start"].ID != ""
	})
	for child, parent := range map[string]string{
		"operation create": "POST /v1/sandboxes", "host create": "operation create", "step boot": "host create", "runtime start": "step boot",
	} {
		if names[child].Parent != names[parent].ID || names[child].Trace != names[parent].Trace {
			t.Errorf("%q is not beneath %q: %+v and %+v", child, parent, names[child], names[parent])
		}
	}
	if id := names["host create"].Attrs["hutch.request"]; id != made.Operation.RequestID {
		t.Errorf("the host created it for the call %q, the operation is of %q", id, made.Operation.RequestID)
	}

	text := fetch(t, "http://"+metrics+"/metrics", 200)
	for _, line := range []string{
		`hutch_operations_total{outcome="succeeded",verb="create"} 1`, `hutch_sandboxes{state="ready"} 1`, `hutch_host_sandboxes_running 1`,
		`hutch_operation_step_duration_seconds_count{step="boot",verb="create"} 1`, `hutch_scrape_failed{source="host"} 0`,
	} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("the metrics lack %s", line)
		}
	}
	ready := fetch(t, "http://"+s.listen+"/readyz", 200)
	for _, check := range []string{"schema", "database", "host", "accepting"} {
		if !strings.Contains(ready, `"`+check+`"`) {
			t.Errorf("/readyz does not tell of %s: %s", check, ready)
		}
	}
	if err := s.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	drained := false
	for !drained {
		select {
		case <-s.ended:
			t.Fatal("the server ended before it had said that it would")
		case <-time.After(50 * time.Millisecond):
		}
		res, err := http.Get("http://" + s.listen + "/readyz")
		if err != nil {
			continue
		}
		drained = res.StatusCode == http.StatusServiceUnavailable
		_ = res.Body.Close()
	}
	fetch(t, "http://"+s.listen+"/healthz", 200)
	<-s.ended

	log, err := os.ReadFile(filepath.Join(s.dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(log), canary) || strings.Contains(string(log), "hutch_") {
		t.Error("a secret or a key is in the log")
	}
	steps := 0
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, "msg=step ") && strings.Contains(line, "request="+made.Operation.RequestID) {
			steps++
		}
	}
	if steps < 4 {
		t.Errorf("%d lines tell of a step for the call %s", steps, made.Operation.RequestID)
	}
}

func fetch(t *testing.T, url string, status int) string {
	t.Helper()
	res, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != status {
		t.Errorf("%s: %d %s %v", url, res.StatusCode, b, err)
	}
	return string(b)
}

// HUTCH_LOG_FORMAT=json makes each record one JSON object, and what a server says to
// people at its end is told from those records as well.
func TestLogAsJSON(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	newLog(cli.Env{Stderr: &out, Getenv: func(name string) string {
		return map[string]string{"HUTCH_LOG_FORMAT": "json"}[name]
	}}).Warn("it is so", "op", "op_1")
	var record map[string]any
	if err := json.Unmarshal(out.Bytes(), &record); err != nil || record["msg"] != "it is so" || record["op"] != "op_1" || record["level"] != "WARN" {
		t.Errorf("%v: %s", err, out.Bytes())
	}
	if got := forPeople(out.String() + "hutch: do this\n"); got != "hutch: do this" {
		t.Errorf("people are told %q", got)
	}
}

// A drain that `hutch down` would not wait for, and metrics for the whole network, are
// refused before anything is touched.
func TestObservingIsChecked(t *testing.T) {
	t.Parallel()
	for _, o := range []observing{{drain: -1}, {drain: time.Minute}, {metricsListen: "0.0.0.0:9464"}, {metricsListen: "9464"}} {
		if f, err := openFront("127.0.0.1:0", o, nil); err == nil || f != nil {
			t.Errorf("%+v was taken", o)
		}
	}
}

// R5: what could not be observed as the settings say is told by `hutch config check`.
func TestR5ObservingInTheSettings(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "hutch.toml")
	for text, key := range map[string]string{
		`metrics_listen = "0.0.0.0:9464"`:             config.MetricsListen,
		`drain = "1m"`:                                config.Drain,
		`traces_endpoint = "127.0.0.1:4318"`:          config.TracesTo,
		`traces_endpoint = "http://user:word@host:1"`: config.TracesTo,
		"metrics_listen = \"127.0.0.1:9464\"\ndrain = \"5s\"\ntraces_endpoint = \"https://collector:4318\"": "",
	} {
		writeFile(t, file, []byte(text+"\n"))
		_, problems, err := readConfig(file)
		switch {
		case err != nil:
			t.Error(err)
		case key == "" && len(problems) != 0, key != "" && (len(problems) != 1 || problems[0].Key != key || problems[0].Line != 1):
			t.Errorf("%s: %+v", text, problems)
		}
	}
}
