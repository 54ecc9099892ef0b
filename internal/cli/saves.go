package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/receipt"
)

func (a *app) keepCommand() *cobra.Command {
	return a.lifecycleCommand(lifecycle{
		use:   "keep",
		short: "Let sandboxes run on that could not be saved",
		long: "Let sandboxes run on that could not be put to sleep or stopped. One that could not be saved runs on, degraded (save_failed), " +
			"is not metered, and is tried again by itself. This ends that: it is metered from now on and not saved by itself, " +
			"and an auto-stop that failed begins anew.",
		call: func(ctx context.Context, c *client, name, key string) (*http.Response, error) {
			return c.KeepSandbox(ctx, name, &api.KeepSandboxParams{IdempotencyKey: key})
		},
		tell: func(ch change) string {
			name := clean(ch.Sandbox.V.Name)
			if ch.Outcome == api.OutcomeDone {
				return "no save of " + name + " has failed; it goes on as it is"
			}
			return name + " runs on, and is metered from now on"
		},
	})
}

func (a *app) undeleteCommand() *cobra.Command {
	var f changeFlags
	var params api.UndeleteSandboxParams
	cmd := &cobra.Command{
		Use:   "undelete NAME",
		Short: "Bring a deleted sandbox back",
		Long: "Bring a deleted sandbox back as a stopped one, with its disk; `hutch resume` boots it. Memory, tokens and address are gone. " +
			"NAME is its id or the name that it had; of several that had it, the one that was deleted last is meant. " +
			"Where another sandbox has the name now, it gets --name or a new one. `hutch ls --deleted` lists what can be brought back, and for how long.",
		Example: "hutch undelete demo\nhutch undelete sbx_01k3c9a6xwe8htz0s6h1j2k3m4 --name demo-2",
		Args:    named("NAME"),
	}
	cmd.Flags().StringVar(&params.Name, "name", "", "its new name (where not given, the one that it had, if that is free)")
	f.add(cmd)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		params.IdempotencyKey = f.key(args[0], false)
		ch, err := read[change](c.UndeleteSandbox(ctx, args[0], &params))
		if err != nil {
			return err
		}
		old := ch.Sandbox.V.Name
		stop := a.progress.spin()
		ch, err = a.finish(ctx, c, ch, &f, a.progress.set)
		stop()
		if err != nil {
			return err
		}
		name := clean(ch.Sandbox.V.Name)
		switch {
		case f.json:
			return a.printJSON(ch)
		case f.noWait && ch.Operation != nil:
			a.say("%s: operation %s (%s) goes on", name, ch.Operation.V.ID, ch.Operation.V.Kind)
		case name != clean(old) && params.Name == "":
			a.say("%s is back as %s, as another sandbox has its name; it is %s", clean(old), name, ch.Sandbox.V.State)
		default:
			a.say("%s is back; it is %s", name, ch.Sandbox.V.State)
		}
		return nil
	})
	return cmd
}

func (a *app) receiptCommand() *cobra.Command {
	var asJSON bool
	var operation string
	cmd := &cobra.Command{
		Use:   "receipt NAME",
		Short: "Show the signed receipt of a sandbox's last save",
		Long: "Show the signed receipt of the last sleep or stop of a sandbox, or of the one that --operation names. With --json it is the document " +
			"itself, which `hutch receipts verify` checks anywhere. A receipt names the saved memory by its digest; the contents of the disk " +
			"are not covered yet. A deleted sandbox is named by its id.",
		Example:           "hutch receipt demo\nhutch receipt demo --json > receipt.json",
		Args:              named("NAME"),
		ValidArgsFunction: a.completeNames,
	}
	cmd.Flags().StringVar(&operation, "operation", "", "of the save that this operation made")
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		doc, err := a.receiptOf(ctx, c, args[0], operation)
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(json.RawMessage(doc))
		}
		var shown struct {
			Receipt receipt.Receipt `json:"receipt"`
		}
		if err := json.Unmarshal([]byte(doc), &shown); err != nil {
			return fault.Wrap(err, fault.DataCorrupt, "the receipt cannot be read; `hutch receipt %s --json` shows it as it is", args[0])
		}
		return a.printFields(receiptFields(shown.Receipt))
	})
	return cmd
}

// receiptOf gives the last receipt of a sandbox, or that of an operation.
func (a *app) receiptOf(ctx context.Context, c *client, name, operation string) (string, error) {
	var found string
	_, err := paging{all: true}.collect(func(limit api.Limit, cursor string) (int, string, error) {
		page, err := read[api.ReceiptList](c.ListReceipts(ctx, name, &api.ListReceiptsParams{Limit: &limit, Cursor: cursor}))
		for _, rc := range page.Receipts {
			if operation == "" || rc.Operation == operation {
				found = rc.Document
			}
		}
		return len(page.Receipts), page.NextCursor, err
	})
	if err == nil && found == "" {
		err = fault.New(fault.NotFound, "there is no receipt: %s was not put to sleep or stopped yet, or not by this operation", name).Because("receipt")
	}
	return found, err
}

