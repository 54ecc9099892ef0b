package gateway

import (
	"net/http"
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

// Bounds of wrong credentials: so many from one address for one sandbox in a time.
const (
	wrongMost   = 60
	wrongWindow = time.Minute
	wrongKept   = 10_000 // addresses that are remembered
)

// wrong counts refused credentials, so that nobody tries them by the million.
type wrong struct {
	mu   sync.Mutex
	from map[string]wrongCount
}

type wrongCount struct {
	since time.Time
	n     int
}

// wait gives how long a caller has to wait before its credential is looked at, 0 for not.
func (w *wrong) wait(who string, now time.Time) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	if c := w.from[who]; c.n >= wrongMost {
		return max(0, wrongWindow-now.Sub(c.since))
	}
	return 0
}

func (w *wrong) add(who string, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := w.from[who]
	if now.Sub(c.since) >= wrongWindow {
		c = wrongCount{since: now}
	}
	c.n++
	if w.from == nil || len(w.from) >= wrongKept {
		w.from = map[string]wrongCount{}
	}
	w.from[who] = c
}
