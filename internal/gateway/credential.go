package gateway

import (
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"time"
)

// Credential is what a request shows to reach a port that is not public.
type Credential struct {
	Token string // a connection token
	Key   string // an API key
}

const (
	// TokenName is what the parameter and the cookie with a connection token are called.
	TokenName   = "hutch_token"
	tokenHeader = "X-Hutch-Token"
	keyHeader   = "X-Api-Key"
	keyPrefix   = "hutch_"
)

// credential takes what a request shows of hutch's out of it: programs in sandboxes do not
// see their callers' credentials. byQuery says that a token came with the address.
func credential(r *http.Request) (c Credential, byQuery bool) {
	if c.Token = r.Header.Get(tokenHeader); c.Token != "" {
		r.Header.Del(tokenHeader)
	}
	if key := r.Header.Get(keyHeader); strings.HasPrefix(key, keyPrefix) {
		c.Key = key
		r.Header.Del(keyHeader)
	}
	if rest, value, ok := cutQuery(r.URL.RawQuery); ok {
		r.URL.RawQuery = rest
		if byQuery = c.Token == ""; byQuery {
			c.Token = value
		}
	}
	if value, ok := cutCookie(r.Header); ok && c.Token == "" {
		c.Token = value
	}
	return c, byQuery
}

// cutQuery takes the token's parameter out of a query and leaves the rest byte for byte.
func cutQuery(raw string) (rest, value string, ok bool) {
	if !strings.Contains(raw, TokenName) {
		return raw, "", false
	}
	var keep []string
	for part := range strings.SplitSeq(raw, "&") {
		if v, is := strings.CutPrefix(part, TokenName+"="); is {
			if plain, err := url.QueryUnescape(v); err == nil {
				value, ok = plain, true
			}
			continue
		}
		keep = append(keep, part)
	}
	return strings.Join(keep, "&"), value, ok
}

// cutCookie takes the token's cookie out and leaves the others as they are.
func cutCookie(h http.Header) (value string, ok bool) {
	lines := h["Cookie"]
	if !strings.Contains(strings.Join(lines, ";"), TokenName) {
		return "", false
	}
	h.Del("Cookie")
	for _, line := range lines {
		var keep []string
		for part := range strings.SplitSeq(line, ";") {
			part = strings.TrimSpace(part)
			if v, is := strings.CutPrefix(part, TokenName+"="); is {
				value, ok = v, true
				continue
			}
			if part != "" {
				keep = append(keep, part)
			}
		}
		if len(keep) > 0 {
			h.Add("Cookie", strings.Join(keep, "; "))
		}
	}
	return value, ok
}

// remember answers a browser that came with a token in the address: the token goes into a
// cookie and out of the address, where it would be seen and passed on.
func remember(w http.ResponseWriter, r *http.Request, t Target, token string) {
	http.SetCookie(w, &http.Cookie{
		Name: TokenName, Value: token, Path: t.Prefix + "/", HttpOnly: true, Secure: r.TLS != nil, SameSite: http.SameSiteLaxMode,
	})
	to := r.URL.EscapedPath()
	for strings.HasPrefix(to, "//") { // that would be another host's
		to = to[1:]
	}
	if r.URL.RawQuery != "" {
		to += "?" + r.URL.RawQuery
	}
	w.Header().Set("Location", to)
	w.Header().Set("Referrer-Policy", "no-referrer")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusSeeOther)
}

// Bounds of wrong credentials in a time: from one address for one sandbox, and for all of
// them, as their ids can be made up.
const (
	wrongMost    = 60
	wrongMostAll = 10 * wrongMost
	wrongWindow  = time.Minute
	wrongKept    = 10_000 // counts that are kept
)

// wrong counts refused credentials, so that nobody tries them by the million.
type wrong struct {
	mu   sync.Mutex
	from map[wrongOf]wrongCount
}

// wrongOf is what is counted: an address, and the sandbox that it asked for or "" for any.
type wrongOf struct{ address, sandbox string }

func (o wrongOf) most() int {
	if o.sandbox == "" {
		return wrongMostAll
	}
	return wrongMost
}

type wrongCount struct {
	since time.Time
	n     int
}

// wait gives how long a caller has to wait before its credential is looked at, 0 for not.
func (w *wrong) wait(address, sandbox string, now time.Time) (wait time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, of := range []wrongOf{{address, sandbox}, {address, ""}} {
		if c := w.from[of]; c.n >= of.most() {
			wait = max(wait, wrongWindow-now.Sub(c.since))
		}
	}
	return wait
}

func (w *wrong) add(address, sandbox string, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.from == nil {
		w.from = map[wrongOf]wrongCount{}
	}
	for _, of := range []wrongOf{{address, ""}, {address, sandbox}} {
		c, known := w.from[of]
		if now.Sub(c.since) >= wrongWindow {
			c = wrongCount{since: now}
		}
		if !known && len(w.from) >= wrongKept {
			w.forget(now)
		}
		c.n++
		w.from[of] = c
	}
}

// forget makes room. Who has to wait is forgotten only where there is nobody else: or a
// flood of made-up names would end every wait.
func (w *wrong) forget(now time.Time) {
	maps.DeleteFunc(w.from, func(_ wrongOf, c wrongCount) bool { return now.Sub(c.since) >= wrongWindow })
	if len(w.from) >= wrongKept {
		maps.DeleteFunc(w.from, func(of wrongOf, c wrongCount) bool { return c.n < of.most() && of.sandbox != "" })
	}
	if len(w.from) >= wrongKept {
		clear(w.from)
	}
}

// remote gives the address that a request came from, of IPv6 the network that one
// subscriber has. A proxy on this machine names it in the last place of X-Forwarded-For;
// what stands before that, or comes from elsewhere, is the caller's own word.
func remote(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return host
	}
	if lines := r.Header.Values("X-Forwarded-For"); ip.IsLoopback() && len(lines) > 0 {
		last := lines[len(lines)-1]
		if told, err := netip.ParseAddr(strings.TrimSpace(last[strings.LastIndexByte(last, ',')+1:])); err == nil {
			ip = told
		}
	}
	if ip = ip.Unmap().WithZone(""); ip.Is6() {
		return netip.PrefixFrom(ip, 64).Masked().String()
	}
	return ip.String()
}
