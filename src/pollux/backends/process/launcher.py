"""Starting, signalling and measuring the processes of a job's replicas: the interface, and doing it by our own forks.

`shim.remote_launcher` does the same on other machines.
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
    """One replica's process: number and start of it, the reading end of its output (-1: none here) and its pipe.

    `key` and `node` name it where it runs elsewhere; `up` once it is a process.
    """

    pid: int = 0
    start: int = 0
    output: int = -1
    pipe: str = ""
    key: str = ""
    node: str = ""
    up: bool = True

    def close_output(self) -> None:
        """Read its output no more."""
        if self.output >= 0:
            os.close(self.output)
            self.output = -1


class ReplicaLauncher(Protocol):
    """What a generation does with processes; nothing waits. `session` names it to other nodes, empty without any."""

    sweep_seconds: float
    session: str

    def start(
        self, start: ReplicaStart, place: str, memory_bytes: float, sink: Callable[[bytes], None]
    ) -> ReplicaProcess:
        """Start one; what it writes is to be read from its `output`, or goes into the sink."""

    def terminate(self, process: ReplicaProcess, alone: bool) -> bool:
        """SIGTERM, to it alone or to all it started; whether it still ran."""

    def kill(self, process: ReplicaProcess) -> None:
        """SIGKILL to it and its session."""

    def sweep(self, process: ReplicaProcess) -> None:
        """End what one that has ended left in its session."""

    def kill_all(self) -> None:
        """SIGKILL to everything of the job."""

    def is_clear(self, kill: bool) -> bool:
        """Whether no process of the job is left; `kill`: what is left ends now."""

    def over_memory(self, processes: Mapping[int, ReplicaProcess], limit: float) -> tuple[int, float] | None:
        """Whose processes use more than the limit, and how much, in bytes."""

    @property
    def lacks_memory(self) -> bool:
        """Whether the kernel has ended processes for lack of memory since the first start."""


class LocalLauncher:
    """Processes below this one, all of one job, but for those that `spared` names.

    `warm_variables`: the environment under which everything was imported, None where nothing was. `close_in_fork` is
    called first in every forked process.
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
        """Fork it. In the forked process this does not return: see `ForkedReplica`."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        try:
            pid = start_replica(start, writing, self._warm_variables, self._close_in_fork)
        except OSError:
            # Only where no process came of it: in a forked one nothing here may run.
            os.close(reading)
            os.close(writing)
            raise
        os.close(writing)
        pipe = os.readlink(f"/proc/self/fd/{reading}")
        return ReplicaProcess(pid, proc.start_time(pid) or 0, reading, pipe)

    def terminate(self, process: ReplicaProcess, alone: bool) -> bool:
        """SIGTERM; one that has ended and waits to be collected was through by itself."""
        ran = proc.is_alive(process.pid, process.start)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.kill if alone else os.killpg)(process.pid, signal.SIGTERM)
        return ran

    def kill(self, process: ReplicaProcess) -> None:
        """SIGKILL to its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    def sweep(self, process: ReplicaProcess) -> None:
        """End what is left of its session."""
        table = proc.process_table()
        proc.kill_all(row.pid for row in table.values() if row.session == process.pid)

    def _others(self, table: Mapping[int, proc.ProcessRow]) -> list[int]:
        """Every process below this one that belongs to the job."""
        spared = {*self._spared()}
        return [pid for pid in proc.descendants(os.getpid(), table) if pid not in spared]

    def kill_all(self) -> None:
        """SIGKILL to everything below."""
        proc.kill_all(self._others(proc.process_table()))

    def is_clear(self, kill: bool) -> bool:
        """Whether nothing of the job is below this process."""
        left = self._others(proc.process_table())
        if left and kill:
            proc.kill_all(left)
        return not left

    def _owners(self, processes: Mapping[int, ReplicaProcess], table: Mapping[int, proc.ProcessRow]) -> dict[int, int]:
        """The replica that each process of the job counts for: by ancestors, by session, else the first."""
        sessions = {process.pid: number for number, process in processes.items()}
        families = {pid: number for number, b in processes.items() for pid in proc.descendants(b.pid, table)}
        first = next(iter(processes))
        return {
            pid: sessions.get(pid, families.get(pid, sessions.get(table[pid].session, first)))
            for pid in self._others(table)
        }

    def over_memory(self, processes: Mapping[int, ReplicaProcess], limit: float) -> tuple[int, float] | None:
        """Whose processes use most, where that is above the limit."""
        if not processes:
            return None
        table = proc.process_table()
        whose = self._owners(processes, table)
        used = dict.fromkeys(processes, 0)
        for pid, number in whose.items():
            used[number] += table[pid].rss_bytes
        if max(used.values()) > limit:
            # Pages that are shared, such as those of the process all were forked from, count there for everybody.
            own = proc.memory_use(os.getpid()) if self._warm_variables is not None else None
            inherited = own[1] if own is not None else 0
            used = dict.fromkeys(used, 0)
            for pid, number in whose.items():
                used[number] += _used(pid, table[pid].rss_bytes, inherited)
        number, most = max(used.items(), key=lambda item: item[1])
        return (number, float(most)) if most > limit else None


def _used(pid: int, resident: int, inherited: int) -> int:
    """What a process added to the memory it began with, in bytes; all that it has where nobody can tell."""
    use = proc.memory_use(pid)
    return resident if use is None else use[0] - min(use[1], inherited)
