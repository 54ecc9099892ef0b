package gateway

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

const (
	box   = "sbx_01m8qk70x0f8ab46gsdnvzshy6"
	name  = "3000-01m8qk70x0f8ab46gsdnvzshy6.localhost"
	token = "hutchp_right"
)

// rig is a gateway before a program that listens on port 3000 of one sandbox.
type rig struct {
	t          *testing.T
	server     *httptest.Server
	program    net.Listener
	generation atomic.Int64
	opens      atomic.Int64
	dials      atomic.Int64
	inUse      atomic.Int64
	hold       chan struct{} // where set, Open waits for it

	mu    sync.Mutex
	conns []net.Conn // to the program
}

// newRig serves program; a nil one is a program that handle is given each connection of.
func newRig(t *testing.T, program http.Handler, handle func(net.Conn), change func(*Config)) *rig {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, program: l}
	t.Cleanup(func() { _ = l.Close() })
	if program != nil {
		srv := &http.Server{Handler: program, Protocols: new(http.Protocols)}
		srv.Protocols.SetHTTP1(true)
		srv.Protocols.SetUnencryptedHTTP2(true)
		go func() { _ = srv.Serve(l) }()
		t.Cleanup(func() { _ = srv.Close() })
	} else {
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go handle(c)
			}
		}()
	}
	r.generation.Store(1)
	cfg := Config{
		Next: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "the API") }),
		Fail: func(w http.ResponseWriter, _ *http.Request, err error) {
			f := fault.Of(err)
			status := map[fault.Kind]int{fault.Unauthenticated: 401, fault.Unavailable: 503, fault.RateLimited: 429, fault.Cancelled: 499}[f.Kind]
			if status == 0 {
				status = 500
			}
			if f.RetryAfter > 0 {
				w.Header().Set("Retry-After", "1")
			}
			w.WriteHeader(status)
			fmt.Fprint(w, f.Reason)
		},
		Open: r.open,
	}
	if change != nil {
		change(&cfg)
	}
	r.server = httptest.NewUnstartedServer(New(cfg))
	r.server.Config.Protocols = new(http.Protocols)
	r.server.Config.Protocols.SetHTTP1(true)
	r.server.Config.Protocols.SetUnencryptedHTTP2(true)
	r.server.Start()
	t.Cleanup(r.server.Close)
	return r
}

func (r *rig) open(ctx context.Context, t Target, c Credential) (Way, error) {
	r.opens.Add(1)
	if t.Sandbox != box || c.Token != token && c.Key == "" {
		return Way{}, fault.New(fault.Unauthenticated, "no").Because("token")
	}
	if r.hold != nil {
		select {
		case <-r.hold:
		case <-ctx.Done():
			return Way{}, ctx.Err()
		}
	}
	generation := r.generation.Load()
	r.inUse.Add(1)
	return Way{Sandbox: box, Generation: generation, Done: sync.OnceFunc(func() { r.inUse.Add(-1) }),
		Dial: func(ctx context.Context, port int) (net.Conn, error) {
			r.dials.Add(1)
			if port != 3000 {
				return nil, fault.New(fault.Unavailable, "nothing listens").Because("nothing_listens").After(time.Second)
			}
			if generation != r.generation.Load() {
				return nil, net.ErrClosed
			}
			var d net.Dialer
			c, err := d.DialContext(ctx, "tcp", r.program.Addr().String())
			if err == nil {
				r.mu.Lock()
				r.conns = append(r.conns, c)
				r.mu.Unlock()
			}
			return c, err
		}}, nil
}

// reboot ends the present boot and all of its connections.
func (r *rig) reboot() {
	r.generation.Add(1)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.conns {
		_ = c.Close()
	}
	r.conns = nil
}

