package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/apiserver"
	"github.com/hutchrun/hutch/internal/cli"
	"github.com/hutchrun/hutch/internal/config"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store/postgres"
)

func serverCommand(env cli.Env) *cobra.Command {
	var url, listen, path, prices string
	o := observing{getenv: env.Getenv}
	var events eventFlags
	cmd := &cobra.Command{
		Use:   "server",
		Short: "Serve the API without a host",
		Long: "Serve the API of an installation that keeps its state in PostgreSQL, beside its `hutch up` and on any machine that reaches the database. " +
			"It keeps nothing itself, needs no root and stays in the foreground. It reads everything, and takes the verbs on sandboxes, " +
			"which the `hutch up` that has them carries out. What needs a host at once is refused: new, exec, cp and building a template. " +
			"API keys are those of the installation.",
		Example: "HUTCH_DATABASE_URL=postgres://hutch@db/hutch hutch server --listen 127.0.0.1:4881",
		GroupID: "server",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := hideDatabaseURL(url); err != nil {
				return err
			}
			set, err := readSettings(env, path)
			if err != nil {
				return err
			}
			set.flags(cmd)
			o.settle(cmd, set)
			events.settle(cmd, set)
			_ = os.Unsetenv(databaseVariable) // the programs that this one starts do not find it
			if prices == "" {
				prices = set.prices()
			}
			return serveWithoutHost(cmd.Context(), env, set, prices, o, events)
		},
	}
	cmd.Flags().StringVar(&url, "database-url", "", databaseFlagHelp)
	cmd.Flags().StringVar(&listen, "listen", defaultListen, "address of the API; without TLS a loopback one only")
	cmd.Flags().StringVar(&prices, "prices", "", pricesFlagHelp)
	o.flags(cmd)
	events.add(cmd)
	cmd.Flags().StringVar(&path, "config", "", configFlagHelp)
	return cmd
}

func serveWithoutHost(ctx context.Context, env cli.Env, set settings, pricesText string, o observing, events eventFlags) (err error) {
	url, listen := set.text(config.DatabaseURL), set.text(config.Listen)
	if url == "" {
		return fault.New(fault.InvalidArgument, "a server keeps nothing itself; name its database with --database-url or %s", databaseVariable)
	}
	if err := apiserver.CheckListen(listen, false); err != nil {
		return err
	}
	prices, err := parsePrices(pricesText)
	if err != nil {
		return err
	}
	log := newLog(env)
	cfg := control.Config{Shared: true, Limits: set.limits(), Log: log}
	if err := events.apply(&cfg); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	front, err := openFront(listen, o, log, "schema")
	if err != nil {
		return err
	}
	defer front.close()
	db, err := postgres.Open(ctx, url, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	watched, metrics := front.watch(db, layout{}, nil)
	cfg.Store = watched
	ctl := control.New(cfg)
	if err := setPrices(ctx, ctl, log, prices); err != nil {
		return err
	}
	if err := ctl.Start(ctx); err != nil {
		return err
	}
	defer ctl.Close()
	return front.answer(ctx, ctl, metrics, false, func(url string) error {
		log.Info("the server is up", "url", url)
		return nil
	})
}

// newLog is the log of a server in the foreground; docs/logs.md describes it.
func newLog(env cli.Env) *slog.Logger {
	level := slog.LevelInfo
	if env.Getenv("HUTCH_DEBUG") != "" {
		level = slog.LevelDebug
	}
	options := &slog.HandlerOptions{Level: level}
	if env.Getenv("HUTCH_LOG_FORMAT") == "json" {
		return slog.New(slog.NewJSONHandler(env.Stderr, options))
	}
	return slog.New(slog.NewTextHandler(env.Stderr, options))
}
