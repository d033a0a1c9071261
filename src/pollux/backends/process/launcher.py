"""Starts, signals and measures the processes of a job's replicas: the interface, and the launcher for this machine.

`shim.remote_launcher` is the launcher for other machines.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pollux.backends.process import proc
from pollux.backends.process.fork_replica import ReplicaStart, start_replica

__all__ = ["LocalLauncher", "ReplicaLauncher", "ReplicaProcess"]


@dataclass(slots=True, eq=False)
class ReplicaProcess:
    """One replica's process: its pid, its start time, the reading end of its output (-1 for none) and its pipe.

    `key` and `node` identify a process on another machine. `up`: the process has been started.
    """

    pid: int = 0
    start: int = 0
    output: int = -1
    pipe: str = ""
    key: str = ""
    node: str = ""
    up: bool = True

    def close_output(self) -> None:
        """Close the reading end of its output."""
        if self.output >= 0:
            os.close(self.output)
            self.output = -1


class ReplicaLauncher(Protocol):
    """What a generation does with processes; no method waits. `session`: the job's name on other nodes, else empty."""

    sweep_seconds: float
    session: str

    def start(
        self, start: ReplicaStart, place: str, memory_bytes: float, sink: Callable[[bytes], None]
    ) -> ReplicaProcess:
        """Start a process; its output can be read from `output`, or goes to the sink if the process runs elsewhere."""

    def terminate(self, process: ReplicaProcess, alone: bool) -> bool:
        """Send SIGTERM to the process alone or to all that it started; whether it still ran."""

    def kill(self, process: ReplicaProcess) -> None:
        """Send SIGKILL to the process and its session."""

    def sweep(self, process: ReplicaProcess) -> None:
        """Kill the processes that an ended replica left in its session."""

    def kill_all(self) -> None:
        """Send SIGKILL to all processes of the job."""

    def is_clear(self, kill: bool) -> bool:
        """Whether no process of the job is left; `kill`: kill those that are left."""

    def over_memory(self, processes: Mapping[int, ReplicaProcess], limit: float) -> tuple[int, float] | None:
        """The replica whose processes use more than the limit, and its bytes; None where there is none."""

    @property
    def lacks_memory(self) -> bool:
        """Whether the kernel has ended processes for lack of memory since the first start."""


class LocalLauncher:
    """Owns the descendants of this process, which all belong to one job, except those that `spared` returns.

    `warm_variables`: the environment during the imports, None where nothing was imported. `close_in_fork` is called
    first in every forked process.
    """

    sweep_seconds = 0.01
    session = ""

    def __init__(
        self,
        warm_variables: Mapping[str, str] | None,
        close_in_fork: Callable[[], None],
        spared: Callable[[], Iterable[int | None]] = tuple,
    ) -> None:
        self._warm_variables = warm_variables
        self._close_in_fork = close_in_fork
        self._spared = spared
        self._oom_kills = proc.oom_kills()

    @property
    def lacks_memory(self) -> bool:
        """Whether the kernel has ended processes for lack of memory since the first start."""
        return proc.oom_kills() > self._oom_kills

    def start(
        self, start: ReplicaStart, place: str, memory_bytes: float, sink: Callable[[bytes], None]
    ) -> ReplicaProcess:
        """Fork the process. In the forked process this does not return: see `ForkedReplica`."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        try:
            pid = start_replica(start, writing, self._warm_variables, self._close_in_fork)
        except OSError:
            # Reached only where the fork failed: in a forked process nothing here may run.
            os.close(reading)
            os.close(writing)
            raise
        os.close(writing)
        pipe = os.readlink(f"/proc/self/fd/{reading}")
        return ReplicaProcess(pid, proc.start_time(pid) or 0, reading, pipe)

    def terminate(self, process: ReplicaProcess, alone: bool) -> bool:
        """Send SIGTERM; a process that has ended and waits to be reaped counts as ended."""
        ran = proc.is_alive(process.pid, process.start)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.kill if alone else os.killpg)(process.pid, signal.SIGTERM)
        return ran

    def kill(self, process: ReplicaProcess) -> None:
        """Send SIGKILL to its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    def sweep(self, process: ReplicaProcess) -> None:
        """Kill what is left of its session."""
        table = proc.process_table()
        proc.kill_all(row.pid for row in table.values() if row.session == process.pid)

    def _others(self, table: Mapping[int, proc.ProcessRow]) -> list[int]:
        """Every descendant of this process that belongs to the job."""
        spared = {*self._spared()}
        return [pid for pid in proc.descendants(os.getpid(), table) if pid not in spared]

    def kill_all(self) -> None:
        """Send SIGKILL to all descendants that belong to the job."""
        proc.kill_all(self._others(proc.process_table()))

    def is_clear(self, kill: bool) -> bool:
        """Whether no descendant that belongs to the job is left."""
        left = self._others(proc.process_table())
        if left and kill:
            proc.kill_all(left)
        return not left

    def _owners(self, processes: Mapping[int, ReplicaProcess], table: Mapping[int, proc.ProcessRow]) -> dict[int, int]:
        """The replica to which each process of the job counts: by ancestors, by session, else the first."""
        sessions = {process.pid: number for number, process in processes.items()}
        families = {pid: number for number, b in processes.items() for pid in proc.descendants(b.pid, table)}
        first = next(iter(processes))
        return {
            pid: sessions.get(pid, families.get(pid, sessions.get(table[pid].session, first)))
            for pid in self._others(table)
        }

    def over_memory(self, processes: Mapping[int, ReplicaProcess], limit: float) -> tuple[int, float] | None:
        """The replica whose processes use most memory, where that is above the limit."""
        if not processes:
            return None
        table = proc.process_table()
        whose = self._owners(processes, table)
        used = dict.fromkeys(processes, 0)
        for pid, number in whose.items():
            used[number] += table[pid].rss_bytes
        if max(used.values()) > limit:
            # This figure counts shared pages for every process, also those of the process that all were forked from.
            own = proc.memory_use(os.getpid()) if self._warm_variables is not None else None
            inherited = own[1] if own is not None else 0
            used = dict.fromkeys(used, 0)
            for pid, number in whose.items():
                used[number] += _used(pid, table[pid].rss_bytes, inherited)
        number, most = max(used.items(), key=lambda item: item[1])
        return (number, float(most)) if most > limit else None


def _used(pid: int, resident: int, inherited: int) -> int:
    """The bytes that a process has added to the memory it was forked with; `resident` where the kernel does not say."""
    use = proc.memory_use(pid)
    return resident if use is None else use[0] - min(use[1], inherited)
