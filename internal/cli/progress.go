package cli

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

var spinnerFrames = []rune("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")

// progress is one line on stderr that is rewritten in place. Where stderr is no
// terminal it shows nothing at all.
type progress struct {
	out io.Writer // nil: show nothing

	mu    sync.Mutex
	shown bool
	text  string
	frame int
}

// visible says whether progress is shown.
func (p *progress) visible() bool { return p.out != nil }

// spin keeps the line moving until the returned function is called, which takes it
// away. Nothing shows before the first set.
func (p *progress) spin() (stop func()) {
	if !p.visible() {
		return func() {}
	}
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				p.hide()
				return
			case <-tick.C:
				p.draw()
			}
		}
	}()
	return sync.OnceFunc(func() { close(quit); <-done })
}

// set changes the text of the line and shows it at once.
func (p *progress) set(text string) {
	p.change(text)
	p.draw()
}

// change changes the text that the spinner shows next.
func (p *progress) change(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text = clean(text)
}

func (p *progress) draw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.text == "" || !p.visible() {
		return
	}
	p.frame = (p.frame + 1) % len(spinnerFrames)
	p.shown = true
	fmt.Fprintf(p.out, "\r\x1b[K%c %s", spinnerFrames[p.frame], cut(p.text, p.width()-3))
}

// width gives the columns of the line, so that it never wraps.
func (p *progress) width() int {
	if f, ok := p.out.(*os.File); ok {
		if cols, _ := windowSize(f); cols > 0 {
			return cols
		}
	}
	return 80
}

// cut shortens text to n characters.
func cut(text string, n int) string {
	if runes := []rune(text); len(runes) > n {
		return string(runes[:max(n-1, 0)]) + "…"
	}
	return text
}

// clear takes the line away, so that something else can be written.
func (p *progress) clear() {
	if !p.visible() {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.shown {
		fmt.Fprint(p.out, "\r\x1b[K")
		p.shown = false
	}
}

// hide takes the line away until the next set.
func (p *progress) hide() {
	p.set("")
	p.clear()
}
