"""What the kernel knows of processes: identities that survive reuse of numbers, families, memory; Linux only.

Who may be ended, and when, is decided by the callers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

__all__ = [
    "ProcessRow",
    "adopt_orphans",
    "boot_id",
    "descendants",
    "die_with_parent",
    "is_alive",
    "kill_all",
    "members",
    "memory_use",
    "name_this",
    "oom_kills",
    "process_table",
    "start_time",
]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One line of the table: `start` in clock ticks since boot, which with the number names a process for good."""

    pid: int
    state: str
    parent: int
    session: int
    start: int
    rss_bytes: int


def _row(pid: int) -> ProcessRow | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The command's name stands in brackets and may hold anything, brackets too.
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessRow(
        pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]), int(fields[21]) * _PAGE_BYTES
    )


def start_time(pid: int) -> int | None:
    """When that process began, in clock ticks since boot; None where there is none."""
    row = _row(pid)
    return row.start if row else None


def is_alive(pid: int, start: int) -> bool:
    """Whether this very process still runs; one that ended and waits to be collected does not."""
    row = _row(pid)
    return row is not None and row.start == start and row.state not in "ZX"


def process_table() -> dict[int, ProcessRow]:
    """All processes of the machine, by number."""
    rows = (_row(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {row.pid: row for row in rows if row is not None}


def descendants(root: int, table: Mapping[int, ProcessRow]) -> list[int]:
    """Children, their children and so on, that have not ended."""
    children: dict[int, list[int]] = {}
    for row in table.values():
        children.setdefault(row.parent, []).append(row.pid)
    found: list[int] = []
    open_ends = [root]
    while open_ends:
        below = children.get(open_ends.pop(), [])
        open_ends += below
        found += [pid for pid in below if table[pid].state not in "ZX"]
    return found


def members(entry: str, sessions: Collection[int] = (), pipes: Collection[str] = ()) -> list[int]:
    """Processes of one generation, found without their parent, that have not ended.

    They are in one of these sessions, or their environment at their start held this `NAME=value`, or they hold one of
    these pipes (`pipe:[number]`): a forked process shows the environment of the one it was forked from.
    """
    wanted = entry.encode()
    return [
        row.pid
        for row in process_table().values()
        if row.state not in "ZX"
        and (row.session in sessions or _has_variable(row.pid, wanted) or _holds_pipe(row.pid, pipes))
    ]


def _has_variable(pid: int, entry: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return entry in file.read().split(b"\0")
    except OSError:
        return False


def _holds_pipe(pid: int, pipes: Collection[str]) -> bool:
    if not pipes:
        return False
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for number in numbers:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{number}") in pipes:
                return True
    return False


def kill_all(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to each; those that are gone do not matter."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def memory_use(pid: int) -> tuple[int, int] | None:
    """Bytes that a process answers for, and how many of them are its share of pages that others have too.

    A page counts for each of those that have it by an equal part. None where the kernel does not say. It costs the
    kernel a walk over all pages: some milliseconds for each GB.
    """
    kib = {"Pss": -1, "Private_Clean": 0, "Private_Dirty": 0}
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in kib:
                    kib[name] = int(value.split()[0])
    except (OSError, ValueError, IndexError):
        return None
    if kib["Pss"] < 0:
        return None
    shared = kib["Pss"] - kib["Private_Clean"] - kib["Private_Dirty"]
    return kib["Pss"] << 10, max(0, shared) << 10


def oom_kills() -> int:
    """How often the kernel has ended a process for lack of memory: one of ours where it says so, else any since boot.

    0 where it does not say.
    """
    for path, name in ((f"{_control_group()}/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        with contextlib.suppress(OSError, ValueError, IndexError), open(path) as file:
            for line in file:
                words = line.split()
                if words[0] == name:
                    return int(words[1])
    return 0


def _control_group() -> str:
    """The folder of this process's control group, in the unified hierarchy."""
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            if line.startswith("0::"):
                return "/sys/fs/cgroup" + line[3:].strip().rstrip("/")
    return "/sys/fs/cgroup"


def boot_id() -> str:
    """Differs after every start of the machine, as numbers of processes then mean nothing any more."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def name_this(name: str) -> None:
    """Show this process under another name, of which `ps -o comm` has the first 15 bytes."""
    text = ctypes.create_string_buffer(name.encode()[:15])
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_NAME, ctypes.addressof(text))


def adopt_orphans() -> None:
    """From here on, descendants whose parent ends become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process with its parent; ends it now where that one is gone already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(137)