// receiptFields are what a receipt says, and what it does not, for people.
func receiptFields(r receipt.Receipt) [][2]string {
	fields := [][2]string{
		{"sandbox", r.Name + "  " + r.Sandbox}, {"save", r.Kind}, {"saved at", r.SavedAt}, {"operation", r.Operation},
		{"generation", fmt.Sprint(r.Generation)}, {"host", r.Host}, {"template", r.Template},
	}
	disk := formatDisk(r.Disk.SizeBytes)
	if r.Disk.Tree == nil {
		disk += ", saved in full; its contents are not covered by the signature yet"
	} else {
		disk += "  " + *r.Disk.Tree
	}
	fields = append(fields, [2]string{"disk", disk})
	if m := r.Memory; m != nil {
		fields = append(fields, [2]string{"memory", fmt.Sprintf("%s  %s (%s)", formatDisk(m.Bytes), m.Digest, m.Runtime)})
	}
	off := "no"
	if r.OffHost != nil {
		off = *r.OffHost
	}
	return append(fields, [2]string{"off the host", off}, [2]string{"signed by", r.Key})
}

func (a *app) receiptsCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "receipts",
		Short:   "Check the signed receipts of saves",
		Example: "hutch receipts key > hutch.pub\nhutch receipts verify receipt.json --key hutch.pub",
	}, a.receiptsVerifyCommand(), a.receiptsKeyCommand())
}

// mostReceipt bounds what is read of a file that is to be a receipt or a key.
const mostReceipt = 1 << 20

func (a *app) receiptsVerifyCommand() *cobra.Command {
	var keyFile string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "verify FILE",
		Short: "Check a receipt's signature",
		Long: "Check that a receipt (`hutch receipt --json`; - is stdin) is as it was signed. With --key, a file that `hutch receipts key` has written, " +
			"no server is needed; without it the server is asked for its keys. The exit code is 0 when the receipt holds, and that of " +
			"data_corrupt when anything in it was changed.",
		Example: "hutch receipts verify receipt.json --key hutch.pub\nhutch receipt demo --json | hutch receipts verify -",
		Args:    named("FILE"),
	}
	cmd.Flags().StringVar(&keyFile, "key", "", "file with the public key of the installation that issued it")
	addJSON(cmd, &asJSON)
	check := func(file, keys string) error {
		doc, err := a.readFile(file)
		if err != nil {
			return err
		}
		public, err := receipt.ParseKeys(keys)
		if err != nil {
			return err
		}
		r, err := receipt.Verify(doc, public...)
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(r)
		}
		a.say("the receipt holds: %s of %s (%s) at %s, signed by %s", clean(r.Kind), clean(r.Name), clean(r.Sandbox), clean(r.SavedAt), clean(r.Key))
		return nil
	}
	online := a.verb(func(ctx context.Context, c *client, args []string) error {
		keys, err := publicKeys(ctx, c)
		if err != nil {
			return err
		}
		return check(args[0], keys)
	})
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if keyFile == "" {
			return online(cmd, args)
		}
		keys, err := a.readFile(keyFile)
		if err != nil {
			return err
		}
		return check(args[0], string(keys))
	}
	return cmd
}

// publicKeys are the server's keys as a file has them.
func publicKeys(ctx context.Context, c *client) (string, error) {
	list, err := read[api.ReceiptKeyList](c.ListReceiptKeys(ctx))
	text := ""
	for _, k := range list.Keys {
		text += k.PublicKey + "\n"
	}
	return text, err
}

func (a *app) receiptsKeyCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "key",
		Short:   "Show the public key that receipts are signed with",
		Long:    "Show the public key that the installation signs receipts with, in the form that `hutch receipts verify --key` reads. It was made at the first start.",
		Example: "hutch receipts key > hutch.pub",
		Args:    named(),
	}
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, _ []string) error {
		if asJSON {
			list, err := read[doc[api.ReceiptKeyList]](c.ListReceiptKeys(ctx))
			if err != nil {
				return err
			}
			return a.printJSON(list)
		}
		keys, err := publicKeys(ctx, c)
		if err == nil {
			_, err = io.WriteString(a.env.Stdout, keys)
		}
		return err
	})
	return cmd
}

// readFile reads a small file; - is stdin.
func (a *app) readFile(path string) ([]byte, error) {
	from := a.env.Stdin
	if path != "-" {
		f, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fault.New(fault.NotFound, "there is no file %s", path)
		}
		if err != nil {
			return nil, fault.Wrap(err, fault.InvalidArgument, "the file %s cannot be read", path)
		}
		defer f.Close()
		from = f
	}
	if from == nil {
		return nil, fault.New(fault.InvalidArgument, "there is no stdin to read; name a file")
	}
	data, err := io.ReadAll(io.LimitReader(from, mostReceipt+1))
	switch {
	case err != nil:
		return nil, fault.Wrap(err, fault.InvalidArgument, "%s cannot be read", path)
	case len(data) > mostReceipt:
		return nil, fault.New(fault.TooLarge, "%s is larger than a receipt or a key can be (%d bytes)", path, mostReceipt)
	}
	return data, nil
}
