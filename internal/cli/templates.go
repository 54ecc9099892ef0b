package cli

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

func (a *app) templatesCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "templates",
		Short:   "Make, list and remove what sandboxes are made from",
		Example: "hutch templates build base --debian\nhutch templates build node --from-oci registry.example.com/node:24\nhutch templates ls",
	}, a.templatesLsCommand(), a.templatesBuildCommand(), a.templatesRmCommand())
}

func (a *app) templatesLsCommand() *cobra.Command {
	var p paging
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "ls",
		Short:   "List templates",
		Example: "hutch templates ls --json",
		Args:    named(),
	}
	p.add(cmd)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, _ []string) error {
		list, next, err := a.listTemplates(ctx, c, p)
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(listDocument("templates", list, next))
		}
		rows := make([][]string, 0, len(list))
		for _, t := range list {
			rows = append(rows, []string{
				clean(t.V.Name), cut(clean(t.V.Version), 20), formatDisk(t.V.Bytes), orDash(t.V.User),
				formatAge(a.env.Now().Sub(t.V.CreatedAt.Time)), clean(t.V.Source),
			})
		}
		defer a.noteMore(next)
		return a.printTable([]string{"NAME", "VERSION", "SIZE", "USER", "AGE", "SOURCE"}, rows)
	})
	return cmd
}

func (a *app) listTemplates(ctx context.Context, c *client, p paging) (list []doc[api.Template], next string, err error) {
	next, err = p.collect(func(limit api.Limit, cursor string) (int, string, error) {
		page, err := read[struct {
			Templates  []doc[api.Template] `json:"templates"`
			NextCursor string              `json:"next_cursor"`
		}](c.ListTemplates(ctx, &api.ListTemplatesParams{Limit: &limit, Cursor: cursor}))
		list = append(list, page.Templates...)
		return len(page.Templates), page.NextCursor, err
	})
	return list, next, err
}

func (a *app) templatesBuildCommand() *cobra.Command {
	var body api.CreateTemplate
	var key string
	var asJSON, ifMissing bool
	cmd := &cobra.Command{
		Use:   "build NAME (--from-oci REF | --debian)",
		Short: "Make a template, or a new version of one",
		Long: "Make a template from an OCI image (a registry reference, or a layout directory or tar file on the host) or from the " +
			"built-in Debian recipe, and wait until it is there. Sandboxes that exist keep the version that they were made from. " +
			"The template base is what sandboxes are made from where none is named; made from an image it is that image, until --debian brings the built-in one back.",
		Example: "hutch templates build base --debian\nhutch templates build node --from-oci registry.example.com/node:24",
		Args:    named("NAME"),
	}
	cmd.Flags().StringVar(&body.Source.Oci, "from-oci", "", "the OCI image to make it from: a name in a registry, or the path of a layout directory or tar file on the server's machine")
	cmd.Flags().BoolVar(&body.Source.Debian, "debian", false, "make it from the built-in Debian recipe")
	cmd.MarkFlagsOneRequired("from-oci", "debian")
	cmd.MarkFlagsMutuallyExclusive("from-oci", "debian")
	cmd.Flags().BoolVar(&ifMissing, "if-missing", false, "do nothing where a template of this name is there")
	addRequestKey(cmd, &key)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		body.Name = args[0]
		body.Source.Oci = absolute(body.Source.Oci)
		if ifMissing {
			list, _, err := a.listTemplates(ctx, c, paging{all: true})
			if err != nil {
				return err
			}
			if i := slices.IndexFunc(list, func(t doc[api.Template]) bool { return t.V.Name == body.Name }); i >= 0 {
				return a.sayTemplate(list[i], "is there already", asJSON)
			}
		}
		start := a.env.Now()
		made, err := a.buildTemplate(ctx, c, keyOr(key), body)
		if err != nil {
			return err
		}
		if err := a.sayTemplate(made, "in "+formatTook(a.env.Now().Sub(start)), asJSON); err != nil || asJSON {
			return err
		}
		a.noteDefault(made.V)
		return nil
	})
	return cmd
}

