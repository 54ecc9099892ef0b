package cli

import "testing"

func TestCleanURL(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"http://127.0.0.1:4880":          "http://127.0.0.1:4880",
		"http://127.0.0.1:4880/":         "http://127.0.0.1:4880",
		"\thttp://127.0.0.1:4880//\n":    "http://127.0.0.1:4880",
		"HTTP://Hutch.Example.COM:80":    "http://hutch.example.com",
		"https://hutch.example.com:443/": "https://hutch.example.com",
		"https://hutch.example.com:80":   "https://hutch.example.com:80",
		"https://example.com/Hutch/":     "https://example.com/Hutch",
		"http://[::1]:4880/":             "http://[::1]:4880",
		"http://[::1]:80":                "http://[::1]",
		"":                               "",
		"nonsense":                       "",
		"127.0.0.1:4880":                 "",
		"localhost:4880":                 "",
		"ftp://host":                     "",
		"http://":                        "",
		"http://:4880":                   "",
		"http://user:secret@host":        "",
		"http://host/?q":                 "",
		"http://host\x00":                "",
		"http://host:port":               "",
	} {
		if got, ok := cleanURL(in); got != want || ok != (want != "") {
			t.Errorf("cleanURL(%q) = %q, %v; want %q", in, got, ok, want)
		}
	}
}

// The key of a context goes to its own server however that is written, and to no other.
func TestSameServer(t *testing.T) {
	t.Parallel()
	for _, same := range [][2]string{
		{"http://localhost:4880", "http://127.0.0.1:4880"}, {"http://LOCALHOST:4880/", "http://127.0.0.1:4880"},
		{"http://localhost", "http://127.0.0.1:80/"}, {"https://A.example/", "https://a.EXAMPLE:443"},
	} {
		if !sameServer(same[0], same[1]) || !sameServer(same[1], same[0]) {
			t.Errorf("%q and %q are not the same", same[0], same[1])
		}
	}
	for _, other := range [][2]string{
		{"http://localhost:4880", "http://127.0.0.1:4881"}, {"http://localhost:4880", "https://localhost:4880"},
		{"http://[::1]:4880", "http://127.0.0.1:4880"}, {"http://localhost.evil:4880", "http://127.0.0.1:4880"},
		{"http://127.0.0.1.evil:4880", "http://127.0.0.1:4880"}, {"http://a/x", "http://a/y"}, {"nonsense", "http://a"},
	} {
		if sameServer(other[0], other[1]) {
			t.Errorf("%q and %q are the same", other[0], other[1])
		}
	}
}
