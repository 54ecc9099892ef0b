package cli

import (
	"context"
	_ "embed"
	"errors"
	"net"
	"net/http"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/mcp"
)

//go:embed skill.md
var skill string

func (a *app) skillCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "skill",
		Short:   "Print the guide for agents",
		Long:    "Print a guide, in Markdown, of how an agent works with hutch: for its skills, or for its instructions.",
		Example: "mkdir -p ~/.claude/skills/hutch && hutch skill > ~/.claude/skills/hutch/SKILL.md",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := a.env.Stdout.Write([]byte(skill))
			return err
		},
	}
}

func (a *app) mcpCommand() *cobra.Command {
	var listen string
	cmd := &cobra.Command{
		Use:   "mcp",
		Short: "Give sandboxes to agents over the Model Context Protocol",
		Long: "Serve the Model Context Protocol on stdin and stdout, with the server and the key of the current context: tools to make, list, " +
			"fork, sleep, wake, stop and delete sandboxes, to run commands in them and to read and write their files.\n\n" +
			"With --listen it serves streamable HTTP in place of that, at /mcp of a loopback address. Each request then has to bring " +
			"an API key of its own (`Authorization: Bearer KEY`), and may do what that key may.",
		Example: "hutch mcp\nhutch mcp --listen 127.0.0.1:4881\nclaude mcp add hutch -- hutch mcp",
		Args:    cobra.NoArgs,
	}
	cmd.Flags().StringVar(&listen, "listen", "", "serve HTTP at this loopback address, such as 127.0.0.1:4881")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		if listen != "" {
			return a.serveMCP(ctx, cmd, listen)
		}
		c, err := a.newClient(cmd)
		if err != nil {
			return err
		}
		if err := mcp.Stdio(ctx, mcp.New(c.Client, a.env.Version)); err != nil {
			return fault.Wrap(err, fault.Internal, "the client on stdin does not keep to the protocol (%v)", err)
		}
		return nil
	}
	return cmd
}

// serveMCP serves HTTP until the context ends.
func (a *app) serveMCP(ctx context.Context, cmd *cobra.Command, listen string) error {
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return fault.Wrap(err, fault.InvalidArgument, "--listen %s is no address; write one as 127.0.0.1:4881", listen)
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return fault.New(fault.InvalidArgument, "--listen %s is not a loopback address, and keys are not sent without TLS; put a proxy that speaks TLS before one such as 127.0.0.1:4881", listen)
	}
	conn, err := a.connect()
	if err != nil {
		return err
	}
	connect := func(key string) (*api.Client, error) {
		own := conn
		own.APIKey, own.KeyFrom = key, ""
		c, err := a.clientOf(cmd, own)
		if err != nil {
			return nil, err
		}
		return c.Client, nil
	}
	if _, err := connect(""); err != nil {
		return err // the server's address, say
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", listen)
	if err != nil {
		return fault.Wrap(err, fault.Unavailable, "cannot listen at %s (%v); choose another port", listen, err)
	}
	mux := http.NewServeMux()
	mux.Handle("/mcp", mcp.Handler(connect, a.env.Version))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	defer context.AfterFunc(ctx, func() {
		ending, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		if server.Shutdown(ending) != nil {
			_ = server.Close()
		}
	})()
	a.note("MCP at http://%s/mcp", l.Addr())
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fault.Wrap(err, fault.Internal, "the listener at %s failed", listen)
	}
	return nil
}