// request makes one for the program, with the right token.
func (r *rig) request(method, path, body string) *http.Request {
	var in io.Reader
	if body != "" {
		in = strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(r.t.Context(), method, r.server.URL+path, in)
	if err != nil {
		r.t.Fatal(err)
	}
	req.Host = name
	req.Header.Set("X-Hutch-Token", token)
	return req
}

func (r *rig) do(req *http.Request) (int, string, http.Header) {
	r.t.Helper()
	client := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	res, err := client.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return res.StatusCode, string(body), res.Header
}

// What the program sees is the caller's request without what is hutch's.
func TestWhatTheProgramSees(t *testing.T) {
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		body, _ := io.ReadAll(q.Body)
		fmt.Fprintf(w, "%s %s host=%s cookie=%q token=%q key=%q for=%q prefix=%q agent=%q body=%s", q.Method, q.RequestURI, q.Host, q.Header["Cookie"],
			q.Header.Get("X-Hutch-Token"), q.Header.Get("X-Api-Key"), q.Header.Get("X-Forwarded-For"), q.Header.Get("X-Forwarded-Prefix"), q.UserAgent(), body)
	}), nil, nil)
	check := func(req *http.Request, want string) {
		t.Helper()
		if status, body, _ := r.do(req); status != 200 || body != want {
			t.Errorf("%d\n%s, want\n%s", status, body, want)
		}
	}
	rest := ` token="" key="" for="127.0.0.1" prefix="" agent="Go-http-client/1.1" body=`
	check(r.request("POST", "/a%2Fb?x=1&x=%zz&y", "hello"), `POST /a%2Fb?x=1&x=%zz&y host=`+name+` cookie=[]`+rest+`hello`)
	req := r.request("GET", "/?a=b&hutch_token="+token+"&c", "")
	req.Header.Del("X-Hutch-Token")
	req.Header.Set("X-Forwarded-For", "10.0.0.1")
	check(req, `GET /?a=b&c host=`+name+` cookie=[]`+rest)
	req = r.request("GET", "/", "")
	req.Header.Del("X-Hutch-Token")
	req.Header.Set("Cookie", "a=b; hutch_token="+token+"; c=d")
	check(req, `GET / host=`+name+` cookie=["a=b; c=d"]`+rest)
	req = r.request("GET", "/", "")
	req.Header.Set("X-Api-Key", "the program's own")
	check(req, `GET / host=`+name+` cookie=[] token="" key="the program's own" for="127.0.0.1" prefix="" agent="Go-http-client/1.1" body=`)
	req.Header.Del("X-Hutch-Token")
	req.Header.Set("X-Api-Key", "hutch_key")
	check(req, `GET / host=`+name+` cookie=[]`+rest)

	req = r.request("GET", "/p/3000-"+box[4:]+"/a%2Fb?c", "")
	req.Host = ""
	host := strings.TrimPrefix(r.server.URL, "http://")
	check(req, `GET /a%2Fb?c host=`+host+` cookie=[] token="" key="" for="127.0.0.1" prefix="/p/3000-`+box[4:]+`" agent="Go-http-client/1.1" body=`)
	if _, _, h := r.do(req); !strings.HasPrefix(h.Get("Content-Security-Policy"), "sandbox ") {
		t.Errorf("a page on the API's origin: %v", h)
	}
	req = r.request("GET", "/x", "")
	req.Host = ""
	req.Header.Set("E2b-Sandbox-Id", box)
	req.Header.Set("E2b-Sandbox-Port", "3000")
	check(req, `GET /x host=`+host+` cookie=[]`+rest)
	req.Header.Set("E2b-Sandbox-Port", "49983")
	check(req, "the API")
	if n := r.inUse.Load(); n != 0 {
		t.Errorf("%d uses are still counted", n)
	}
}

// A browser's token goes from the address into a cookie; a program's request is answered
// as it is.
func TestBrowserIsGivenACookie(t *testing.T) {
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") }), nil, nil)
	req := r.request("GET", "//evil.example/a?b=c&hutch_token="+token, "")
	req.Header.Del("X-Hutch-Token")
	req.Header.Set("Sec-Fetch-Mode", "navigate")
	status, _, h := r.do(req)
	if cookie := h.Get("Set-Cookie"); status != 303 || h.Get("Location") != "/evil.example/a?b=c" || !strings.HasPrefix(cookie, "hutch_token="+token+"; Path=/; HttpOnly; SameSite=Lax") {
		t.Errorf("%d %v", status, h)
	}
	req.Header.Del("Sec-Fetch-Mode")
	if status, body, _ := r.do(req); status != 200 || body != "hello" {
		t.Errorf("%d %s", status, body)
	}
	// A wrong one is no reason to set a cookie.
	req = r.request("GET", "/?hutch_token=hutchp_wrong", "")
	req.Header.Del("X-Hutch-Token")
	req.Header.Set("Sec-Fetch-Mode", "navigate")
	if status, _, h := r.do(req); status != 401 || h.Get("Set-Cookie") != "" {
		t.Errorf("%d %v", status, h)
	}
}

