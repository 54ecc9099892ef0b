package gateway

import (
	"fmt"
	"io"
	"net/http"
	"testing"
)

// gRPC needs HTTP/2 all the way to the program, both directions at once, and trailers. A
// plain request that came by HTTP/2 goes on by HTTP/1.1, which every program speaks.
func TestHTTP2ToTheProgram(t *testing.T) {
	r := newRig(t, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Trailer", "Grpc-Status")
		w.Header().Set("Content-Type", q.Header.Get("Content-Type"))
		fmt.Fprintf(w, "%s te=%s\n", q.Proto, q.Header.Get("Te"))
		w.(http.Flusher).Flush() // before the request has ended
		body, _ := io.ReadAll(q.Body)
		_, _ = w.Write(body)
		w.Header().Set("Grpc-Status", "0")
	}), nil, nil)
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	client := http.Client{Transport: &http.Transport{Protocols: &protocols}}
	for media, want := range map[string]string{"application/grpc+proto": "HTTP/2.0 te=trailers\n", "text/plain": "HTTP/1.1 te=trailers\n"} {
		in, out := io.Pipe()
		req := r.request(http.MethodPost, "/svc/Method", "")
		req.Body, req.ContentLength = in, -1
		req.Header.Set("Content-Type", media)
		req.Header.Set("Te", "trailers")
		if media == "text/plain" { // HTTP/1.1 answers after the request
			_ = out.Close()
		}
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(media, err)
		}
		head := make([]byte, len(want))
		if _, err := io.ReadFull(res.Body, head); err != nil || string(head) != want {
			t.Errorf("%s: %q %v, want %q", media, head, err, want)
		}
		if media != "text/plain" {
			_, _ = io.WriteString(out, "more")
			_ = out.Close()
			if rest, err := io.ReadAll(res.Body); err != nil || string(rest) != "more" {
				t.Errorf("%s: the rest is %q %v", media, rest, err)
			}
		}
		_, _ = io.Copy(io.Discard, res.Body)
		_ = res.Body.Close()
		if got := res.Trailer.Get("Grpc-Status"); got != "0" {
			t.Errorf("%s: the trailer is %q", media, got)
		}
	}
}
