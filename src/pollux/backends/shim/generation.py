"""One generation inside a shim: starts its processes, reads their output, keeps its limits, and finds how it ended.

Nothing here waits: the shim's loop reports what happened, and asks when something is due.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pollux.backends.nodes.slot import Slot
from pollux.backends.process import proc
from pollux.backends.process.fork_replica import ReplicaStart
from pollux.backends.process.launcher import ReplicaLauncher, ReplicaProcess
from pollux.backends.process.memory_check import MemoryCheck
from pollux.backends.process.outcome import judge
from pollux.backends.process.records import record_path, write_record
from pollux.backends.process.replica_env import rank_variables
from pollux.backends.protocol import Exit, Outcome, ReplicasEnded
from pollux.backends.shim.actions import ReplicaChange, Seat
from pollux.backends.shim.generation_replicas import GenerationReplicas, RunningReplica
from pollux.backends.shim.output import RankLogs, ReplicaLog
from pollux.backends.shim.store import server as store_server
from pollux.backends.transport.error_stream import say
from pollux.core.errors import BackendFailed
from pollux.wire.live.messages import LaunchOrder
from pollux.wire.live.store_channel import JOIN_VARIABLE, SECRET_VARIABLE, STORE_VARIABLE

__all__ = ["Generation"]

FAILED_OTHERS_SECONDS = 5.0
"""How long replicas may go on after another has failed: a collective that lost a peer fails soon, or hangs for ever."""

_LAST_WORDS_SECONDS = 2.0
_RETRY_SECONDS = 1.0


def _with_places(order: LaunchOrder, places: tuple[str, ...]) -> LaunchOrder:
    """The same order with its places sorted like this, by rank."""
    before = [order.places.index(place) for place in places]
    cores = tuple(order.cores[was] for was in before)
    return replace(order, places=places, replicas=rank_variables(places, order.gpus), cores=cores)


@dataclass(slots=True)
class Generation:
    """The replicas of one order. `ended` is set once no process of the generation is left."""

    order: LaunchOrder
    folder: Path
    launcher: ReplicaLauncher
    close_in_fork: Callable[[], None]
    store: store_server.StoreHost | None = None
    replicas: GenerationReplicas = field(default_factory=GenerationReplicas)
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
    _memory: MemoryCheck = field(init=False)
    _port: int = 0
    _variable: str = ""
    _look_at: float | None = None
    _write_at: float | None = None

    def __post_init__(self) -> None:
        self.logs = RankLogs(Path(self.order.logs), self.order.log_cap_bytes)
        self._memory = MemoryCheck(self.launcher, self.order.memory_bytes)

    @property
    def members(self) -> list[RunningReplica]:
        """The replicas that are part of the job now."""
        return self.replicas.members

    def start(self) -> None:
        """Record the order, fork the replicas, record their processes.

        In a forked replica this does not return: see `ForkedReplica`.
        """
        self._write_record()
        self._port, hosted = self._open_meeting_point()
        for rank in range(len(self.order.replicas)):
            self._fork(rank, rank, self._environ(rank, hosted))
        self._write_record()

    def _environ(self, rank: int, hosted: bool) -> dict[str, str]:
        environ = {**self.order.environ, **self.order.replicas[rank], "MASTER_PORT": str(self._port)}
        if hosted:
            environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        if self._variable:
            environ[SECRET_VARIABLE] = self._variable
        if self.store is not None:
            environ[STORE_VARIABLE] = self.store.address
        return environ

    def _open_meeting_point(self) -> tuple[int, bool]:
        """A port, and whether a store of ours listens there: for more than one replica and with PyTorch."""
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
        log = ReplicaLog(self.logs.writer_of(rank))
        process = self.launcher.start(start, order.places[rank], order.memory_bytes, log.write)
        self.members.append(RunningReplica(number, rank, order.places[rank], process, log))

    def _write_record(self) -> None:
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
                "places": sorted({*order.places, *(replica.place for replica in self.replicas.living)}),
                "live": order.live,
                "replicas": [] if order.fleet else [_identity(replica.process) for replica in self.replicas.living],
                "nodes": {} if order.fleet is None else dict(order.fleet.nodes),
                "session": self.launcher.session,
            },
        )
        self._write_at = None

    def _write_record_or_retry(self) -> None:
        """Record what has happened already; if the disk takes no record now, try again later."""
        try:
            self._write_record()
        except BackendFailed as error:
            if self._write_at is None:
                say(f"{error}; it is tried again")
            self._write_at = time.monotonic() + _RETRY_SECONDS

    @property
    def is_recorded(self) -> bool:
        """Whether the record of this generation on disk is up to date."""
        return self._write_at is None

    # Replicas that join and leave

    def take_order(self, order: LaunchOrder, ranks: Mapping[int, int]) -> ReplicaChange:
        """Take an order for other places. `ranks`: the replicas that hold the state, by number.

        Replicas whose place is in the order stay.
        """
        living = (member for member in self.replicas.living_members if member.number in ranks)
        holders = sorted(living, key=lambda member: ranks[member.number])
        staying = [member for member in holders if member.place in order.places]
        taken = {member.place for member in staying}
        free = tuple(place for place in order.places if place not in taken)
        self.order = _with_places(order, (*(member.place for member in staying), *free))
        self._memory.limit_bytes = order.memory_bytes
        self._write_record_or_retry()
        seats = [Seat(member.number, ranks[member.number]) for member in staying]
        joining = [Seat(number, None) for number in self.replicas.unused_numbers(len(free))]
        leavers = tuple(member.number for member in holders if member.place not in taken)
        nodes = {Slot.read(place).node for place in order.places}
        return ReplicaChange(order.generation, (*seats, *joining), leavers, len(nodes))

    def renumber(self, generation: int) -> None:
        """Give a generation that is ending the number of an order that came too late to be carried out."""
        self.order = replace(self.order, generation=generation)
        self._write_record_or_retry()

    def join(self, rank: int, number: int) -> None:
        """Start the process of a replica that joins. In a forked replica this does not return: see `ForkedReplica`.

        OSError or BackendFailed where the process cannot be started, or cannot be recorded.
        """
        if not self.is_recorded:
            self._write_record()
        self._fork(rank, number, {**self._environ(rank, True), JOIN_VARIABLE: "1"})
        self._write_record()

    def adopt_ranks(self, ranks: Mapping[int, int]) -> None:
        """Give members these ranks, by number; members without one depart."""
        for member in self.replicas.sort_members(ranks):
            self.dismiss(member)
        for member in self.members:
            if member.rank != ranks[member.number]:
                member.rank = ranks[member.number]
                self.logs.change_rank(member, member.rank)
        self.replicas.forget_ended()
        self.logs.close({replica.rank for replica in self.replicas.everyone})
        self._write_record_or_retry()

    def dismiss(self, member: RunningReplica) -> None:
        """Take a replica out of the job: how it ends does not matter; processes that it left behind end now."""
        self.replicas.depart(member)
        if member.code is not None:
            self.launcher.sweep(member.process)

    def kill(self, number: int) -> None:
        """Kill one replica and its whole session at once."""
        for replica in self.replicas.living:
            if replica.number == number:
                self.launcher.kill(replica.process)

    def end_for_restart(self, why: str) -> None:
        """End the generation, so that the job restarts from its checkpoint; replicas get the grace to save one."""
        if self.ended or self._given_up:
            return
        self._given_up = why
        self._terminate()
        self._kill_at = min(self._kill_at or float("inf"), time.monotonic() + max(0.0, self.order.grace_seconds))

    def doubt_success(self, number: int, why: str) -> None:
        """Do not take the exit code 0 of this replica for the end of the job, unless `believe_success` follows."""
        self._doubted[number] = why

    def believe_success(self) -> None:
        """The job has reported that it is finished: exit codes of 0 count as success."""
        self._doubted.clear()

    @property
    def is_ending(self) -> bool:
        """Whether the generation will end soon: by order, or because a replica failed or none is left."""
        is_failing = self._failed_at is not None or not self.replicas.living_members
        return bool(self.told_to_stop or self._given_up or is_failing)

    @property
    def outputs(self) -> list[RunningReplica]:
        """The replicas whose output is to be read now; none while too much output is held back."""
        if self.logs.flooded_until is not None:
            return []
        return [replica for replica in self.replicas.everyone if replica.output >= 0]

    def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM now and SIGKILL after the grace; a second call can only shorten the grace."""
        if self.ended:
            return
        deadline = time.monotonic() + max(0.0, grace_seconds)
        if self._kill_at is None or deadline < self._kill_at:
            self._kill_at = deadline
        if not self.told_to_stop:
            self.told_to_stop = True
            self._terminate()

    def fail(self, why: str) -> None:
        """Kill what was started: not all replicas could be started, through no fault of the job."""
        self._trouble = why
        self._kill_rest()

    def close(self) -> None:
        """Close the log files and end the store's process; for a generation of which nothing was started."""
        if self.store_host is not None:
            proc.kill_all([self.store_host])
        self.logs.close(())

    def _terminate(self) -> None:
        """Send SIGTERM to Python alone, which ends its workers itself; to other programs with all their children."""
        name = os.path.basename(self.order.argv[0])
        alone = name.startswith("python") or name == "torchrun"
        for member in self.replicas.living_members:
            if self.launcher.terminate(member.process, alone):
                self._asked.add(member.number)

    def on_exit(self, pid: int, code: int) -> RunningReplica | None:
        """Note that a child of the shim has ended; the replica, if it was a member. See `on_failure`."""
        if pid == self.store_host:
            self.store_host = None
        return self.replicas.note_end(lambda process: process.pid == pid and not process.key, code)

    def on_node_loss(self, processes: Collection[ReplicaProcess]) -> list[RunningReplica]:
        """Note that these processes are lost with their node; the replicas among them that were members."""
        found = [self.replicas.note_end(partial(operator.is_, process), -signal.SIGKILL) for process in processes]
        return [member for member in found if member is not None]

    def on_remote_exit(self, process: ReplicaProcess, code: int, asked: bool) -> RunningReplica | None:
        """Note that a replica on another machine has ended; `asked`: it was told to end while it ran."""
        member = self.replicas.note_end(partial(operator.is_, process), code)
        if member is None:
            self.launcher.sweep(process)
        elif not asked:
            self._asked.discard(member.number)
        return member

    def on_failure(self) -> None:
        """A replica has failed: give the others some seconds to end by themselves."""
        if self._failed_at is None and not self.told_to_stop and not self._given_up:
            self._failed_at = time.monotonic()

    @property
    def lacks_memory(self) -> bool:
        """Whether a replica may have been killed for lack of memory."""
        return bool(self._over_memory) or self.launcher.lacks_memory

    def due(self) -> float | None:
        """When `act_on_due` must be called next, on the monotonic clock; None: only when something happens."""
        deadlines = [self._kill_at, self._look_at, self._write_at, self._others_end_at]
        times = [*deadlines, self.logs.flooded_until, self._memory.due]
        return min((at for at in times if at is not None), default=None)

    def act_on_due(self) -> None:
        """Do whatever is due."""
        if self.ended:
            return
        now = time.monotonic()
        self._look_at = None
        if _is_due(self.logs.flooded_until, now):
            self.logs.flooded_until = None
        if _is_due(self._write_at, now):
            self._write_record_or_retry()
        if _is_due(self._kill_at, now):
            self._kill_at = None
            self._kill_rest()
        if _is_due(self._others_end_at, now):
            self._end_others(now)
        self._check_memory()
        if not self.replicas.living_members:
            self._finish(now)

    @property
    def _others_end_at(self) -> float | None:
        """When to end replicas that still run after another has failed; None without any, or once that was done."""
        if self._failed_at is None or self._ended_by_us or not self.replicas.living_members:
            return None
        return self._failed_at + FAILED_OTHERS_SECONDS

    def _end_others(self, now: float) -> None:
        self._ended_by_us = {member.number for member in self.replicas.living_members}
        self._terminate()
        self._kill_at = min(self._kill_at or float("inf"), now + _LAST_WORDS_SECONDS)

    def _kill_rest(self) -> None:
        self.launcher.kill_all()
        self._look_at = time.monotonic() + self.launcher.sweep_seconds

    def _check_memory(self) -> None:
        found = self._memory.find_excess({replica.number: replica.process for replica in self.replicas.everyone})
        if found is not None:
            number, used = found
            self._over_memory = self._over_memory or (
                f"replica {number}: used {used / 2**20:.0f} MiB, above its limit of "
                f"{self.order.memory_bytes / 2**20:.0f} MiB: ask for more memory, or use less"
            )
            self._kill_rest()

    def _finish(self, now: float) -> None:
        """End the processes that the replicas left behind, then set how the generation ended."""
        # Processes that were told to stop have their grace; the end of each of them wakes the shim.
        kill = not (self.told_to_stop and self._kill_at is not None)
        if not self.launcher.is_clear(kill):
            if kill:
                self._look_at = now + self.launcher.sweep_seconds
            return
        self.logs.drain(self.replicas.everyone)
        if self.store_host is not None:
            proc.kill_all([self.store_host])
        exits = tuple(Exit(member.number, member.code or 0, member.ended_at) for member in self.members)
        outcome, detail = self._judge(exits)
        self.ended = ReplicasEnded(time.time(), self.order.job_id, self.order.generation, outcome, exits, detail)

    def _judge(self, exits: tuple[Exit, ...]) -> tuple[Outcome, str]:
        """The outcome of the generation, and why."""
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


def _identity(process: ReplicaProcess) -> list[int | str]:
    """What finds the process again after the shim has ended."""
    return [process.pid, process.start, process.pipe]


def _is_due(at: float | None, now: float) -> bool:
    return at is not None and now >= at
