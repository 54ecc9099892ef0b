package apiserver

import (
	"encoding/json"
	"net/http"
)

// lines writes a stream of JSON lines, each sent at once. A stream answers for every
// call that has one, as the generated response types do for the others.
type lines func(send func(line any) error) error

// write sends the header with the first line's flush and then runs the stream.
func (l lines) write(w http.ResponseWriter) error {
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.WriteHeader(http.StatusOK)
	control := http.NewResponseController(w)
	_ = control.Flush() // a writer that cannot flush is a test's
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	return l(func(line any) error {
		if err := encoder.Encode(line); err != nil {
			return err
		}
		return control.Flush()
	})
}

// VisitStartCommandResponse streams a started command.
func (l lines) VisitStartCommandResponse(w http.ResponseWriter) error { return l.write(w) }

// VisitGetCommandOutputResponse streams a command's output.
func (l lines) VisitGetCommandOutputResponse(w http.ResponseWriter) error { return l.write(w) }

// VisitWatchFilesResponse streams changes of files.
func (l lines) VisitWatchFilesResponse(w http.ResponseWriter) error { return l.write(w) }

// VisitCreateTemplateResponse streams the making of a template.
func (l lines) VisitCreateTemplateResponse(w http.ResponseWriter) error { return l.write(w) }
