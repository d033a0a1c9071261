"""Where a database may lie: on a local file system, in a private file, with one writer at a time."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import weakref
from pathlib import Path

from pollux.core.errors import Conflict, InvalidInput, StoreFailed

# Locks and shared memory do not work between machines there, so that two writers could damage a log.
_NETWORK_FILE_SYSTEMS = frozenset(
    {"afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs",
     "panfs", "smb3", "smbfs"}
)  # fmt: skip
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.overlayfs", "fuse.lxcfs", "fuse.mergerfs"})

_MOUNTS = Path("/proc/self/mountinfo")


def file_system(path: Path, mounts: str) -> str:
    """The type of the file system of `path` (absolute, links followed); `mounts` is like /proc/self/mountinfo."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        # The kernel escapes blanks and the like as three octal digits.
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4])
        inside = point == "/" or str(path) == point or str(path).startswith(f"{point}/")
        # Of two mounts on one point, the later hides the earlier.
        if inside and len(point) >= best:
            best, kind = len(point), after.split(" ", 1)[0]
    return kind


def refuse_network(path: Path) -> None:
    """Raise for a folder on a network file system; without /proc, it counts as local."""
    try:
        mounts = os.fsdecode(_MOUNTS.read_bytes())
    except OSError:
        return
    kind = file_system(path, mounts)
    is_remote_fuse = kind.startswith("fuse.") and kind not in _LOCAL_FUSE
    if kind in _NETWORK_FILE_SYSTEMS or is_remote_fuse:
        raise InvalidInput(
            f"{path} is on a network file system ({kind}), where a log cannot be kept safely; "
            "choose a local folder with POLLUX_HOME"
        )


def private_file(path: Path) -> None:
    """Make the file if it does not exist, readable by its owner only, and sync its folder."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            # SQLite would wait for ever for the other end of a pipe.
            raise StoreFailed(f"{path} is no plain file: move it away, and restore a backup")
        os.fchmod(handle, 0o600)
    finally:
        os.close(handle)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class WriterLock:
    """The lock of the one process that may write; the kernel releases it when that process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise Conflict(
                f"{path.with_suffix('')} is in use by process {holder}; "
                "stop that one ('pollux down'), or choose another folder with POLLUX_HOME"
            ) from None
        except OSError as error:
            os.close(handle)
            raise StoreFailed(f"{path} cannot be locked: {error}; make its folder writable") from None
        self._handle = handle
        _LOCKS.add(self)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            # A child that was just forked may still have its copy open, which would keep the lock.
            fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def forget(self) -> None:
        """In a forked child: close its copy; the parent's lock stays."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


_LOCKS: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _forget_locks() -> None:
    # A child would keep the lock after the end of its parent. Closing the copy does not release the parent's lock.
    for lock in list(_LOCKS):
        lock.forget()


os.register_at_fork(after_in_child=_forget_locks)
