// Package disk keeps what sandboxes have on disk: the pool, the disks, their clones
// and saved copies, the templates under them. Linux only, and as root.
//
// # The pool
//
// All of it lies in one directory whose file system can share blocks between files
// (reflink): a clone costs as much as its extents, not as its bytes. Where the data
// directory can do that itself, the pool is a plain directory in it; where it
// cannot, the pool is an XFS file system in one file there, mounted on a loop
// device.
//
//	DIR/pool.img                            the pool's file, only where one is needed
//	DIR/pool/disks/ID/{disk.img,disk.json}  one disk
//	DIR/pool/saves/ID/GENERATION/           one saved copy: mem/, disk.img, disk.json, manifest.json
//	DIR/pool/templates/DIGEST/              one template: rootfs.erofs or rootfs.ext4, manifest.json
//	DIR/pool/agents/DIGEST/                 one agent layer, a plain tree
//	DIR/pool/blanks/SIZE.img                an empty formatted disk of each size that was asked for
//	DIR/pool/reserve                        space held for saves
//	DIR/pool/tmp, DIR/pool/trash            what is being made, what is being removed
//	RUN/mnt/ID/{img,root}                   the mounts of one disk
//	RUN/mnt/templates/DIGEST                the mount of one template, shared
//
// # A disk
//
// A disk is an image file of a fixed size with an ext4 file system in it. The
// sandbox never sees that file system, but an overlay: the upper layer is a
// directory of the image, below lie the agent layer and the template. Size is the
// size of the image in bytes, and `df` inside shows exactly that. It is a whole
// number of 4 KiB blocks: a size that is not (1 GB = 10^9 bytes is none) is rounded
// up to the next block, never down.
//
// # Crashes and repeats
//
// Whatever appears under its final name is whole: it is made under tmp (a save
// under NAME.tmp), synced, and renamed. Every call may be repeated, after an error,
// after a crash, after success, and then finds its goal reached or reaches it. Open
// brings everything into order that a dead process or a dead host has left, but for
// disks and saves, which only their owner removes, unfinished saves included. Mounts
// and loop devices belong to no process and live on when this one ends.
//
// One process at a time uses a pool. Calls are safe from any goroutine; calls on
// the same id wait for each other.
//
// # Trust
//
// The trees that a guest writes are hostile. They are opened beneath their root with
// symbolic links refused, and the ext4 images that the host mounts are only those
// that the host has formatted and that nothing but its own kernel has written.
package disk
