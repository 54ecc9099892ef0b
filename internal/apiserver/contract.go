package apiserver

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
)

// contract is what openapi.yaml says of requests, by the pattern of the mux ("POST
// /v1/sandboxes"): so the description that people read is the one that is enforced.
type contract map[string]*operation

// operation is what one call takes.
type operation struct {
	id     string
	params map[string]*openapi3.Schema // of the query
	array  map[string]bool             // params that may be given more than once
	header map[string]*openapi3.Schema
	body   *openapi3.Schema // of the JSON body; nil where there is none
	bare   bool             // the body may be left out
	binary bool             // the body is a stream of bytes
	public bool             // needs no key
	scope  control.Scopes   // what its key has to have
}

// loadContract reads the description.
func loadContract(spec []byte) (contract, error) {
	doc, err := openapi3.NewLoader().LoadFromData(spec)
	if err != nil {
		return nil, fmt.Errorf("read openapi.yaml: %w", err)
	}
	c := contract{}
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			o := newOperation(item, op)
			if o.scope, err = scopeOf(method, item, op); err != nil {
				return nil, fmt.Errorf("read openapi.yaml: %s %s: %w", method, path, err)
			}
			c[method+" "+path] = o
		}
	}
	return c, nil
}

// scopeOf reads which scope a call needs: what it or its path says with x-scope, else read
// for what only reads, and write.
func scopeOf(method string, item *openapi3.PathItem, op *openapi3.Operation) (control.Scopes, error) {
	for _, extensions := range []map[string]any{op.Extensions, item.Extensions} {
		name, given := extensions["x-scope"]
		if !given {
			continue
		}
		text, ok := name.(string)
		if !ok {
			return 0, fmt.Errorf("the x-scope %v is no text", name)
		}
		return control.ParseScopes([]string{text})
	}
	if method == http.MethodGet {
		return control.ScopeRead, nil
	}
	return control.ScopeWrite, nil
}

func newOperation(item *openapi3.PathItem, op *openapi3.Operation) *operation {
	o := &operation{
		id: op.OperationID, params: map[string]*openapi3.Schema{}, array: map[string]bool{}, header: map[string]*openapi3.Schema{},
		public: op.Security != nil && len(*op.Security) == 0,
	}
	for _, ref := range slices.Concat(item.Parameters, op.Parameters) {
		switch p := ref.Value; p.In {
		case openapi3.ParameterInQuery:
			schema := p.Schema.Value
			if o.array[p.Name] = schema.Type.Is(openapi3.TypeArray); o.array[p.Name] {
				schema = schema.Items.Value
			}
			o.params[p.Name] = schema
		case openapi3.ParameterInHeader:
			o.header[p.Name] = p.Schema.Value
		}
	}
	if op.RequestBody != nil {
		if media := op.RequestBody.Value.Content.Get("application/json"); media != nil {
			o.body, o.bare = media.Schema.Value, !op.RequestBody.Value.Required
		} else {
			o.binary = true
		}
	}
	return o
}

