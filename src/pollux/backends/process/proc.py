"""What the Linux kernel knows of processes: identities that survive the reuse of pids, descendants, memory.

Why this is not psutil is in `docs/design/0018-reading-proc.md`.
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
    """One process. `start`, in clock ticks since boot, identifies the process together with its pid."""

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
    # The command's name is in brackets, and may itself contain brackets.
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessRow(
        pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]), int(fields[21]) * _PAGE_BYTES
    )


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where there is no such process."""
    row = _row(pid)
    return row.start if row else None


def is_alive(pid: int, start: int) -> bool:
    """Whether the process with this pid and start still runs; one that has ended and waits to be reaped does not."""
    row = _row(pid)
    return row is not None and row.start == start and row.state not in "ZX"


def process_table() -> dict[int, ProcessRow]:
    """All processes of the machine, by pid."""
    rows = (_row(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {row.pid: row for row in rows if row is not None}


def descendants(root: int, table: Mapping[int, ProcessRow]) -> list[int]:
    """Children of a process, their children and so on, that have not ended."""
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
    """The processes of one generation that have not ended, found without their parent.

    They are in one of these sessions, or had this `NAME=value` in their environment, or have one of these pipes open
    (`pipe:[number]`): a forked process shows the environment of the process it was forked from.
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
    """Send a signal to each of these processes; those that have ended are ignored."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def memory_use(pid: int) -> tuple[int, int] | None:
    """The memory of a process in bytes, with its share of shared pages; and that share alone.

    A shared page counts in equal parts for the processes that share it. None where the kernel does not say. To count,
    the kernel walks over all pages, which takes some milliseconds for each GB.
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
    """How many processes the kernel has killed for lack of memory: of our control group, else all since boot.

    0 where the kernel does not say.
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
    """A name of this boot of the machine: pids from an earlier boot mean nothing."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def name_this(name: str) -> None:
    """Set the name of this process that `ps -o comm` shows; the kernel keeps 15 bytes."""
    text = ctypes.create_string_buffer(name.encode()[:15])
    with contextlib.suppress(OSError):
        _prctl(_PR_SET_NAME, ctypes.addressof(text))


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process, from now on."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; exit now where the parent has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(137)