// N5: no connection of an older boot is used again, and one that ends below a request
// that can be repeated is no error.
func TestNewBootNewConnections_N5(t *testing.T) {
	arrived, release := make(chan struct{}, 8), make(chan struct{})
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path == "/slow" {
			arrived <- struct{}{}
			select {
			case <-release:
			case <-q.Context().Done():
			}
		}
		fmt.Fprint(w, "hello")
	}), nil, nil)
	for range 3 {
		if status, _, _ := r.do(r.request("GET", "/", "")); status != 200 {
			t.Fatal(status)
		}
	}
	if n := r.dials.Load(); n != 1 {
		t.Errorf("%d connections for three requests", n)
	}
	for range 5 { // at once after each, while the old connections look well
		r.reboot()
		if status, _, _ := r.do(r.request("GET", "/", "")); status != 200 {
			t.Fatal(status)
		}
		if status, _, _ := r.do(r.request("POST", "/", "body")); status != 200 {
			t.Fatal(status)
		}
	}
	done := make(chan int, 2)
	for _, method := range []string{"GET", "POST"} {
		go func() {
			status, _, _ := r.do(r.request(method, "/slow", map[string]string{"POST": "body"}[method]))
			done <- status
		}()
		<-arrived
	}
	close(release)
	r.reboot()
	got := []int{<-done, <-done}
	for _, status := range got { // the POST may have been answered, and is never sent twice
		if status != 200 && status != 503 {
			t.Errorf("%v", got)
		}
	}
}

// Z5: what cannot be answered is 503 with a time to try again, never 502, and a program
// that answers garbage, too much or never harms nobody else.
func TestHostilePrograms(t *testing.T) {
	for what, answer := range map[string]string{
		"nothing": "", "garbage": "\x00\x01\x02 what?\r\n\r\n", "half a header": "HTTP/1.1 200 OK\r\nA",
		"a header without end": "HTTP/1.1 200 OK\r\n" + strings.Repeat("A: "+strings.Repeat("x", 1000)+"\r\n", 1000),
		"another protocol":     "SSH-2.0-OpenSSH_9.2\r\n", "interim answers": strings.Repeat("HTTP/1.1 103 Early Hints\r\nLink: "+strings.Repeat("x", 1000)+"\r\n\r\n", 1000),
		"a status of nine": "HTTP/1.1 999999999 X\r\n\r\n",
	} {
		t.Run(what, func(t *testing.T) {
			r := newRig(t, nil, func(c net.Conn) {
				defer c.Close()
				_, _ = bufio.NewReader(c).ReadString('\n')
				_, _ = io.WriteString(c, answer)
			}, nil)
			status, _, h := r.do(r.request("GET", "/", ""))
			if status != 503 || h.Get("Retry-After") == "" {
				t.Errorf("%d %v", status, h)
			}
			req := r.request("GET", "/", "")
			req.Host = "1" + name // 13000
			if status, body, _ := r.do(req); status != 503 || body != "nothing_listens" {
				t.Errorf("%d %s", status, body)
			}
		})
	}
	r := newRig(t, nil, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := http.DefaultClient.Do(r.request("GET", "/", "").WithContext(ctx)); err == nil {
		t.Error("a program that never answers has answered")
	}
	for end := time.Now().Add(10 * time.Second); r.inUse.Load() != 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the use goes on after its caller went away")
		}
	}
}

// Requests are held up to a bound; what is past it is told to come again.
func TestHeldRequestsAreBounded_Z5(t *testing.T) {
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") }), nil, func(c *Config) { c.HeldMost = 8 })
	r.hold = make(chan struct{})
	status := make(chan int, 20)
	for range 20 {
		go func() { s, _, _ := r.do(r.request("GET", "/", "")); status <- s }()
	}
	count := map[int]int{}
	for range 12 {
		count[<-status]++
	}
	close(r.hold)
	for range 8 {
		count[<-status]++
	}
	if count[200] != 8 || count[503] != 12 {
		t.Errorf("%v", count)
	}
	if s, _, _ := r.do(r.request("GET", "/", "")); s != 200 {
		t.Errorf("%d after the wake", s)
	}
}

// Wrong tokens are looked at only so often; a public port, and other sandboxes, are not
// affected.
func TestWrongTokensAreBounded(t *testing.T) {
	r := newRig(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), nil, nil)
	req := r.request("GET", "/", "")
	req.Header.Set("X-Hutch-Token", "hutchp_wrong")
	for range wrongMost {
		if s, _, _ := r.do(req); s != 401 {
			t.Fatal(s)
		}
	}
	before := r.opens.Load()
	if s, _, h := r.do(req); s != 429 || h.Get("Retry-After") == "" || r.opens.Load() != before {
		t.Errorf("%d", s)
	}
	req.Header.Del("X-Hutch-Token")
	if s, _, _ := r.do(req); s != 401 {
		t.Errorf("without a token: %d", s)
	}
	req = r.request("GET", "/", "")
	req.Host = strings.Replace(name, "01m", "01k", 1)
	if s, _, _ := r.do(req); s != 401 {
		t.Errorf("another sandbox: %d", s)
	}
}

