package sandbox

// Step is one named piece of an operation, as progress shows it and the host's
// journal records it. Each step may be done twice. Undo names what takes it back
// when a later step fails; "" is a step that needs none.
type Step struct {
	Name string
	Undo string
}

// The names of the steps.
const (
	StepDisk     = "disk"     // make the disk, or the private copy of a saved one
	StepNetwork  = "network"  // namespaces, addresses, name server
	StepMount    = "mount"    // the root file system tree
	StepBoot     = "boot"     // PID 1 runs
	StepInit     = "init"     // clock, entropy, identity; commands are accepted
	StepPrepare  = "prepare"  // prove that a save can be made, sync
	StepPause    = "pause"    // no task runs
	StepCapture  = "capture"  // memory is in files
	StepClone    = "clone"    // the disk's copy belongs to the memory
	StepSeal     = "seal"     // digests, fsync
	StepCommit   = "commit"   // the save is the truth from here on
	StepKill     = "kill"     // no process of it is left
	StepRelease  = "release"  // mounts and network are given back
	StepRestore  = "restore"  // in memory again, held
	StepVerify   = "verify"   // the memory's digests hold
	StepIdentity = "identity" // clock, entropy and names are new, while only PID 1 runs
	StepRun      = "run"      // everything runs; the save is void
	StepShutdown = "shutdown" // programs are told to end
	StepThaw     = "thaw"     // the source runs on
	StepSpawn    = "spawn"    // the forks start from the capture
	StepErase    = "erase"    // disks and saves are removed
)

// StepNames are all steps, for those that keep to a closed list.
var StepNames = []string{
	StepDisk, StepNetwork, StepMount, StepBoot, StepInit, StepPrepare, StepPause, StepCapture, StepClone, StepSeal, StepCommit, StepKill,
	StepRelease, StepRestore, StepVerify, StepIdentity, StepRun, StepShutdown, StepThaw, StepSpawn, StepErase,
}

// steps are the step lists of the verbs that a host carries out, in order.
var steps = map[Verb][]Step{
	Create: {
		{StepDisk, "delete the disk"}, {StepNetwork, "remove the network"}, {StepMount, "unmount"},
		{StepBoot, "kill"}, {StepInit, ""},
	},
	Sleep: {
		{StepPrepare, ""}, {StepPause, "thaw"}, {StepCapture, "delete the staging"}, {StepClone, ""},
		{StepSeal, ""}, {StepCommit, ""}, {StepKill, ""}, {StepRelease, ""},
	},
	Wake: {
		{StepDisk, "delete the private copy"}, {StepNetwork, "remove the network"}, {StepMount, "unmount"},
		{StepRestore, "kill"}, {StepVerify, ""}, {StepIdentity, ""}, {StepCommit, ""}, {StepRun, ""},
	},
	Stop: {
		{StepPrepare, ""}, {StepCommit, ""}, {StepShutdown, ""}, {StepKill, ""}, {StepRelease, ""},
	},
	Resume: {
		{StepNetwork, "remove the network"}, {StepMount, "unmount"}, {StepBoot, "kill"}, {StepInit, ""},
	},
	Fork: {
		{StepPrepare, ""}, {StepPause, "thaw"}, {StepCapture, "delete the staging"}, {StepClone, ""},
		{StepThaw, ""}, {StepSeal, "delete the capture"}, {StepSpawn, ""},
	},
	Delete: {
		{StepKill, ""}, {StepRelease, ""}, {StepDisk, ""}, {StepErase, ""},
	},
	Undelete: {
		{StepDisk, ""},
	},
}

// Steps gives the steps of a verb in order, nil for a verb that no host carries out.
func Steps(v Verb) []Step { return steps[v] }
