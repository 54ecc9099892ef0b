package apiserver

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/hutchrun/hutch/internal/fault"
)

// Limits of a JSON body.
const (
	maxBody     = 1 << 20 // bytes
	maxDepth    = 32      // of arrays and objects in each other
	maxNumber   = 32      // characters of a number
	bodyTimeout = 30 * time.Second
)

// readBody reads a JSON body whole and checks it against the contract; the handler
// finds it in the request again. A length that is announced too large is refused
// before a byte is read. The value is nil where there is no body.
func readBody(w http.ResponseWriter, r *http.Request, op *operation) (any, error) {
	if r.ContentLength > maxBody {
		return nil, tooLarge(maxBody)
	}
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(bodyTimeout)) // a writer without deadlines is a test's
	raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		if tooBig, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return nil, tooLarge(tooBig.Limit)
		}
		return nil, fault.Wrap(err, fault.InvalidArgument, "the body did not come whole")
	}
	_ = control.SetReadDeadline(time.Time{})
	r.Body = io.NopCloser(bytes.NewReader(raw))
	if len(bytes.TrimSpace(raw)) == 0 {
		if op.body == nil || op.bare {
			return nil, nil
		}
		return nil, fault.New(fault.InvalidArgument, "the body is missing; this call takes a JSON object")
	}
	media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || media != "application/json" {
		return nil, fault.New(fault.InvalidArgument, "the body's Content-Type is %.100q; this call takes application/json",
			r.Header.Get("Content-Type"))
	}
	value, err := parseJSON(raw)
	if err != nil {
		return nil, err
	}
	return value, op.checkBody(value)
}

// hashRequest tells apart the calls that one request key may not stand for together:
// by the body as canonical JSON, in which names are sorted and numbers have one form,
// and by the query. How long a caller waits does not matter.
func hashRequest(body any, query url.Values) ([]byte, error) {
	if body == nil {
		body = map[string]any{}
	}
	canonical, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	query = maps.Clone(query)
	delete(query, "wait")
	for name, values := range query {
		if slices.Equal(values, []string{""}) {
			delete(query, name)
		}
	}
	sum := sha256.Sum256(append(canonical, query.Encode()...))
	return sum[:], nil
}

// parseJSON reads one JSON object: nothing after it, no name twice in an object, no
// NUL, no bytes that are not UTF-8, no nesting or number beyond the limits.
func parseJSON(raw []byte) (any, error) {
	if !utf8.Valid(raw) {
		return nil, fault.New(fault.InvalidArgument, "the body is not UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	value, err := parseValue(d, 0)
	if err != nil {
		if f, ok := errors.AsType[*fault.Fault](err); ok {
			return nil, f
		}
		return nil, fault.Wrap(err, fault.InvalidArgument, "the body is not JSON, from byte %d on", d.InputOffset())
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, fault.New(fault.InvalidArgument, "the body goes on after its JSON object, at byte %d", d.InputOffset())
	}
	if _, ok := value.(map[string]any); !ok {
		return nil, fault.New(fault.InvalidArgument, "the body is no JSON object")
	}
	return value, nil
}

func parseValue(d *json.Decoder, depth int) (any, error) {
	token, err := d.Token()
	if err != nil {
		return nil, err
	}
	switch t := token.(type) {
	case json.Delim:
		if depth++; depth > maxDepth {
			return nil, fault.New(fault.InvalidArgument, "the body is nested deeper than %d", maxDepth)
		}
		if t == '{' {
			return parseObject(d, depth)
		}
		return parseArray(d, depth)
	case json.Number:
		f, err := t.Float64()
		if err != nil || len(t) > maxNumber {
			return nil, fault.New(fault.InvalidArgument, "the number %.40s… is too large or too long", t)
		}
		return f, nil
	case string:
		if strings.ContainsRune(t, 0) {
			return nil, fault.New(fault.InvalidArgument, "a text in the body contains a NUL")
		}
		return t, nil
	}
	return token, nil
}

func parseObject(d *json.Decoder, depth int) (any, error) {
	object := map[string]any{}
	for d.More() {
		token, err := d.Token()
		if err != nil {
			return nil, err
		}
		name, _ := token.(string) // the decoder takes nothing else for a name
		if strings.ContainsRune(name, 0) {
			return nil, fault.New(fault.InvalidArgument, "a field's name contains a NUL")
		}
		if _, twice := object[name]; twice {
			return nil, fault.New(fault.InvalidArgument, "the field %.100q is there twice", name)
		}
		if object[name], err = parseValue(d, depth); err != nil {
			return nil, err
		}
	}
	_, err := d.Token()
	return object, err
}

func parseArray(d *json.Decoder, depth int) (any, error) {
	array := []any{}
	for d.More() {
		v, err := parseValue(d, depth)
		if err != nil {
			return nil, err
		}
		array = append(array, v)
	}
	_, err := d.Token()
	return array, err
}

// streamIdle is how long a file's next bytes may take. Input for a command has no
// such limit: somebody may be typing it.
const streamIdle = 2 * time.Minute

// checkStream checks what a call that takes bytes says they are.
func checkStream(w http.ResponseWriter, r *http.Request, op *operation) error {
	control := http.NewResponseController(w)
	if op.id == "writeFile" {
		r.Body = &timedBody{ReadCloser: r.Body, control: control}
	} else if stopping, ok := r.Context().Value(stoppingKey{}).(context.Context); ok {
		// Nothing else would end the read of somebody's idle terminal at a shutdown.
		release := context.AfterFunc(stopping, func() { _ = control.SetReadDeadline(time.Now()) })
		context.AfterFunc(r.Context(), func() { release() })
	}
	kind := r.Header.Get("Content-Type")
	if kind == "" {
		return nil
	}
	if media, _, err := mime.ParseMediaType(kind); err != nil || media != "application/octet-stream" {
		return fault.New(fault.InvalidArgument, "the body's Content-Type is %.100q; this call takes application/octet-stream", kind)
	}
	return nil
}

// timedBody is a body whose every read has a deadline.
type timedBody struct {
	io.ReadCloser
	control *http.ResponseController
}

// Read sets the deadline anew, and takes it away at the end.
func (b *timedBody) Read(p []byte) (int, error) {
	_ = b.control.SetReadDeadline(time.Now().Add(streamIdle)) // a writer without deadlines is a test's
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		_ = b.control.SetReadDeadline(time.Time{})
	}
	return n, err
}
