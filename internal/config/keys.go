package config

import (
	"net"
	"net/url"
	"path/filepath"
	"regexp"
	"strings"
)

// Kind is how a key's value is written.
type Kind string

// The kinds. All but Count and Switch are TOML strings.
const (
	Text     Kind = "text"
	Size     Kind = "size"     // a number and a unit of bytes: 100GB, 512MiB
	Duration Kind = "duration" // a number and a unit of time: 90d, 24h, 30m, 10s
	Decimal  Kind = "decimal"  // an exact decimal in quotes: "0.000012"
	Count    Kind = "count"    // a whole number, without quotes
	Switch   Kind = "switch"   // true or false, without quotes
)

// Key is one setting of an installation.
type Key struct {
	Name    string // with dots for tables: prices.vcpu_second
	Kind    Kind
	Default string // as it is written, "" for none
	Unset   string // what happens where there is no default and nothing is set
	Doc     string
	Example string
	Choices []string // all that a Text may be, nil for anything
	Flag    string   // the flag of `hutch up` that wins over it, "" for none
	Env     string   // the variable that wins over it, "" for none
	Secret  bool     // is not shown
	Most    int64    // of a Count
	check   func(value string) (fault string)
}

// The names of the keys, for those who ask for their values.
const (
	Data          = "data"
	Listen        = "listen"
	PoolSize      = "pool_size"
	DatabaseURL   = "database_url"
	MachineStop   = "machine_stop"
	StopLimit     = "machine_stop_limit"
	MetricsListen = "metrics_listen"
	TracesTo      = "traces_endpoint"
	Domain        = "domain"
	Drain         = "drain"
	SSHListen     = "ssh.listen"
	Spares        = "network.spares"
	VCPUSecond    = "prices.vcpu_second"
	GiBSecond     = "prices.gib_second"
	ArchiveGB     = "prices.archive_gb_month"
	WebhookHTTP   = "webhooks.http"
	WebhookAllow  = "webhooks.allow"
	IdleSample    = "idle.sample"
	IdleMin       = "idle.window_min"
	KeepEvents    = "keep.events"
	KeepKeys      = "keep.request_keys"
	KeepBackups   = "keep.backups"
	KeepDeleted   = "keep.deleted"
	SaveRetry     = "saves.retry"
	LogSize       = "log.size"
	LogFiles      = "log.files"
)

// What becomes of sandboxes that run when the machine goes down (R7).
const (
	StopBySleep = "sleep"
	StopByStop  = "stop"
	StopLeave   = "leave"
)