// absolute makes the path of a local image one that the server finds too; what is no
// path here is the name of an image in a registry. A name that was meant for a file which
// is not there becomes a path as well, so that the server says so and asks no registry.
func absolute(ref string) string {
	if ref == "" {
		return ref
	}
	if _, err := os.Stat(ref); err != nil && !meansFile(ref) {
		return ref
	}
	if abs, err := filepath.Abs(ref); err == nil {
		return abs
	}
	return ref
}

// meansFile says whether a name that no file has is more likely a file's than an
// image's: it begins like a path, ends like an archive, or a file differs from it in
// capital letters only.
func meansFile(ref string) bool {
	if strings.HasPrefix(ref, ".") || strings.HasPrefix(ref, "/") {
		return true
	}
	for _, end := range []string{".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst", ".oci", ".zip"} {
		if strings.HasSuffix(strings.ToLower(ref), end) {
			return true
		}
	}
	entries, err := os.ReadDir(filepath.Dir(ref))
	return err == nil && slices.ContainsFunc(entries, func(e os.DirEntry) bool { return strings.EqualFold(e.Name(), filepath.Base(ref)) })
}

// sayTemplate prints a template that is there now.
func (a *app) sayTemplate(t doc[api.Template], how string, asJSON bool) error {
	if asJSON {
		return a.printJSON(t)
	}
	a.say("%s", clean(t.V.Name))
	a.note("%s, %s %s", clean(t.V.Version), formatDisk(t.V.Bytes), how)
	return nil
}

// defaultTemplate is what sandboxes are made from where no template is named.
const defaultTemplate = "base"

// noteDefault says that the built-in template is another one now, and how to get it back.
func (a *app) noteDefault(t api.Template) {
	if t.Name != defaultTemplate || t.Source == "debian" {
		return
	}
	a.note("new sandboxes without --template are made from %s now, as %s is; `hutch templates build %s --debian` brings the built-in one back",
		clean(t.Source), t.Name, t.Name)
}

// buildTemplate starts a build and waits for its end, as for that of any operation: the
// build belongs to the server, which begins it anew when it was restarted meanwhile.
func (a *app) buildTemplate(ctx context.Context, c *client, key string, body api.CreateTemplate) (made doc[api.Template], err error) {
	defer a.progress.spin()()
	a.progress.set("building " + body.Name)
	begun, err := read[struct {
		Operation doc[api.Operation] `json:"operation"`
		Template  *doc[api.Template] `json:"template"`
	}](c.CreateTemplate(ctx, &api.CreateTemplateParams{IdempotencyKey: key}, body))
	if err != nil {
		return made, err
	}
	op, err := a.await(ctx, c, body.Name, begun.Operation, a.progress.set)
	if err != nil {
		return made, err
	}
	err = a.keepAsking(ctx, func() (bool, error) {
		made, err = read[doc[api.Template]](c.GetTemplate(ctx, body.Name))
		return false, err
	})
	if fault.Is(err, fault.NotFound) {
		err = fault.Wrap(&waitError{Operation: op.V.ID}, fault.NotFound,
			"the template %s was built and removed again meanwhile; build it again", body.Name)
	}
	return made, err
}

func (a *app) templatesRmCommand() *cobra.Command {
	var yes, asJSON bool
	var key string
	cmd := &cobra.Command{
		Use:     "rm NAME",
		Aliases: []string{"delete"},
		Short:   "Remove a template",
		Long:    "Remove a template. Sandboxes made from it go on. It is asked first; where there is no terminal to ask on, --yes is needed.",
		Example: "hutch templates rm node --yes",
		Args:    named("NAME"),
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	addJSON(cmd, &asJSON)
	addRequestKey(cmd, &key)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		if !yes {
			if err := done(c.GetTemplate(ctx, args[0])); err != nil {
				return err
			}
			if err := a.confirm(ctx, "remove the template "+args[0]); err != nil {
				return err
			}
		}
		if err := done(c.DeleteTemplate(ctx, args[0], &api.DeleteTemplateParams{IdempotencyKey: keyOr(key)})); err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(map[string]string{"template": args[0]})
		}
		a.note("removed %s", clean(args[0]))
		return nil
	})
	return cmd
}
