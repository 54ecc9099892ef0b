package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// maxPublicKey is the longest file that is read as a public key.
const maxPublicKey = 8 << 10

func (a *app) sshKeysCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "ssh-keys",
		Short:   "Register, list and revoke the public keys that open sandboxes over SSH",
		Example: "hutch ssh-keys add ~/.ssh/id_ed25519.pub\nhutch ssh-keys ls\nhutch ssh-keys rm sshk_01k3c9a6xwe8htz0s6h1j2k3m4",
	}, a.sshKeysAddCommand(), a.sshKeysLsCommand(), a.sshKeysRmCommand())
}

func (a *app) sshKeysAddCommand() *cobra.Command {
	var asJSON bool
	var requestKey string
	var body api.AddSSHKey
	cmd := &cobra.Command{
		Use:   "add FILE",
		Short: "Register a public key",
		Long: "Register a public key, such as ~/.ssh/id_ed25519.pub; - reads it from stdin. Its holder works in all sandboxes of the project: " +
			"`ssh NAME@HOST -p 4822` opens a shell in the sandbox NAME, and wakes it where it sleeps. " +
			"The server serves SSH where it was started with --ssh-listen, or its settings have `ssh.listen`.",
		Example: "hutch ssh-keys add ~/.ssh/id_ed25519.pub\nhutch ssh-keys add ci.pub --name ci --project web",
		Args:    named("FILE"),
	}
	cmd.Flags().StringVar(&body.Name, "name", "", "what it is called (the key's comment where not given)")
	cmd.Flags().StringVar(&body.Project, "project", "", "for another project than the API key's own, with an operator's key")
	addRequestKey(cmd, &requestKey)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) (err error) {
		if body.PublicKey, err = a.readPublicKey(args[0]); err != nil {
			return err
		}
		key, err := read[doc[api.SSHKey]](c.AddSSHKey(ctx, &api.AddSSHKeyParams{IdempotencyKey: keyOr(requestKey)}, body))
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(key)
		}
		a.say("%s", clean(key.V.ID))
		a.note("%s (%s) opens the sandboxes of the project %s", clean(key.V.Fingerprint), clean(key.V.Name), clean(key.V.Project))
		return nil
	})
	return cmd
}

// readPublicKey reads a file, or stdin for "-".
func (a *app) readPublicKey(path string) (_ string, err error) {
	in := a.env.Stdin
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return "", fault.Wrap(err, fault.InvalidArgument, "cannot read %s: %s", path, errors.Unwrap(err))
		}
		defer f.Close()
		in = f
	}
	text, err := io.ReadAll(io.LimitReader(in, maxPublicKey+1))
	if err != nil {
		return "", err
	}
	if len(text) > maxPublicKey {
		return "", fault.New(fault.InvalidArgument, "%s is too long for a public key; name a file such as ~/.ssh/id_ed25519.pub", path)
	}
	if strings.Contains(string(text), "PRIVATE KEY") { // it does not leave this machine
		return "", fault.New(fault.InvalidArgument, "%s is a private key; name the public one, whose name ends in .pub", path)
	}
	return strings.TrimSpace(string(text)), nil
}

func (a *app) sshKeysLsCommand() *cobra.Command {
	var p paging
	var asJSON bool
	var project string
	cmd := &cobra.Command{
		Use:     "ls",
		Short:   "List the public keys",
		Example: "hutch ssh-keys ls --json",
		Args:    named(),
	}
	p.add(cmd)
	cmd.Flags().StringVar(&project, "project", "", "those of another project than the API key's own, with an operator's key")
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, _ []string) error {
		var list []doc[api.SSHKey]
		next, err := p.collect(func(limit api.Limit, cursor string) (int, string, error) {
			page, err := read[struct {
				SSHKeys    []doc[api.SSHKey] `json:"ssh_keys"`
				NextCursor string            `json:"next_cursor"`
			}](c.ListSSHKeys(ctx, &api.ListSSHKeysParams{Limit: &limit, Cursor: cursor, Project: project}))
			list = append(list, page.SSHKeys...)
			return len(page.SSHKeys), page.NextCursor, err
		})
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(listDocument("ssh_keys", list, next))
		}
		rows := make([][]string, 0, len(list))
		for _, k := range list {
			rows = append(rows, []string{clean(k.V.ID), clean(k.V.Name), clean(k.V.Fingerprint), formatTime(k.V.CreatedAt.Time)})
		}
		defer a.noteMore(next)
		return a.printTable([]string{"ID", "NAME", "FINGERPRINT", "CREATED"}, rows)
	})
	return cmd
}

func (a *app) sshKeysRmCommand() *cobra.Command {
	var yes, asJSON bool
	var requestKey string
	cmd := &cobra.Command{
		Use:     "rm ID",
		Aliases: []string{"delete"},
		Short:   "Revoke a public key",
		Long: "Revoke a public key: the next login with it is refused; connections that stand go on. " +
			"It is asked first; where there is no terminal to ask on, --yes is needed.",
		Example: "hutch ssh-keys rm sshk_01k3c9a6xwe8htz0s6h1j2k3m4 --yes",
		Args:    named("ID"),
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	addJSON(cmd, &asJSON)
	addRequestKey(cmd, &requestKey)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		if !yes {
			if err := a.confirm(ctx, "revoke the SSH key "+args[0]); err != nil {
				return err
			}
		}
		if err := done(c.DeleteSSHKey(ctx, args[0], &api.DeleteSSHKeyParams{IdempotencyKey: keyOr(requestKey)})); err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(map[string]string{"ssh_key": args[0]})
		}
		a.note("revoked %s", clean(args[0]))
		return nil
	})
	return cmd
}