// Keys are all that there are, in the order of the file: those without a table first.
var Keys = []Key{
	{
		Name: Data, Kind: Text, Default: "/var/lib/hutch", Example: "/srv/hutch", Flag: "data",
		Doc: "The directory of everything that hutch keeps: database, journals, disk pool, log, backups.", check: absolute,
	},
	{
		Name: Listen, Kind: Text, Default: "127.0.0.1:4880", Example: "127.0.0.1:4881", Flag: "listen",
		Doc: "The address of the API. Without TLS it is a loopback one.", check: address,
	},
	{
		Name: PoolSize, Kind: Size, Unset: "half of the free space", Example: "100GB", Flag: "pool-size",
		Doc: "The size of the disk pool's file, where the data directory's file system cannot share blocks. It counts when the pool is first made.",
	},
	{
		Name: DatabaseURL, Kind: Text, Unset: "SQLite in the data directory", Example: "postgres://hutch:secret@db/hutch",
		Flag: "database-url", Env: "HUTCH_DATABASE_URL", Secret: true,
		Doc: "A PostgreSQL database in place of SQLite, from the first start on. A file that has it must be readable by its owner only.",
	},
	{
		Name: MachineStop, Kind: Text, Default: StopBySleep, Example: StopByStop, Choices: []string{StopBySleep, StopByStop, StopLeave},
		Doc: "What becomes of sandboxes that run when the machine goes down or `hutch down --sleep` is called: `sleep` saves their memory " +
			"(one that cannot is stopped), `stop` saves their disks only, and the next start brings both back. `leave` does nothing: they fail (`host_restarted`), and their disks resume.",
	},
	{
		Name: StopLimit, Kind: Duration, Default: "5m", Example: "10m",
		Doc: "How long that may take. What runs after it is left as by `leave`.",
	},
	{
		Name: Domain, Kind: Text, Unset: "ports are served at `*.localhost` only", Example: "box.example.com", Flag: "domain",
		Doc: "The domain below which the ports of sandboxes are served too, as `https://PORT-ID.DOMAIN/`, by a proxy with TLS for `*.DOMAIN` that hands " +
			"requests to `listen` with their Host unchanged.",
		check: domain,
	},
	{
		Name: MetricsListen, Kind: Text, Unset: "only the API serves metrics, with a key", Example: "127.0.0.1:9464", Flag: "metrics-listen",
		Doc: "A loopback address that serves `/metrics` without a key.", check: address,
	},
	{
		Name: TracesTo, Kind: Text, Unset: "no traces are made", Example: "http://127.0.0.1:4318", Env: "OTEL_EXPORTER_OTLP_ENDPOINT",
		Doc: "The OpenTelemetry collector that traces are sent to, over OTLP as http/protobuf.", check: collector,
	},
	{
		Name: Drain, Kind: Duration, Unset: "it stops at once", Example: "5s", Flag: "drain",
		Doc: "How long `/readyz` says that the server stops before it does, at most 20s.",
	},
	{
		Name: Spares, Kind: Count, Default: "2", Example: "4", Most: 64,
		Doc: "How many sandbox networks are kept ready, which makes `new` faster.",
	},
	{
		Name: SSHListen, Kind: Text, Unset: "no SSH is served", Example: "127.0.0.1:4822", Flag: "ssh-listen",
		Doc: "The address of the SSH gateway: `ssh NAME@host -p 4822` with a key of `hutch ssh-keys add`.", check: address,
	},
	{
		Name: VCPUSecond, Kind: Decimal, Unset: "compute costs nothing", Example: "0.000012", Flag: "prices",
		Doc: "The price of one vCPU for a second. Prices are kept in the database until others are given, and are valid a minute after the start.",
	},
	{Name: GiBSecond, Kind: Decimal, Unset: "compute costs nothing", Example: "0.0000035", Flag: "prices", Doc: "The price of a GiB of memory for a second. It goes with `vcpu_second`."},
	{Name: ArchiveGB, Kind: Decimal, Unset: "0.012", Example: "0.012", Flag: "prices", Doc: "The price of a GB in cold storage for a month of 730 hours."},
	{Name: IdleSample, Kind: Duration, Default: "10s", Example: "30s", Flag: "idle-sample", Doc: "How often it is looked whether the sandboxes are idle whose sleep mode is `auto`."},
	{Name: IdleMin, Kind: Duration, Default: "30s", Example: "1m", Flag: "idle-min", Doc: "The shortest idle window that a sandbox may have, at most 2m."},
	{Name: KeepEvents, Kind: Duration, Default: "90d", Example: "30d", Flag: "keep-events", Doc: "How long events, and operations and deliveries that ended, are kept, an hour at least. What is metered is kept for good."},
	{Name: KeepKeys, Kind: Duration, Default: "24h", Example: "48h", Doc: "How long a request key is remembered."},
	{Name: KeepDeleted, Kind: Text, Default: "24h", Example: "3d", Flag: "undelete-for", Doc: "How long a deleted sandbox can be brought back; its disk is erased then. 0 erases at once; a disk pool that runs short erases earlier."},
	{Name: KeepBackups, Kind: Duration, Default: "30d", Example: "90d", Doc: "How old a backup in the data directory is when `hutch prune` removes it. The newest is never removed."},
	{Name: SaveRetry, Kind: Text, Default: "30s,10m", Example: "10s,5m", Flag: "save-retry", Doc: "The pauses between the tries of a save that failed: the first, and the longest."},
	{Name: WebhookHTTP, Kind: Switch, Default: "false", Example: "true", Flag: "webhook-http", Doc: "Whether webhooks may go to http:// addresses too."},
	{
		Name: WebhookAllow, Kind: Text, Unset: "public addresses only", Example: "10.0.0.0/8,127.0.0.0/8", Flag: "webhook-allow",
		Doc: "Ranges that webhooks may go to although they are not public, with a comma between them.",
	},
	{Name: LogSize, Kind: Size, Default: "16MB", Example: "64MB", Doc: "How large the server's log becomes before a new file is begun."},
	{Name: LogFiles, Kind: Count, Default: "4", Example: "8", Most: 100, Doc: "How many files of the log are kept beside the one that is written."},
}

// find gives the key of a name.
func find(name string) (Key, bool) {
	for _, k := range Keys {
		if k.Name == name {
			return k, true
		}
	}
	return Key{}, false
}

func absolute(path string) string {
	if !filepath.IsAbs(path) {
		return "is not an absolute path; begin it with /"
	}
	if strings.ContainsAny(path, `,:\`) {
		return "has a comma, a colon or a backslash, which mean something in mount options; choose another directory"
	}
	return ""
}

func collector(text string) string {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil {
		return "is no address of a collector; write it as http://127.0.0.1:4318"
	}
	return ""
}

var domainForm = regexp.MustCompile(`^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

func domain(name string) string {
	if len(name) > 200 || !domainForm.MatchString(name) {
		return "is no domain name; write it in lower case, without a port or a dot at its end, as box.example.com"
	}
	return ""
}

func address(addr string) string {
	if _, _, err := net.SplitHostPort(addr); err != nil {
		return "is no address with a port; write it as 127.0.0.1:4880"
	}
	return ""
}
