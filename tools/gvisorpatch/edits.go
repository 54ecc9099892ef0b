package main

// edits are the changes inside gVisor's own files. Whole new files lie in changes/.
// A last one, versionEdit, is made from these.
var edits = []edit{
	// The idle loop: controlFastPath parks while no context switch happens. The state
	// machine that it drives moves on recorded switches only, so nothing is missed.
	{
		path: "pkg/sentry/platform/systrap/metrics.go",
		anchor: `		// Reset FP trackers.
		fastpath.usedStubFastPath.Store(false)
		fastpath.usedSentryFastPath.Store(false)
`,
		text: `		// Reset FP trackers.
		fastpath.usedStubFastPath.Store(false)
		fastpath.usedSentryFastPath.Store(false)

		switches.parkWhileIdle()
`,
	},
	{
		path:   "pkg/sentry/platform/systrap/subprocess.go",
		anchor: "	ctx.recordLatency()\n",
		text:   "	ctx.recordLatency()\n	switches.note()\n",
	},

	// The held restore: all but the containers' root processes wait for a release.
	{
		path: "runsc/boot/restore.go",
		anchor: `	r.timer.Reached("Starting sandbox")
	if err := r.cm.onStart(); err != nil {
`,
		text: `	r.cm.hutch.hold(l.k)

	r.timer.Reached("Starting sandbox")
	if err := r.cm.onStart(); err != nil {
`,
	},
	{
		path: "runsc/boot/controller.go",
		anchor: `	// of all containers and perform all actions required by restore.
	restorer *restorer
}
`,
		text: `	// of all containers and perform all actions required by restore.
	restorer *restorer

	// hutch knows what the Hutch methods have stopped.
	hutch stops
}
`,
	},

	// Sizes: the guest sees the CPUs and the memory of the OCI spec also when runsc
	// leaves control groups to its caller (--ignore-cgroups).
	{
		path: "runsc/sandbox/sandbox.go",
		anchor: `	cmd.Args = append(cmd.Args, "--total-memory", strconv.FormatUint(mem, 10))
`,
		text: `	if conf.IgnoreCgroups {
		var cpus int
		if mem, cpus = sizesOfSpec(args.Spec, mem); cpus > 0 {
			cmd.Args = append(cmd.Args, "--cpu-num", strconv.Itoa(cpus))
		}
	}
	cmd.Args = append(cmd.Args, "--total-memory", strconv.FormatUint(mem, 10))
`,
	},

	// An init is protected as Linux protects it.
	{
		path: "pkg/sentry/kernel/task_signals.go",
		anchor: `	// Signal side effects apply even if the signal is ultimately discarded.
	t.tg.applySignalSideEffectsLocked(sig)
`,
		text: `	// An init that is protected from SIGKILL has no side effects of it either.
	refused := t.tg.refusesLocked(info)
	if refused && sig == linux.SIGKILL {
		t.Debugf("Discarding SIGKILL to an init")
		if timer != nil {
			timer.signalRejectedLocked()
		}
		return nil
	}

	// Signal side effects apply even if the signal is ultimately discarded.
	t.tg.applySignalSideEffectsLocked(sig)
`,
	},
	{
		path: "pkg/sentry/kernel/task_signals.go",
		anchor: `	ignored := computeAction(sig, t.tg.signalHandlers.actions[sig]) == SignalActionIgnore
`,
		text: `	ignored := refused || computeAction(sig, t.tg.signalHandlers.actions[sig]) == SignalActionIgnore
`,
	},
	{
		path: "pkg/sentry/kernel/task_signals.go",
		anchor: `	sig := linux.Signal(info.Signo)
	sigact := computeAction(sig, act)
`,
		text: `	sig := linux.Signal(info.Signo)
	sigact := computeAction(sig, act)
	if sigact != SignalActionHandler && t.tg.outlives(sig) {
		sigact = SignalActionIgnore
	}
`,
	},
	{
		path: "pkg/sentry/kernel/task_signals.go",
		anchor: `	blocked := linux.SignalSetOf(sig)&linux.SignalSet(t.signalMask.RacyLoad()) != 0
	act := t.tg.signalHandlers.actions[sig]
	ignored := act.Handler == linux.SIG_IGN
`,
		text: `	blocked := linux.SignalSetOf(sig)&linux.SignalSet(t.signalMask.RacyLoad()) != 0
	act := t.tg.signalHandlers.actions[sig]
	ignored := act.Handler == linux.SIG_IGN
	if blocked || ignored || unconditional || act.Handler == linux.SIG_DFL {
		t.tg.faulted.Store(true) // no init goes on after its own fault
	}
`,
	},
	{
		path: "pkg/sentry/kernel/thread_group.go",
		anchor: `	// If groupStopDequeued is true, a task in the thread group has dequeued a
	// stop signal, but has not yet initiated the group stop.
`,
		text: `	// faulted says that a fault of its own is about to end the thread group, which
	// then is not protected as an init any more. It is not saved: the fault repeats.
	faulted atomicbitops.Bool

	// If groupStopDequeued is true, a task in the thread group has dequeued a
	// stop signal, but has not yet initiated the group stop.
`,
	},
	// F_SETSIG: the kernel forces no signal that a task has chosen (fs/fcntl.c,
	// send_sigio_to_task).
	{
		path: "pkg/sentry/kernel/fasync/fasync.go",
		anchor: `		signalInfo.SetBand(band)
`,
		text: `		signalInfo.SetBand(band)
		if sig == linux.SIGKILL || sig == linux.SIGSTOP {
			signalInfo.Code = linux.SI_SIGIO
		}
`,
	},

	// Files in a tmpfs: half of the sandbox's memory, not of the machine's.
	{
		path: "runsc/boot/loader.go",
		anchor: `		tmpfs.SetDefaultSizeLimit(args.TotalHostMem / 2)
`,
		text: `		half := args.TotalHostMem / 2
		if args.TotalMem > 0 {
			half = min(half, args.TotalMem/2)
		}
		tmpfs.SetDefaultSizeLimit(half)
`,
	},

	// The memory limit: what is allocated is counted, a task that needs a page waits
	// during a shortage, and the kernel relieves it.
	{
		path: "pkg/sentry/pgalloc/pgalloc.go",
		anchor: `	// file is the backing file. The file pointer is immutable.
`,
		text: `	// limit bounds the tasks' memory.
	limit memoryLimit

	// file is the backing file. The file pointer is immutable.
`,
	},
	{
		path: "pkg/sentry/pgalloc/pgalloc.go",
		anchor: `	fr, err := f.findAllocatableAndMarkUsed(&alloc)
`,
		text: `	if err := f.admit(length, &opts); err != nil {
		return memmap.FileRange{}, err
	}
	fr, err := f.findAllocatableAndMarkUsed(&alloc)
`,
	},
	{
		path: "pkg/sentry/pgalloc/pgalloc.go",
		anchor: `	f.mu.Lock()
	defer f.mu.Unlock()

	if alloc.willCommit {
`,
		text: `	f.mu.Lock()
	defer f.mu.Unlock()
	defer func() {
		if err == nil {
			f.limit.allocated.Add(int64(alloc.length))
		}
	}()

	if alloc.willCommit {
`,
	},
	{
		path: "pkg/sentry/pgalloc/pgalloc.go",
		anchor: `				wasteFR := ufseg.Range()
`,
		text: `				wasteFR := ufseg.Range()
				f.limit.allocated.Add(-int64(wasteFR.Length()))
`,
	},
	{
		path: "pkg/sentry/kernel/task_run.go",
		anchor: `			faultCounter.Increment()

			region := trace.StartRegion(t.traceContext, faultRegion)
`,
		text: `			faultCounter.Increment()
			if t.awaitMemory() {
				return (*runApp)(nil)
			}

			region := trace.StartRegion(t.traceContext, faultRegion)
`,
	},
	{
		path: "pkg/sentry/kernel/kernel.go",
		anchor: `	extMu sync.Mutex ` + "`state:\"nosave\"`" + `

`,
		text: `	extMu sync.Mutex ` + "`state:\"nosave\"`" + `

	// guard keeps the tasks' memory below the sandbox's; see GuardMemory.
	guard memoryGuard ` + "`state:\"nosave\"`" + `

`,
	},
	{
		path:   "pkg/sentry/kernel/task_start.go",
		anchor: "	ts.liveTasks++\n",
		text:   "	ts.liveTasks++\n	ts.chargeLocked(t.k)\n",
	},
	{
		path:   "pkg/sentry/kernel/task_run.go",
		anchor: "			ts.liveTasks--\n",
		text:   "			ts.liveTasks--\n			ts.chargeLocked(t.k)\n",
	},
	// A restored kernel is guarded from its release on: a held task cannot die.
	{
		path: "runsc/boot/loader.go",
		anchor: `	if err := l.k.Start(); err != nil {
`,
		text: `	if l.state == created {
		l.k.GuardMemory()
	}
	if err := l.k.Start(); err != nil {
`,
	},

	// Deleted files that are open: their contents are streamed into a file of the image.
	{
		path: "pkg/sentry/fsimpl/gofer/save_restore.go",
		anchor: `	d.inode.savedDeletedData = make([]byte, d.inode.size.Load())
	done := uint64(0)
	for done < uint64(len(d.inode.savedDeletedData)) {
		n, err := h.readToBlocksAt(ctx, safemem.BlockSeqOf(safemem.BlockFromSafeSlice(d.inode.savedDeletedData[done:])), done)
		done += n
		if err != nil {
			if err == io.EOF {
				break
			}
			return fmt.Errorf("failed to read deleted file %q: %w", genericDebugPathname(d.inode.fs, d), err)
		}
	}
	if done < uint64(len(d.inode.savedDeletedData)) {
		return fmt.Errorf("failed to read all of deleted file %q: read %d bytes, expected %d", genericDebugPathname(d.inode.fs, d), done, len(d.inode.savedDeletedData))
	}
	return nil
`,
		text: `	d.inode.savedDeletedData, err = saveUnlinked(ctx, h, int64(d.inode.size.Load()))
	if err != nil {
		return fmt.Errorf("failed to save deleted file %q: %w", genericDebugPathname(d.inode.fs, d), err)
	}
	return nil
`,
	},
	{
		path: "pkg/sentry/fsimpl/gofer/save_restore.go",
		anchor: `	n, err := h.writeFromBlocksAt(ctx, safemem.BlockSeqOf(safemem.BlockFromSafeSlice(d.inode.savedDeletedData)), 0)
	if err != nil {
		return fmt.Errorf("failed to write deleted file %q: %w", genericDebugPathname(d.inode.fs, d), err)
	}
	if n != uint64(len(d.inode.savedDeletedData)) {
		return fmt.Errorf("failed to write all of deleted file %q: wrote %d bytes, expected %d", genericDebugPathname(d.inode.fs, d), n, len(d.inode.savedDeletedData))
	}
`,
		text: `	if err := restoreUnlinked(ctx, h, d.inode.savedDeletedData); err != nil {
		return fmt.Errorf("failed to write deleted file %q: %w", genericDebugPathname(d.inode.fs, d), err)
	}
`,
	},
	// What a save that failed has left is no part of the next.
	{
		path: "pkg/sentry/fsimpl/gofer/save_restore.go",
		anchor: `	fs.savedDentryRW = make(map[*dentry]savedDentryRW)

`,
		text: `	fs.savedDentryRW = make(map[*dentry]savedDentryRW)
	fs.savedDeletedOpenDentries = nil

`,
	},
	{
		path: "runsc/sandbox/sandbox.go",
		anchor: `	// Restore the container and start the root container.
	if err := conn.Call(boot.ContMgrRestore, &opt, nil); err != nil {
`,
		text: `	if err := sendUnlinked(conn, imagePath); err != nil {
		return err
	}

	// Restore the container and start the root container.
	if err := conn.Call(boot.ContMgrRestore, &opt, nil); err != nil {
`,
	},

	// /tmp: stock runsc puts a tmpfs on an empty /tmp. Files in /tmp have to survive a
	// stop (SPEC section 6), so it stays on the disk.
	{
		path: "runsc/boot/vfs.go",
		anchor: "	if err := c.mountTmp(ctx, spec, conf, creds, mns); err != nil {\n" +
			"		return fmt.Errorf(`mount submount \"/tmp\": %w`, err)\n" +
			"	}\n" +
			"	return nil\n",
		text: "	return nil\n",
	},
}

// versionEdit makes the version that a memory image is compared by: the pin and the
// changes. gVisor refuses to restore an image of another version.
func versionEdit() edit {
	return edit{
		path:   "runsc/version/version.go",
		anchor: `var version = "VERSION_MISSING"`,
		text:   `var version = "` + runscVersion() + `"`,
	}
}
