package apiserver

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

// Limits of a connection. A request's header must come within headerTimeout, so that
// slow senders do not hold connections; bodies and streams have no limit as a whole,
// JSON bodies one of their own.
const (
	headerTimeout = 10 * time.Second
	idleTimeout   = 2 * time.Minute
	maxHeader     = 64 << 10 // bytes
)

// stoppingKey is where a request's context has the server's, which ends at shutdown.
type stoppingKey struct{}

// HTTPServer gives a server for the handler with the limits of a connection set. Its
// Shutdown ends streams and waits at once, and lets short calls finish.
func HTTPServer(h http.Handler, log *slog.Logger) *http.Server {
	stopping, stop := context.WithCancel(context.Background())
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		BaseContext: func(net.Listener) context.Context {
			return context.WithValue(context.Background(), stoppingKey{}, stopping)
		},
	}
	srv.Protocols = new(http.Protocols)
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	srv.RegisterOnShutdown(stop)
	return srv
}

// Lasting gives the context of what may last as long as its client: it ends with the
// request, and already when the server begins to shut down.
func Lasting(ctx context.Context) (context.Context, context.CancelFunc) {
	out, cancel := context.WithCancel(ctx)
	stopping, ok := ctx.Value(stoppingKey{}).(context.Context)
	if !ok {
		return out, cancel
	}
	release := context.AfterFunc(stopping, cancel)
	return out, func() { release(); cancel() }
}

// CheckListen refuses an address that others than this machine reach, unless it is
// served with TLS: API keys would cross the network in the clear (R6).
func CheckListen(addr string, tls bool) error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return fault.Wrap(err, fault.InvalidArgument, "cannot listen on %q: give an address and a port, as 127.0.0.1:4880", addr)
	}
	if tls || strings.EqualFold(host, "localhost") {
		return nil
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsLoopback() {
		return nil
	}
	return fault.New(fault.FailedPrecondition, "will not listen on %s without TLS: keys would cross the network in the clear; "+
		"give a certificate, or listen on 127.0.0.1 behind a proxy that has one", addr).Because("tls_required")
}

// OnLoopback refuses calls by a name that is not this machine's own: pages of a web site
// whose name was pointed at it.
func OnLoopback(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := hostname(r.Host)
		if ip := net.ParseIP(name); !strings.EqualFold(name, "localhost") && (ip == nil || !ip.IsLoopback()) {
			http.Error(w, "call this address by its number, as 127.0.0.1", http.StatusForbidden)
			return
		}
		h.ServeHTTP(w, r)
	})
}
