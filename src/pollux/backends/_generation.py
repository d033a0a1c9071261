"""One generation inside a shim: its processes, their output, its limits, and how it comes to an end.

Nothing here waits: the shim's loop hands in what happened and asks when to look again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pollux.backends import _processes, _storehost
from pollux.backends._logfile import LogWriter
from pollux.backends._outcome import judge
from pollux.backends._records import record_path, write_record
from pollux.backends._replica import ReplicaStart, start_replica
from pollux.backends.protocol import Exit, ReplicasEnded

__all__ = ["Generation", "Order"]

FAILED_OTHERS_SECONDS = 5.0
"""How long replicas may go on once another has failed: a collective that lost a peer ends by itself, or never."""

_LAST_WORDS_SECONDS = 2.0
_MEMORY_SECONDS = 0.25
_SWEEP_SECONDS = 0.01
_READ_BYTES = 64 << 10
_FLOOD_BYTES = 4 << 20
_FLOOD_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Order:
    """A launch as a shim gets it: every replica's own variables and cores, and the places they hold."""

    job_id: str
    generation: int
    argv: tuple[str, ...]
    workdir: str
    environ: Mapping[str, str]
    replicas: tuple[Mapping[str, str], ...]
    cores: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]
    run_id: str
    path_was_set: bool
    grace_seconds: float
    memory_bytes: float
    logs: str
    log_cap_bytes: int

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Order:
        """From plain values, as JSON has them."""
        plain = dict(value)
        for name in ("argv", "replicas", "places"):
            plain[name] = tuple(plain[name])
        plain["cores"] = tuple(tuple(cores) for cores in plain["cores"])
        return cls(**plain)


@dataclass(slots=True)
class Member:
    """One replica: its process, the reading end of its output, its log, and how it ended."""

    number: int
    pid: int
    start: int
    output: int
    log: LogWriter
    code: int | None = None
    ended_at: float = 0.0
    read_bytes: int = 0
    pipe: str = ""


