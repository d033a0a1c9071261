"""Work on files and folders of others, in threads that requests can abandon.

A file system that hangs blocks the thread that uses it, and no call ends that. So such work has a time limit and a few
threads of its own, which cannot exhaust the machine. A request that runs out of time gets a one-line error; all others
are served: threads that hang beyond their time leave their places to others, and work on one network file system has
few places, whatever folders it names.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from pollux.core.errors import Unreachable

__all__ = ["ForeignReads", "ThreadsToGiveUp", "place_of"]

_MOUNTS = "/proc/self/mountinfo"
# File systems of this machine, which do not hang when another machine does.
_LOCAL = frozenset(
    [
        "bcachefs",
        "btrfs",
        "devtmpfs",
        "erofs",
        "exfat",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "jfs",
        "overlay",
        "proc",
        "ramfs",
        "reiserfs",
        "rootfs",
        "squashfs",
        "sysfs",
        "tmpfs",
        "vfat",
        "xfs",
        "zfs",
    ]
)
_MOST_HUNG = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    key: Hashable
    work: Callable[[], Any]
    future: Future[Any]


def place_of(folder: str) -> str:
    """What a folder may hang with: the mount point of its network file system, or where it is local, the folder.

    Nothing is looked up but the kernel's list of mounts, so a link to another file system is not followed.
    """
    path, found, kind = os.path.normpath(folder), "", ""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            for mount in mounts:
                fields, _, rest = mount.partition(" - ")
                point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields.split()[4])
                # Of two at one point, the later one is on top.
                if len(point) >= len(found) and (path == point or path.startswith(point.rstrip("/") + "/")):
                    found, kind = point, rest.split()[0]
    except (OSError, IndexError):
        return path
    return path if kind in _LOCAL or not found else found


class ThreadsToGiveUp:
    """Runs work in `most_threads` threads at most, `most_of_one` of them for one key, such as a job.

    Threads that hang do not keep the process from ending; up to 64 that are past their time are not counted among those
    threads, only for their key. May be used from any event loop and thread.
    """

    def __init__(self, seconds: float, most_threads: int, most_of_one: int = 2, most_waiting: int = 256) -> None:
        self.seconds = seconds
        self._most_threads = most_threads
        self._most_of_one = most_of_one
        self._most_waiting = most_waiting
        self._lock = threading.Lock()
        self._waiting: deque[_Piece] = deque()
        self._running: Counter[Hashable] = Counter()
        self._began: dict[_Piece, float] = {}

    async def run(self, what: str, key: Hashable, work: Callable[[], T]) -> T:
        """What `work` returns or raises; Unreachable, which names `what`, if that takes too long."""
        piece = _Piece(key, work, Future())
        self._submit(what, piece)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(piece.future), self.seconds)
        except TimeoutError:
            # Its place may be free for another now.
            self._start_more()
            raise Unreachable(
                f"{what} cannot be read within {self.seconds:g} s: its file system is slow or hangs; try again later"
            ) from None

    def _submit(self, what: str, piece: _Piece) -> None:
        with self._lock:
            self._waiting = deque(waits for waits in self._waiting if not waits.future.cancelled())
            beside = sum(waits.key == piece.key for waits in self._waiting)
            # Those that wait for one place leave room for others.
            if len(self._waiting) >= self._most_waiting or beside >= self._most_waiting // 4:
                raise Unreachable(
                    f"{what} is not read: {beside or len(self._waiting)} others wait already; try again later"
                )
            self._waiting.append(piece)
        self._start_more()

    def _start_more(self) -> None:
        while (piece := self._next()) is not None:
            threading.Thread(target=self._do, args=(piece,), name="pollux-foreign-read", daemon=True).start()

    def _next(self) -> _Piece | None:
        """A waiting piece that may run now, counted as running; None if there is none."""
        with self._lock:
            now = time.monotonic()
            hung = sum(now - began >= self.seconds for began in self._began.values())
            if self._running.total() - min(hung, _MOST_HUNG) >= self._most_threads:
                return None
            for number, piece in enumerate(self._waiting):
                if self._running[piece.key] < self._most_of_one:
                    del self._waiting[number]
                    self._running[piece.key] += 1
                    self._began[piece] = now
                    return piece
            return None

    def _do(self, piece: _Piece) -> None:
        try:
            # Nobody waits for cancelled work any more.
            if piece.future.set_running_or_notify_cancel():
                try:
                    piece.future.set_result(piece.work())
                except BaseException as error:
                    piece.future.set_exception(error)
        finally:
            with self._lock:
                del self._began[piece]
                self._running[piece.key] -= 1
                self._running += Counter()
            self._start_more()


class ForeignReads:
    """The threads of a service, grouped by what they access, so that a group that hangs does not delay others.

    `home`: logs and receipts, which jobs write. `folders`: working folders and stores of checkpoints of jobs that are
    submitted, anywhere. `packages`: working folders that are sent along.
    """

    def __init__(self, home_seconds: float = 10.0, folder_seconds: float = 25.0, package_seconds: float = 25.0) -> None:
        self.home = ThreadsToGiveUp(home_seconds, most_threads=16)
        self.folders = ThreadsToGiveUp(folder_seconds, most_threads=16)
        self.packages = ThreadsToGiveUp(package_seconds, most_threads=4, most_of_one=4)
