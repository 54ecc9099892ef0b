package cli

import (
	"context"
	"errors"
	"io"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// attachTail is how much of a terminal's output is shown again when one comes back.
const attachTail = 64 << 10

func (a *app) attachCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "attach NAME [CMD]",
		Short: "Come back to a terminal in a sandbox",
		Long: "Come back to a terminal that `hutch exec --tty` made, with the last of its output, and end with its exit code. " +
			"Without CMD it is the one terminal that is open there. ctrl-] and then d leaves it again. " +
			"Terminals outlive their clients and sleeps; they end at a stop. Several may be attached at once.",
		Example: "hutch exec demo --tty --detach -- bash\nhutch attach demo",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 || len(args) == 2 {
				return nil
			}
			return fault.New(fault.InvalidArgument, "hutch attach takes the sandbox's NAME, and a command's id where several terminals are open")
		},
		Annotations:       map[string]string{annotationExec: "true"},
		ValidArgsFunction: a.completeNames,
	}
	var asJSON bool
	cmd.Flags().BoolVar(&asJSON, "json", false, "errors as JSON on stderr")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.newClient(cmd)
		if err != nil {
			return err
		}
		command, err := a.findTerminal(cmd.Context(), c, args)
		if err != nil {
			return err
		}
		ctx, leave := context.WithCancelCause(cmd.Context())
		defer leave(nil)
		s := &session{
			follower: follower{a: a, c: c, ref: args[0], id: command.ID, cursor: max(0, command.OutputBytes-attachTail)},
			body:     api.StartCommand{Pty: command.Pty, Stdin: command.Exit == nil}, offset: command.StdinOffset,
			running: make(chan struct{}), leave: leave, signals: make(chan string, 64),
		}
		close(s.running)
		s.signal("") // the size of this window, which has full screens drawn anew
		return s.attend(ctx, func() error { return s.resume(ctx, true) })
	}
	return cmd
}

// findTerminal gives the command that was named, or the only terminal that is open.
func (a *app) findTerminal(ctx context.Context, c *client, args []string) (api.Command, error) {
	if len(args) == 2 {
		command, err := read[api.Command](c.GetCommand(ctx, args[0], args[1]))
		if err == nil && command.Pty == nil {
			err = fault.New(fault.FailedPrecondition, "the command %s has no terminal; `hutch commands logs %s %s --follow` shows its output", args[1], args[0], args[1])
		}
		return command, err
	}
	var open []api.Command
	for params := (&api.ListCommandsParams{}); ; {
		page, err := read[api.CommandList](c.ListCommands(ctx, args[0], params))
		if err != nil {
			return api.Command{}, err
		}
		for _, command := range page.Commands {
			if command.Pty != nil && command.Exit == nil {
				open = append(open, command)
			}
		}
		if params.Cursor = page.NextCursor; params.Cursor == "" {
			break
		}
	}
	switch len(open) {
	case 1:
		return open[0], nil
	case 0:
		return api.Command{}, fault.New(fault.NotFound, "no terminal is open in %s; `hutch exec %s --tty -- bash` opens one", args[0], args[0])
	}
	return api.Command{}, fault.New(fault.InvalidArgument, "%d terminals are open in %s; name one of those that `hutch commands ls %s` lists", len(open), args[0], args[0])
}

func (a *app) commandsStdinCommand() *cobra.Command {
	var keepOpen, asJSON bool
	cmd := &cobra.Command{
		Use:   "stdin NAME CMD",
		Short: "Write to a command's input",
		Long: "Pass what comes on stdin on to a command that was started with --detach --stdin=always or --tty, behind what it has already. " +
			"Its end closes the command's input, unless --keep-open is given. NAME may be left out: the command is looked for in the " +
			"sandboxes that are ready then.",
		Example:           "echo hello | hutch commands stdin demo CMD --keep-open\nhutch commands stdin demo CMD < answers.txt",
		Args:              commandArgs,
		ValidArgsFunction: a.completeNames,
	}
	cmd.Flags().BoolVar(&keepOpen, "keep-open", false, "leave the command's input open")
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		ref, id, err := a.findCommand(ctx, c, cmd, args)
		if err != nil {
			return err
		}
		command, err := read[api.Command](c.GetCommand(ctx, ref, id))
		if err != nil {
			return err
		}
		s := &session{follower: follower{a: a, c: c, ref: ref, id: id}}
		began, offset := command.StdinOffset, command.StdinOffset
		buf := make([]byte, inputChunk)
		for {
			n, readErr := io.ReadFull(a.env.Stdin, buf)
			end := errors.Is(readErr, io.EOF) || errors.Is(readErr, io.ErrUnexpectedEOF)
			if readErr != nil && !end {
				return fault.Wrap(readErr, fault.Internal, "stdin cannot be read; %d bytes of it reached the command", offset-began)
			}
			if n > 0 || end && !keepOpen {
				if err := s.writeInput(ctx, buf[:n], offset, end && !keepOpen); err != nil {
					return err
				}
			}
			offset += int64(n)
			if end {
				break
			}
		}
		if !asJSON {
			return nil
		}
		return a.printJSON(map[string]any{"sandbox": ref, "command": id, "bytes": offset - began, "offset": offset})
	})
	return cmd
}