// An event stream comes through as it is written, an upload is not kept anywhere, and a
// connection that is upgraded carries bytes both ways.
func TestStreams(t *testing.T) {
	next := make(chan string)
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		switch q.URL.Path {
		case "/events":
			w.Header().Set("Content-Type", "text/event-stream")
			w.(http.Flusher).Flush()
			for text := range next {
				fmt.Fprintf(w, "data: %s\n\n", text)
				w.(http.Flusher).Flush()
			}
		case "/upload":
			n, err := io.Copy(io.Discard, q.Body)
			fmt.Fprint(w, n, err)
		case "/upgrade":
			conn, rw, err := w.(http.Hijacker).Hijack()
			if err != nil {
				return
			}
			defer conn.Close()
			fmt.Fprint(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
			_, _ = io.Copy(conn, rw)
		}
	}), nil, nil)
	res, err := http.DefaultClient.Do(r.request("GET", "/events", ""))
	if err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(res.Body)
	for _, text := range []string{"one", "two"} { // each is read before the next is written
		next <- text
		if line, err := in.ReadString('\n'); line != "data: "+text+"\n" {
			t.Fatalf("%q %v", line, err)
		}
		_, _ = in.ReadString('\n')
	}
	close(next)
	_ = res.Body.Close()

	req := r.request("PUT", "/upload", "")
	req.Body, req.ContentLength = io.NopCloser(io.LimitReader(zeros{}, 200<<20)), -1
	if _, body, _ := r.do(req); body != "209715200 <nil>" {
		t.Errorf("an upload of 200 MiB: %s", body)
	}

	c, err := net.Dial("tcp", strings.TrimPrefix(r.server.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "GET /upgrade HTTP/1.1\r\nHost: %s\r\nX-Hutch-Token: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", name, token)
	both := bufio.NewReader(c)
	up, err := http.ReadResponse(both, nil)
	if err != nil || up.StatusCode != 101 {
		t.Fatal(up, err)
	}
	for _, text := range []string{"hello\n", "again\n"} {
		fmt.Fprint(c, text)
		if line, err := both.ReadString('\n'); line != text {
			t.Fatalf("%q %v", line, err)
		}
	}
	if r.inUse.Load() != 1 {
		t.Error("an open connection is no use")
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// FuzzHost: whatever a Host says, what is found is a sandbox's id and a port, and it is
// found again by the name that they have.
func FuzzHost(f *testing.F) {
	for _, s := range []string{name, name + ":4880", "0-" + box[4:] + ".localhost", "3000-x.localhost", "[::1]:80", "localhost", "..", "3000-" + box[4:] + ".box.example.com.", "65536-" + box[4:] + ".localhost"} {
		f.Add(s)
	}
	domains := []string{"localhost", "box.example.com"}
	f.Fuzz(func(t *testing.T, host string) {
		got, ok := ParseHost(host, domains)
		if !ok {
			return
		}
		if len(got.Sandbox) != len(box) || !strings.HasPrefix(got.Sandbox, "sbx_") || got.Port < 1 || got.Port > 65535 || got.Prefix != "" {
			t.Fatalf("%q is %+v", host, got)
		}
		if again, ok := ParseHost(Label(got.Sandbox, got.Port)+".localhost:1", domains); !ok || again != got {
			t.Fatalf("%q is %+v, then %+v", host, got, again)
		}
	})
}

func TestParseHost(t *testing.T) {
	for host, want := range map[string]Target{
		name: {box, 3000, ""}, strings.ToUpper(name) + ":4880": {box, 3000, ""}, "65535-" + box[4:] + ".box.example.com.": {box, 65535, ""},
		"65536-" + box[4:] + ".localhost": {}, "0-" + box[4:] + ".localhost": {}, "03-" + box[4:] + ".localhost": {}, box[4:] + ".localhost": {},
		"3000-" + box[4:]: {}, "3000-" + box[4:] + ".example.com": {}, "3000-" + box[4:] + ".x.localhost": {}, "a.3000-" + box[4:] + ".localhost": {},
	} {
		if got, _ := ParseHost(host, []string{"localhost", "box.example.com"}); got.Sandbox != want.Sandbox || want.Sandbox != "" && got != want {
			t.Errorf("%s: %+v, want %+v", host, got, want)
		}
	}
}