@dataclass(slots=True)
class Generation:
    """The replicas of one order. `ended` is set once no process of theirs is left."""

    order: Order
    folder: Path
    warm_variables: Mapping[str, str] | None
    let_go: Callable[[], None]
    members: list[Member] = field(default_factory=list)
    told_to_stop: bool = False
    ended: ReplicasEnded | None = None
    _store_host: int | None = None
    _kill_at: float | None = None
    _failed_at: float | None = None
    _ended_by_us: set[int] = field(default_factory=set)
    _over_memory: str = ""
    _trouble: str = ""
    _look_at: float | None = None
    _memory_at: float = 0.0
    _flooded_until: float | None = None
    _window_began: float = 0.0
    _oom_kills: int = 0

    def start(self) -> None:
        """Note the intent, fork, note who they are. In a forked replica this does not return: see `ForkedReplica`."""
        self._oom_kills = _processes.oom_kills()
        self._note()
        port, hosted = self._meeting_point()
        for number, own in enumerate(self.order.replicas):
            environ = {**self.order.environ, **own, "MASTER_PORT": str(port)}
            if hosted:
                environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            self._fork(number, environ)
        self._note()

    def _meeting_point(self) -> tuple[int, bool]:
        """A port, and whether a process of ours listens there: for more than one replica and with PyTorch."""
        listener, port = _storehost.listen()
        hosted = len(self.order.replicas) > 1 and _storehost.is_possible()
        if hosted:
            self._store_host = _storehost.start(listener, port, self.warm_variables is not None, self.let_go)
        os.close(listener)
        return port, hosted

    def _fork(self, number: int, environ: Mapping[str, str]) -> None:
        order = self.order
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        start = ReplicaStart(order.argv, order.workdir, environ, order.cores[number], order.path_was_set)
        pid = start_replica(start, writing, self.warm_variables, self.let_go)
        pipe = os.readlink(f"/proc/self/fd/{reading}")
        os.close(writing)
        log = LogWriter(Path(order.logs) / f"{number}.log", order.log_cap_bytes)
        self.members.append(Member(number, pid, _processes.start_time(pid) or 0, reading, log, pipe=pipe))

    def _note(self) -> None:
        order = self.order
        command = json.dumps([order.argv, order.workdir]).encode()
        write_record(
            record_path(self.folder, "generation", order.generation),
            {
                "job_id": order.job_id,
                "generation": order.generation,
                "command": hashlib.sha256(command).hexdigest(),
                "run_id": order.run_id,
                "boot": _processes.boot_id(),
                "places": order.places,
                "replicas": [[member.pid, member.start, member.pipe] for member in self.members],
            },
        )

    @property
    def outputs(self) -> list[Member]:
        """Those whose output is to be read now; none while a flood is held back."""
        if self._flooded_until is not None:
            return []
        return [member for member in self.members if member.output >= 0]

    def stop(self, grace_seconds: float) -> None:
        """SIGTERM now and SIGKILL after the grace; a second time only ever shortens it."""
        if self.ended:
            return
        deadline = time.monotonic() + max(0.0, grace_seconds)
        if self._kill_at is None or deadline < self._kill_at:
            self._kill_at = deadline
        if not self.told_to_stop:
            self.told_to_stop = True
            self._terminate()

    def fail(self, why: str) -> None:
        """It could not be started whole: what was started ends at once."""
        self._trouble = why
        self._kill_rest()

    def _terminate(self) -> None:
        """Ask replicas to end: Python itself only, which minds its workers; shells and others with all they started."""
        name = os.path.basename(self.order.argv[0])
        alone = name.startswith("python") or name == "torchrun"
        for member in self._living():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.kill if alone else os.killpg)(member.pid, signal.SIGTERM)

    def _living(self) -> list[Member]:
        return [member for member in self.members if member.code is None]

    def on_exit(self, pid: int, code: int) -> None:
        """A child of the shim has ended."""
        for member in self.members:
            if member.pid == pid and member.code is None:
                member.code, member.ended_at = code, time.time()
                if code != 0 and self._failed_at is None and not self.told_to_stop:
                    self._failed_at = time.monotonic()
        if pid == self._store_host:
            self._store_host = None

    def on_output(self, member: Member) -> None:
        """Some output can be read: a bounded piece of it."""
        try:
            piece = os.read(member.output, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            os.close(member.output)
            member.output = -1
            return
        member.log.write(piece)
        now = time.monotonic()
        if now - self._window_began > _FLOOD_SECONDS:
            self._window_began = now
            for each in self.members:
                each.read_bytes = 0
        member.read_bytes += len(piece)
        if member.read_bytes > _FLOOD_BYTES:
            self._flooded_until = self._window_began + _FLOOD_SECONDS

    def look_again_at(self) -> float | None:
        """When `look` must be called next, on the monotonic clock; None: only when something happens."""
        times = [self._kill_at, self._look_at, self._flooded_until]
        if self._failed_at is not None and self._living():
            times.append(self._failed_at + FAILED_OTHERS_SECONDS)
        if self.order.memory_bytes > 0:
            times.append(self._memory_at)
        return min((at for at in times if at is not None), default=None)

    def look(self) -> None:
        """Act on whatever is due."""
        if self.ended:
            return
        now = time.monotonic()
        if self._flooded_until is not None and now >= self._flooded_until:
            self._flooded_until = None
        self._look_at = None
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._kill_rest()
        if self._failed_at is not None and now >= self._failed_at + FAILED_OTHERS_SECONDS and self._living():
            self._give_up_on_others(now)
        if self.order.memory_bytes > 0 and now >= self._memory_at:
            self._memory_at = now + _MEMORY_SECONDS
            self._check_memory()
        if not self._living():
            self._finish(now)

    def _give_up_on_others(self, now: float) -> None:
        if self._ended_by_us:
            return
        self._ended_by_us = {member.number for member in self._living()}
        self._terminate()
        self._kill_at = min(self._kill_at or float("inf"), now + _LAST_WORDS_SECONDS)

    def _others(self, table: Mapping[int, _processes.ProcessRow]) -> list[int]:
        """Every process below the shim that belongs to the job."""
        return [pid for pid in _processes.descendants(os.getpid(), table) if pid != self._store_host]

    def _kill_rest(self) -> None:
        _processes.kill_all(self._others(_processes.process_table()))
        self._look_at = time.monotonic() + _SWEEP_SECONDS

    def _check_memory(self) -> None:
        table = _processes.process_table()
        used = {member.number: 0 for member in self.members}
        sessions = {member.pid: member.number for member in self.members}
        families = {pid: member.number for member in self.members for pid in _processes.descendants(member.pid, table)}
        for pid in self._others(table):
            number = families.get(pid, sessions.get(table[pid].session, 0))
            used[sessions.get(pid, number)] += table[pid].rss_bytes
        number, most = max(used.items(), key=lambda item: item[1])
        if most > self.order.memory_bytes and not self._over_memory:
            self._over_memory = (
                f"replica {number}: used {most / 2**20:.0f} MiB, above its limit of "
                f"{self.order.memory_bytes / 2**20:.0f} MiB: ask for more memory, or use less"
            )
        if self._over_memory:
            self._kill_rest()

    def _finish(self, now: float) -> None:
        """All replicas have ended: end what they left, then write down how it went."""
        left = self._others(_processes.process_table())
        if left:
            if self.told_to_stop and self._kill_at is not None:
                # Told to stop, and within their grace; each one's end wakes the shim.
                return
            _processes.kill_all(left)
            self._look_at = now + _SWEEP_SECONDS
            return
        self._drain()
        if self._store_host is not None:
            _processes.kill_all([self._store_host])
        exits = tuple(Exit(member.number, member.code or 0, member.ended_at) for member in self.members)
        outcome, detail = judge(
            exits,
            {member.number: member.log.tail for member in self.members},
            self.told_to_stop,
            frozenset(self._ended_by_us),
            self._over_memory,
            _processes.oom_kills() > self._oom_kills,
        )
        if self._trouble:
            outcome, detail = "crashed", self._trouble
        self.ended = ReplicasEnded(time.time(), self.order.job_id, self.order.generation, outcome, exits, detail)

    def _drain(self) -> None:
        for member in self.members:
            for _ in range(1024):
                if member.output < 0:
                    break
                try:
                    piece = os.read(member.output, _READ_BYTES)
                except OSError:
                    break
                if not piece:
                    break
                member.log.write(piece)
            if member.output >= 0:
                os.close(member.output)
                member.output = -1
            member.log.close()