// checkQuery refuses parameters that the call does not take and values outside their
// limits. An empty value counts as one that was not given.
func (o *operation) checkQuery(query url.Values) error {
	for name, values := range query {
		schema, known := o.params[name]
		if !known {
			return unknown(o.id, "parameter", name)
		}
		if len(values) > 1 && !o.array[name] {
			return fault.New(fault.InvalidArgument, "the parameter %s was given %d times; give it once", name, len(values))
		}
		for _, v := range values {
			if err := checkParam(name, v, schema); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkHeaders checks the headers that the call knows.
func (o *operation) checkHeaders(h http.Header) error {
	for name, schema := range o.header {
		if err := checkParam(name, h.Get(name), schema); err != nil {
			return err
		}
	}
	return nil
}

func checkParam(name, value string, schema *openapi3.Schema) error {
	if value == "" {
		return nil
	}
	if strings.ContainsRune(value, 0) {
		return fault.New(fault.InvalidArgument, "the parameter %s contains a NUL", name)
	}
	var v any = value
	switch {
	case schema.Type.Is(openapi3.TypeInteger):
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return fault.Wrap(err, fault.InvalidArgument, "the parameter %s takes a whole number", name)
		}
		v = float64(n)
	case schema.Type.Is(openapi3.TypeBoolean):
		if value != "true" && value != "false" {
			return fault.New(fault.InvalidArgument, "the parameter %s takes true or false", name)
		}
		v = value == "true"
	}
	if err := schema.VisitJSON(v); err != nil {
		return fault.Wrap(err, fault.InvalidArgument, "the parameter %s is refused: %s", name, reasonOf(err))
	}
	return nil
}

// checkBody checks a decoded JSON body. A call without a body takes none, or an
// empty object.
func (o *operation) checkBody(body any) error {
	schema := o.body
	if schema == nil {
		schema = bodyless
	}
	if err := o.checkFields("", body, schema); err != nil {
		return err
	}
	err := schema.VisitJSON(body)
	if err == nil {
		return nil
	}
	path := ""
	if se, ok := errors.AsType[*openapi3.SchemaError](err); ok {
		path = strings.Join(se.JSONPointer(), ".")
		if s, isText := se.Value.(string); isText {
			if capability, later := upcoming(o.id, path+"="+s); later {
				return notYet(path+" "+s, capability)
			}
		}
	}
	if path == "" {
		return fault.Wrap(err, fault.InvalidArgument, "the body is refused: %s", reasonOf(err))
	}
	return fault.Wrap(err, fault.InvalidArgument, "the field %s is refused: %s", path, reasonOf(err))
}

var bodyless = openapi3.NewObjectSchema().WithoutAdditionalProperties()

// checkFields finds the first field that the schema does not have, and names it.
func (o *operation) checkFields(path string, value any, schema *openapi3.Schema) error {
	for _, ref := range schema.AllOf {
		if err := o.checkFields(path, value, ref.Value); err != nil {
			return err
		}
	}
	object, ok := value.(map[string]any)
	closed := schema.AdditionalProperties.Has != nil && !*schema.AdditionalProperties.Has
	if !ok || !closed {
		return nil
	}
	for _, name := range sortedKeys(object) {
		full := strings.TrimPrefix(path+"."+name, ".")
		field, known := schema.Properties[name]
		if !known {
			return unknown(o.id, "field", full)
		}
		if err := o.checkFields(full, object[name], field.Value); err != nil {
			return err
		}
	}
	return nil
}

func sortedKeys(m map[string]any) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// quoted lists the values that are allowed.
func quoted(values []any) string {
	list := make([]string, len(values))
	for i, v := range values {
		list[i] = fmt.Sprintf("%q", v)
	}
	return strings.Join(list, ", ")
}

// reasonOf gives the short text of a schema error. Of what was sent it quotes no more
// than a word in the place of one of a few.
func reasonOf(err error) string {
	se, ok := errors.AsType[*openapi3.SchemaError](err)
	if !ok || se.Reason == "" {
		return "it has not the shape that the API describes"
	}
	if given, isText := se.Value.(string); isText && se.SchemaField == "enum" {
		return fmt.Sprintf("%.40q is none of %s", given, quoted(se.Schema.Enum))
	}
	if se.SchemaField != "oneOf" {
		return se.Reason
	}
	return "it has not the shape that the API describes"
}

func unknown(operation, what, name string) error {
	if capability, later := upcoming(operation, name); later {
		return notYet(name, capability)
	}
	return fault.New(fault.InvalidArgument, "this call has no %s %.100q; see /openapi.yaml for those that it has", what, name)
}

func notYet(name, capability string) error {
	return fault.New(fault.Unsupported, "%s is not supported by this version of hutch; leave it out", name).Because(capability)
}

// later are the fields and values that the product knows but this version does not
// act on yet, each with the capability that is missing. They are refused, never
// accepted in silence.
var later = map[string]map[string]string{
	"createSandbox": {
		"snapshot": "snapshots", "command": "tasks", "ports": "ports",
		"runtime": "runtime_choice", "harness": "harness", "region": "regions", "volumes": "volumes",
	},
	"createTemplate": {
		"services": "template_services", "on_fork": "fork_hooks", "resources": "template_resources", "grants": "secret_proxy",
	},
}

func upcoming(operation, name string) (capability string, ok bool) {
	capability, ok = later[operation][name]
	return capability, ok
}
