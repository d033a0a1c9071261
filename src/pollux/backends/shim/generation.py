"""One generation inside a shim: its processes, their output, its limits, and how it comes to an end.

Nothing here waits: the shim's loop launcher in what happened and asks when to look again.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pollux.backends.nodes.slot import Slot
from pollux.backends.process import proc
from pollux.backends.process.fork_replica import ReplicaStart
from pollux.backends.process.launcher import ReplicaLauncher, ReplicaProcess
from pollux.backends.process.outcome import judge
from pollux.backends.process.records import record_path, write_record
from pollux.backends.process.replica_env import rank_variables
from pollux.backends.protocol import Exit, Outcome, ReplicasEnded
from pollux.backends.shim.actions import ReplicaChange, Seat
from pollux.backends.shim.output import RankLogs, ReplicaLog
from pollux.backends.shim.store import server as store_server
from pollux.core.errors import BackendFailed
from pollux.wire.live.messages import LaunchOrder
from pollux.wire.live.store_channel import SECRET_VARIABLE

__all__ = ["Generation", "RunningReplica"]

FAILED_OTHERS_SECONDS = 5.0
"""How long replicas may go on once another has failed: a collective that lost a peer ends by itself, or never."""

_LAST_WORDS_SECONDS = 2.0
_RETRY_SECONDS = 1.0
_MEMORY_SECONDS = 0.25
_MEMORY_SHARE = 20.0


def _seated(order: LaunchOrder, places: tuple[str, ...]) -> LaunchOrder:
    """The same order with its places in another order, which is that of the ranks."""
    before = [order.places.index(place) for place in places]
    cores = tuple(order.cores[was] for was in before)
    return replace(order, places=places, replicas=rank_variables(places, order.gpus), cores=cores)


@dataclass(slots=True)
class RunningReplica:
    """One replica: its process, its log, and how it ended.

    `number` is its own as long as it lives; its `rank` may change. Who joins has the rank that it is to have, who has
    departed the last one that it had.
    """

    number: int
    rank: int
    place: str
    process: ReplicaProcess
    log: ReplicaLog
    code: int | None = None
    ended_at: float = 0.0

    @property
    def output(self) -> int:
        """The reading end of its output; -1 for none."""
        return self.process.output


@dataclass(slots=True)
class Generation:
    """The replicas of one order. `ended` is set once no process of theirs is left."""

    order: LaunchOrder
    folder: Path
    launcher: ReplicaLauncher
    close_in_fork: Callable[[], None]
    store: store_server.StoreHost | None = None
    members: list[RunningReplica] = field(default_factory=list)
    departed: list[RunningReplica] = field(default_factory=list)
    told_to_stop: bool = False
    ended: ReplicasEnded | None = None
    store_host: int | None = None
    _kill_at: float | None = None
    _failed_at: float | None = None
    _ended_by_us: set[int] = field(default_factory=set)
    _asked: set[int] = field(default_factory=set)
    _over_memory: str = ""
    _trouble: str = ""
    _given_up: str = ""
    _doubted: dict[int, str] = field(default_factory=dict)
    logs: RankLogs = field(init=False)
    _port: int = 0
    _variable: str = ""
    _look_at: float | None = None
    _note_at: float | None = None
    _memory_at: float = 0.0

    def __post_init__(self) -> None:
        self.logs = RankLogs(Path(self.order.logs), self.order.log_cap_bytes)

    def start(self) -> None:
        """Note the intent, fork, note who they are. In a forked replica this does not return: see `ForkedReplica`."""
        self._note()
        self._port, hosted = self._meeting_point()
        for rank in range(len(self.order.replicas)):
            self._fork(rank, rank, self._environ(rank, hosted))
        self._note()

    def _environ(self, rank: int, hosted: bool) -> dict[str, str]:
        environ = {**self.order.environ, **self.order.replicas[rank], "MASTER_PORT": str(self._port)}
        if hosted:
            environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        if self._variable:
            environ[SECRET_VARIABLE] = self._variable
        if self.store is not None:
            environ["POLLUX_STORE"] = self.store.address
        return environ

    def _meeting_point(self) -> tuple[int, bool]:
        """A port, and whether a process of ours listens there: for more than one replica and with PyTorch."""
        if self.store is not None:
            self._variable = self.store.variable
            return self.store.port, True
        listening = store_server.ListeningStore(self.order.fleet)
        hosted = len(self.order.replicas) > 1 and store_server.is_possible()
        try:
            if hosted:
                self.store_host = listening.fork_host(self.close_in_fork)
                self._variable = listening.variable
        finally:
            listening.close()
        return listening.port, hosted

    def _fork(self, rank: int, number: int, environ: Mapping[str, str]) -> None:
        order = self.order
        start = ReplicaStart(order.argv, order.workdir, environ, order.cores[rank], order.path_was_set)
        log = ReplicaLog(self.logs.of(rank))
        process = self.launcher.start(start, order.places[rank], order.memory_bytes, log.write)
        self.members.append(RunningReplica(number, rank, order.places[rank], process, log))

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
                "boot": proc.boot_id(),
                "places": sorted({*order.places, *(member.place for member in self._all_living())}),
                "live": order.live,
                "replicas": [] if order.fleet else [[b.pid, b.start, b.pipe] for b in self._processes()],
                "nodes": {} if order.fleet is None else dict(order.fleet.nodes),
                "session": self.launcher.session,
            },
        )
        self._note_at = None

    def _note_or_later(self) -> None:
        """What is so already is no worse for a disk that takes no record of it now."""
        try:
            self._note()
        except BackendFailed as error:
            if self._note_at is None:
                print(f"{error}; it is tried again", file=sys.stderr, flush=True)
            self._note_at = time.monotonic() + _RETRY_SECONDS

    @property
    def is_noted(self) -> bool:
        """Whether what it is now is on disk."""
        return self._note_at is None

    # Other replicas in place of some of these

    def take_order(self, order: LaunchOrder, ranks: Mapping[int, int]) -> ReplicaChange:
        """Take another order; who keeps its place stays, `ranks` by number being those that hold the state."""
        holders = sorted((member for member in self._living() if member.number in ranks), key=lambda m: ranks[m.number])
        staying = [member for member in holders if member.place in order.places]
        taken = {member.place for member in staying}
        free = tuple(place for place in order.places if place not in taken)
        self.order = _seated(order, (*(member.place for member in staying), *free))
        self._note_or_later()
        seats = [Seat(member.number, ranks[member.number]) for member in staying]
        joining = [Seat(number, None) for number in self._unused_numbers(len(free))]
        leavers = tuple(member.number for member in holders if member.place not in taken)
        nodes = {Slot.read(place).node for place in order.places}
        return ReplicaChange(order.generation, (*seats, *joining), leavers, len(nodes))

    def _unused_numbers(self, count: int) -> list[int]:
        """So many numbers that no process has, nor one whose output is still read."""
        everybody = (*self.members, *self.departed)
        used = {member.number for member in everybody if member.code is None or member.output >= 0}
        return [number for number in range(len(used) + count) if number not in used][:count]

    def renumber(self, generation: int) -> None:
        """It ends, and does so as this generation: the order for it came too late."""
        self.order = replace(self.order, generation=generation)
        self._note_or_later()

    def join(self, rank: int, number: int) -> None:
        """Start the process of a replica that joins. In a forked replica this does not return: see `ForkedReplica`.

        OSError or BackendFailed where it cannot be started, or that cannot be noted.
        """
        if not self.is_noted:
            self._note()
        self._fork(rank, number, {**self._environ(rank, True), "POLLUX_JOIN": "1"})
        self._note()

    def adopt_ranks(self, ranks: Mapping[int, int]) -> None:
        """These, by number, are the replicas now; all others have departed."""
        for member in [*self.members]:
            if member.number in ranks:
                if member.rank != ranks[member.number]:
                    member.rank = ranks[member.number]
                    self.logs.change_rank(member, member.rank)
            else:
                self.dismiss(member)
        self.members.sort(key=lambda member: member.rank)
        for member in [each for each in self.departed if each.code is not None and each.output < 0]:
            self.departed.remove(member)
        self.logs.close({member.rank for member in (*self.members, *self.departed)})
        self._note_or_later()

    def dismiss(self, member: RunningReplica) -> None:
        """It is no part of the job any more, however it ends; what it left running ends now."""
        self.members.remove(member)
        self.departed.append(member)
        if member.code is not None:
            self.launcher.sweep(member.process)

    def kill(self, number: int) -> None:
        """End one replica, and all of its session, at once."""
        for member in self._all_living():
            if member.number == number:
                self.launcher.kill(member.process)

    def end_for_restart(self, why: str) -> None:
        """It ends, to be started anew from its checkpoint, which replicas that can still save have time for."""
        if self.ended or self._given_up:
            return
        self._given_up = why
        self._terminate()
        self._kill_at = min(self._kill_at or float("inf"), time.monotonic() + max(0.0, self.order.grace_seconds))

    def doubt_success(self, number: int, why: str) -> None:
        """That one ended with 0 does not make the job done, unless `believe_success` follows."""
        self._doubted[number] = why

    def believe_success(self) -> None:
        """The job has said that it is through."""
        self._doubted.clear()

    @property
    def is_ending(self) -> bool:
        """Whether it will end soon, by order or since it has to."""
        return bool(self.told_to_stop or self._given_up or self._failed_at is not None or not self._living())

    def _all_living(self) -> list[RunningReplica]:
        return [member for member in (*self.members, *self.departed) if member.code is None]

    def _processes(self) -> list[ReplicaProcess]:
        return [member.process for member in self._all_living()]

    @property
    def is_up(self) -> bool:
        """Whether all are processes, or were."""
        return all(member.process.up or member.code is not None for member in self.members)

    @property
    def outputs(self) -> list[RunningReplica]:
        """Those whose output is to be read now; none while a flood is held back."""
        if self.logs.flooded_until is not None:
            return []
        return [member for member in (*self.members, *self.departed) if member.output >= 0]

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
        """It could not be started whole, which is no fault of the job's: what was started ends at once."""
        self._trouble = why
        self._kill_rest()

    def close(self) -> None:
        """Nothing of it was started: its files close, its store's host ends."""
        if self.store_host is not None:
            proc.kill_all([self.store_host])
        self.logs.close(())

    def _terminate(self) -> None:
        """Ask replicas to end: Python itself only, which minds its workers; shells and others with all they started."""
        name = os.path.basename(self.order.argv[0])
        alone = name.startswith("python") or name == "torchrun"
        for member in self._living():
            if self.launcher.terminate(member.process, alone):
                self._asked.add(member.number)

    def _living(self) -> list[RunningReplica]:
        return [member for member in self.members if member.code is None]

    def on_exit(self, pid: int, code: int) -> RunningReplica | None:
        """A child of the shim has ended: the replica that it was, if it was one; see `on_failure`."""
        if pid == self.store_host:
            self.store_host = None
        return self._ended(lambda process: process.pid == pid and not process.key, code)

    def on_node_loss(self, processes: Collection[ReplicaProcess]) -> list[RunningReplica]:
        """These are gone with their node: those of them that were replicas until now."""
        found = [self._ended(partial(operator.is_, process), -signal.SIGKILL) for process in processes]
        return [member for member in found if member is not None]

    def on_remote_exit(self, process: ReplicaProcess, code: int, asked: bool) -> RunningReplica | None:
        """A replica on another machine has ended; `asked`: it was told to end while it ran."""
        member = self._ended(partial(operator.is_, process), code)
        if member is None:
            self.launcher.sweep(process)
        elif not asked:
            self._asked.discard(member.number)
        return member

    def _ended(self, is_it: Callable[[ReplicaProcess], bool], code: int) -> RunningReplica | None:
        for member in (*self.members, *self.departed):
            if member.code is None and is_it(member.process):
                member.code, member.ended_at = code, time.time()
                return member if member in self.members else None
        return None

    def on_failure(self) -> None:
        """A replica has failed: the others end too, by themselves or not."""
        if self._failed_at is None and not self.told_to_stop and not self._given_up:
            self._failed_at = time.monotonic()

    @property
    def lacks_memory(self) -> bool:
        """Whether a replica may have been ended for lack of memory."""
        return bool(self._over_memory) or self.launcher.lacks_memory

    def due(self) -> float | None:
        """When `act_on_due` must be called next, on the monotonic clock; None: only when something happens."""
        times = [self._kill_at, self._look_at, self.logs.flooded_until, self._note_at, self._others_end_at]
        if self.order.memory_bytes > 0:
            times.append(self._memory_at)
        return min((at for at in times if at is not None), default=None)

    def act_on_due(self) -> None:
        """Act on whatever is due."""
        if self.ended:
            return
        now = time.monotonic()
        self._look_at = None
        if _is_due(self.logs.flooded_until, now):
            self.logs.flooded_until = None
        if _is_due(self._note_at, now):
            self._note_or_later()
        if _is_due(self._kill_at, now):
            self._kill_at = None
            self._kill_rest()
        if _is_due(self._others_end_at, now):
            self._give_up_on_others(now)
        if self.order.memory_bytes > 0 and now >= self._memory_at:
            self._check_memory()
            # To look may take long where there is much memory: never more than a twentieth of the time.
            self._memory_at = now + max(_MEMORY_SECONDS, _MEMORY_SHARE * (time.monotonic() - now))
        if not self._living():
            self._finish(now)

    @property
    def _others_end_at(self) -> float | None:
        """When replicas that outlive the failure of another are ended; None where there are none, or they were told."""
        if self._failed_at is None or self._ended_by_us or not self._living():
            return None
        return self._failed_at + FAILED_OTHERS_SECONDS

    def _give_up_on_others(self, now: float) -> None:
        self._ended_by_us = {member.number for member in self._living()}
        self._terminate()
        self._kill_at = min(self._kill_at or float("inf"), now + _LAST_WORDS_SECONDS)

    def _kill_rest(self) -> None:
        self.launcher.kill_all()
        self._look_at = time.monotonic() + self.launcher.sweep_seconds

    def _check_memory(self) -> None:
        there = {member.number: member.process for member in (*self.members, *self.departed)}
        over = self.launcher.over_memory(there, self.order.memory_bytes)
        if over is not None and not self._over_memory:
            self._over_memory = (
                f"replica {over[0]}: used {over[1] / 2**20:.0f} MiB, above its limit of "
                f"{self.order.memory_bytes / 2**20:.0f} MiB: ask for more memory, or use less"
            )
        if self._over_memory:
            self._kill_rest()

    def _finish(self, now: float) -> None:
        """All replicas have ended: end what they left, then write down how it went."""
        # Told to stop, and within their grace: each one's end wakes the shim.
        kill = not (self.told_to_stop and self._kill_at is not None)
        if not self.launcher.is_clear(kill):
            if kill:
                self._look_at = now + self.launcher.sweep_seconds
            return
        self.logs.drain((*self.members, *self.departed))
        if self.store_host is not None:
            proc.kill_all([self.store_host])
        exits = tuple(Exit(member.number, member.code or 0, member.ended_at) for member in self.members)
        outcome, detail = self._judge(exits)
        self.ended = ReplicasEnded(time.time(), self.order.job_id, self.order.generation, outcome, exits, detail)

    def _judge(self, exits: tuple[Exit, ...]) -> tuple[Outcome, str]:
        """How it ended, and why."""
        if self._trouble:
            return "refused", self._trouble
        outcome, detail = judge(
            exits,
            {member.number: member.log.tail for member in self.members},
            self.told_to_stop,
            frozenset(self._ended_by_us),
            self._over_memory,
            self.launcher.lacks_memory,
            frozenset({*self._asked, *self._doubted}),
        )
        given_up = self._given_up or next(iter(self._doubted.values()), "")
        if given_up and outcome not in ("succeeded", "stopped"):
            return "lost", given_up
        return outcome, detail


def _is_due(at: float | None, now: float) -> bool:
    return at is not None and now >= at
