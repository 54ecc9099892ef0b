package mcp

import (
	"bytes"
	"context"
	"encoding/base64"
	"io"
	"time"
	"unicode/utf8"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// maxFile is how much of a file one call of read_file gives.
const maxFile = 1 << 20

type readIn struct {
	Sandbox string `json:"sandbox" jsonschema:"name or id of the sandbox"`
	Path    string `json:"path" jsonschema:"a relative one starts at /workspace"`
	Offset  int64  `json:"offset,omitempty" jsonschema:"the first byte that is wanted"`
	Limit   int64  `json:"limit,omitempty" jsonschema:"how many bytes at most; 1 MiB where left out and at most"`
	User    string `json:"user,omitempty"`
}

type readOut struct {
	Content  string `json:"content"`
	Encoding string `json:"encoding" jsonschema:"utf-8, or base64 where the bytes are no UTF-8 text"`
	Bytes    int64  `json:"bytes" jsonschema:"how many bytes of the file content stands for"`
	More     bool   `json:"more,omitempty" jsonschema:"the file goes on; read again from offset + bytes"`
}

type writeIn struct {
	Sandbox  string `json:"sandbox" jsonschema:"name or id of the sandbox"`
	Path     string `json:"path" jsonschema:"a relative one starts at /workspace; missing directories are made"`
	Content  string `json:"content"`
	Encoding string `json:"encoding,omitempty" jsonschema:"utf-8 (where left out) or base64"`
	Mode     string `json:"mode,omitempty" jsonschema:"permission bits in octal, as 0755"`
	User     string `json:"user,omitempty"`
}

type listFilesIn struct {
	Sandbox string `json:"sandbox" jsonschema:"name or id of the sandbox"`
	Path    string `json:"path" jsonschema:"the directory"`
	Depth   int    `json:"depth,omitempty" jsonschema:"how many levels; 1 where left out"`
	Cursor  string `json:"cursor,omitempty" jsonschema:"next_cursor of the page before"`
	User    string `json:"user,omitempty"`
}

type fileLine struct {
	Path     string `json:"path"`
	Type     string `json:"type"`
	Size     int64  `json:"size"`
	Mode     string `json:"mode"`
	Modified string `json:"modified_at"`
}

type filesOut struct {
	Files      []fileLine `json:"files"`
	NextCursor string     `json:"next_cursor,omitempty"`
}

func fileOf(i api.FileInfo) fileLine {
	return fileLine{Path: i.Path, Type: string(i.Type), Size: i.Size, Mode: i.Mode, Modified: i.ModifiedAt.UTC().Format(time.RFC3339)}
}

func (t *tools) addFiles(s *mcp.Server) {
	add(s, "read_file", "Read a file of a sandbox.", looks, t.readFile)
	add(s, "write_file", "Write a file of a sandbox whole. The old one stays until all of the new one is there.", destroys, t.writeFile)
	add(s, "list_files", "List a directory of a sandbox.", looks, t.listFiles)
}

func (t *tools) readFile(ctx context.Context, in readIn) (readOut, error) {
	if in.Offset < 0 || in.Limit < 0 {
		return readOut{}, fault.New(fault.InvalidArgument, "offset and limit are not negative")
	}
	limit := int64(maxFile)
	if in.Limit > 0 {
		limit = min(in.Limit, maxFile)
	}
	body, err := open(t.api.ReadFile(ctx, in.Sandbox, &api.ReadFileParams{Path: in.Path, User: in.User, Offset: in.Offset}))
	if err != nil {
		return readOut{}, err
	}
	defer body.Close()
	data, err := io.ReadAll(io.LimitReader(body, limit+1))
	if err != nil {
		return readOut{}, fault.Wrap(err, fault.Unavailable, "the file did not come whole; read it again")
	}
	out := readOut{Encoding: "utf-8", More: int64(len(data)) > limit}
	data = data[:min(int64(len(data)), limit)]
	if out.More { // a character that the end cuts belongs to the next part
		for n := 0; n < utf8.UTFMax && n < len(data); n++ {
			if utf8.Valid(data[:len(data)-n]) {
				data = data[:len(data)-n]
				break
			}
		}
	}
	out.Bytes, out.Content = int64(len(data)), string(data)
	if !utf8.Valid(data) {
		out.Content, out.Encoding = base64.StdEncoding.EncodeToString(data), "base64"
	}
	return out, nil
}

func (t *tools) writeFile(ctx context.Context, in writeIn) (fileLine, error) {
	data := []byte(in.Content)
	switch in.Encoding {
	case "", "utf-8":
	case "base64":
		var err error
		if data, err = base64.StdEncoding.DecodeString(in.Content); err != nil {
			return fileLine{}, fault.Wrap(err, fault.InvalidArgument, "the content is no base64")
		}
	default:
		return fileLine{}, fault.New(fault.InvalidArgument, "the encoding %.20q is neither utf-8 nor base64", in.Encoding)
	}
	info, err := read[api.FileInfo](t.api.WriteFileWithBody(ctx, in.Sandbox,
		&api.WriteFileParams{Path: in.Path, User: in.User, Mode: in.Mode}, "application/octet-stream", bytes.NewReader(data)))
	return fileOf(info), err
}

func (t *tools) listFiles(ctx context.Context, in listFilesIn) (filesOut, error) {
	params := &api.ListFilesParams{Path: in.Path, User: in.User, Cursor: in.Cursor}
	if in.Depth != 0 {
		params.Depth = &in.Depth
	}
	page, err := read[api.FileList](t.api.ListFiles(ctx, in.Sandbox, params))
	out := filesOut{Files: []fileLine{}, NextCursor: page.NextCursor}
	for _, i := range page.Files {
		out.Files = append(out.Files, fileOf(i))
	}
	return out, err
}
