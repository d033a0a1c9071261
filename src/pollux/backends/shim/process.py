"""The shim: the small process that owns one job's replicas and outlives the service.

It is started with `python -m pollux.backends.shim.process`, and has one thread, so that it may fork. Services connect
to a socket in its folder, and exchange the messages of `pollux.wire.live.messages`. The shim writes its orders, and how
its job ended, to disk before it reports them.
In a live resize: after `backends.dispatch.changes`, before `backends.shim.live_generation` (docs/design/0016).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from pollux.backends.process import proc
from pollux.backends.process.fork_replica import ForkedReplica
from pollux.backends.process.launcher import LocalLauncher, ReplicaLauncher
from pollux.backends.process.records import (
    ended_to,
    newest_generation,
    read_ended,
    record_path,
    remove_records,
    write_record,
)
from pollux.backends.process.refusals import Refusals
from pollux.backends.process.run_time import RunClock
from pollux.backends.process.select_loop import SelectLoop, ended_children
from pollux.backends.protocol import ReplicasEnded
from pollux.backends.shim.generation import Generation
from pollux.backends.shim.generation_replicas import RunningReplica
from pollux.backends.shim.live_generation import LiveGeneration
from pollux.backends.shim.remote_launcher import NodeLeaving, NodeLoss, RemoteExit, RemoteLauncher
from pollux.backends.shim.service_connections import ServiceConnections
from pollux.backends.shim.store import server as store_server
from pollux.backends.transport.error_stream import say
from pollux.core.errors import BackendFailed, PolluxError
from pollux.storage.state_file import keep_end
from pollux.wire.live.messages import (
    AlarmMessage,
    EndedMessage,
    LaunchOrder,
    LaunchRequest,
    NodeGoneRequest,
    NodeLeavingMessage,
    NodeSilentMessage,
    RefusedMessage,
    ReleaseRequest,
    ResizeRequest,
    ShimRequest,
    StartedMessage,
    StatusMessage,
    StatusRequest,
    StopRequest,
)

__all__ = ["IDLE_SECONDS", "Shim", "serve"]

IDLE_SECONDS = 60.0
"""How long a shim without replicas waits for a service to connect before it ends."""

_RETRY_SECONDS = 1.0
_LONGEST_SLEEP_SECONDS = 3600.0


class Shim:
    """The loop. `warm_variables`: the environment during the imports, None where nothing was imported."""

    def __init__(self, folder: Path, listener: socket.socket, warm_variables: Mapping[str, str] | None) -> None:
        self._folder = folder
        self._warm_variables = warm_variables
        self._loop = SelectLoop()
        self._services = ServiceConnections(listener, self._loop, self._obey, self._make_room)
        self._generation: Generation | None = None
        self._live: LiveGeneration | None = None
        self._store: store_server.StoreHost | None = None
        self._remote: RemoteLauncher | None = None
        self._start_untold = False
        self._unwritten: ReplicasEnded | None = None
        self._said_unwritten: int | None = None
        self._reading: dict[int, RunningReplica] = {}
        self._leaving = False
        self._refusals = Refusals()
        self._run_clock = RunClock(folder)

    def run(self) -> None:
        """Run until released, idle or told to end; a forked replica leaves through `ForkedReplica`."""
        proc.adopt_orphans()
        self._loop.listen_to_signals(self._leave)
        self._services.listen()
        self._loop.watch(self._refusals.fd, self._tell_refusals)
        while not self._is_done():
            self._loop.turn(self._due())
            self._reap()
            self._handle_node_events()
            self._end_if_orphaned()
            self._act_on_due()
            keep_end(self._folder / "shim.log", 2)

    def _tell_refusals(self) -> None:
        """Send refusals to services, which log them: the shim's own log ends with the job."""
        for many, text in self._refusals.read():
            self._services.tell(RefusedMessage(time.time(), many, text))

    def _leave(self) -> None:
        self._leaving = True
        if self._generation is not None:
            self._stop(self._generation.order.grace_seconds)

    def _stop(self, grace_seconds: float) -> None:
        if self._live is not None:
            self._live.end_changes()
        if self._generation is not None:
            self._generation.stop(grace_seconds)

    def _close_in_fork(self) -> None:
        """Close the copies of the sockets in a forked process; the other sides notice nothing."""
        self._loop.close()
        self._services.close()
        if self._store is not None:
            self._store.control.close()
        if self._remote is not None:
            self._remote.close_in_fork()

    def _is_busy(self) -> bool:
        return (self._generation is not None and self._generation.ended is None) or self._unwritten is not None

    def _is_done(self) -> bool:
        if self._is_busy():
            return False
        idle = not self._services and time.monotonic() - self._services.idle_since >= IDLE_SECONDS
        return self._leaving or idle

    def _due(self) -> float | None:
        """When something is due, on the monotonic clock; None: only when something happens."""
        now = time.monotonic()
        times: list[float | None] = [now + _LONGEST_SLEEP_SECONDS]
        if self._generation is not None and self._generation.ended is None:
            times += [self._generation.due(), self._orphaned_at()]
            times.append(None if self._live is None else self._live.due)
        elif not self._services:
            times.append(self._services.idle_since + IDLE_SECONDS)
        if self._unwritten is not None:
            times.append(now + _RETRY_SECONDS)
        times.append(self._run_clock.due)
        seconds = None if self._remote is None else self._remote.due()
        times.append(None if seconds is None else now + seconds)
        found = [at for at in times if at is not None]
        return min(found) if len(found) > 1 else None

    def _orphaned_at(self) -> float | None:
        """When the job is stopped unless a service connects; None: never."""
        if self._generation is None or self._services or self._leaving or not self._is_busy():
            return None
        seconds = self._generation.order.orphan_seconds
        return None if seconds is None else self._services.idle_since + seconds

    def _end_if_orphaned(self) -> None:
        at = self._orphaned_at()
        if at is not None and time.monotonic() >= at:
            say("the service that started the job is gone: the job is stopped")
            self._leave()

    def _make_room(self) -> None:
        """End once no replica runs, so that a service of another version can start a shim of its own."""
        self._leaving = self._leaving or not self._is_busy()

    def _obey(self, request: ShimRequest) -> StatusMessage:
        match request:
            case LaunchRequest(order):
                self._launch(order)
            case StopRequest(number, grace_seconds):
                if self._generation is not None and self._generation.order.generation <= number:
                    self._stop(grace_seconds)
            case ResizeRequest(order):
                self._resize(order)
            case NodeGoneRequest(node, why):
                if self._remote is not None:
                    self._remote.node_is_gone(node, why)
            case ReleaseRequest():
                self._make_room()
            case StatusRequest():
                pass
        return self._status()

    def _status(self) -> StatusMessage:
        generation, warm, newest = self._generation, self._warm_variables is not None, self._newest_generation()
        if newest is None:
            return StatusMessage(warm, None)
        if generation is None or generation.order.generation != newest:
            ended = read_ended(self._folder, newest)
            return StatusMessage(warm, newest, ended=None if ended is None else ended_to(ended))
        status = StatusMessage(warm, newest, moving=self._start_untold)
        if self._live is not None:
            moving = self._start_untold or self._live.is_moving or generation.is_ending
            status = replace(status, moving=moving, lost=self._live.lost, pause=self._live.pause)
        return replace(status, ended=ended_to(generation.ended)) if generation.ended and not self._unwritten else status

    def _newest_generation(self) -> int | None:
        """The newest generation that was ordered, on disk or not."""
        if self._generation is not None and not self._generation.is_recorded:
            return self._generation.order.generation
        return newest_generation(self._folder)

    def _launch(self, order: LaunchOrder) -> None:
        newest = newest_generation(self._folder)
        known = self._generation.order.generation if self._generation is not None else 0
        if self._is_busy() or self._leaving or order.generation <= max(newest or 0, known):
            return
        generation = Generation(order, self._folder, self._launcher(order), self._close_in_fork)
        self._generation, self._live = generation, None
        try:
            if order.live and store_server.is_possible():
                generation.store = self._open_store(order)
            remove_records(self._folder, order.generation)
            generation.start()
        except (OSError, BackendFailed) as error:
            self._end_half_started(generation, error)
            return
        if generation.store is not None:
            self._live = LiveGeneration(generation, generation.store, self._services.tell)
        self._follow_outputs()
        self._start_untold = True

    def _end_half_started(self, generation: Generation, error: Exception) -> None:
        """End a generation of which some or all replicas could not be started."""
        if not generation.members:
            self._refuse(generation, error)
            return
        # One by one: a search for all their children needs to open files, and there may be none left.
        for member in generation.members:
            generation.kill(member.number)
        with contextlib.suppress(OSError):
            generation.fail(f"replicas could not be started: {error}")
        self._follow_outputs()

    def _refuse(self, generation: Generation, error: Exception) -> None:
        """Refuse the launch: no replica could be started, for lack of files, processes, memory or disk."""
        why = f"no replica could be started on this machine ({error}): check its limits (ulimit -a), memory and disk"
        job_id, number = generation.order.job_id, generation.order.generation
        self._unwritten = generation.ended = ReplicasEnded(time.time(), job_id, number, "refused", (), why)
        self._start_untold = False
        generation.close()
        self._close_store()
        self._release_remote()

    def _launcher(self, order: LaunchOrder) -> ReplicaLauncher:
        if order.fleet is None:
            return LocalLauncher(self._warm_variables, self._close_in_fork, self._spared)
        self._release_remote()
        self._remote = RemoteLauncher(order.fleet, self._loop)
        return self._remote

    def _spared(self) -> tuple[int | None, ...]:
        """Processes below this one that are not the job's."""
        generation, store = self._generation, self._store
        return (None if generation is None else generation.store_host, None if store is None else store.pid)

    def _release_remote(self) -> None:
        if self._remote is not None:
            self._remote.release()
            self._remote = None

    def _resize(self, order: LaunchOrder) -> None:
        """Resize the running generation. If it has ended, report that the new one ended in the same way."""
        generation = self._generation
        newest = max(newest_generation(self._folder) or 0, generation.order.generation if generation else 0)
        if generation is None or order.generation <= newest:
            return
        if generation.ended is not None:
            self._unwritten = generation.ended = replace(generation.ended, generation=order.generation)
            generation.renumber(order.generation)
        elif self._live is not None:
            if self._remote is not None and order.fleet is not None:
                self._remote.update_access(order.fleet)
            self._guarded(lambda live: live.resize(order))
            if generation.is_recorded:
                remove_records(self._folder, order.generation)

    def _guarded(self, what: Callable[[LiveGeneration], None]) -> None:
        """Call a method of the live generation; an error there ends it, since it is unknown how far the call got."""
        if self._live is None or self._generation is None:
            return
        try:
            what(self._live)
        except (OSError, PolluxError, ValueError, TypeError, LookupError) as error:
            # Such errors also come from keys that no agent would write.
            self._live.end_changes()
            self._generation.end_for_restart(f"it cannot be followed any more: {error}")
        self._follow_outputs()

    def _open_store(self, order: LaunchOrder) -> store_server.StoreHost:
        """Start the job's store, a new one for every launch.

        Scripts that make their process group themselves use the same keys each time, and must not find those of
        replicas that have ended.
        """
        self._close_store()
        self._store = store_server.StoreHost(self._close_in_fork, order.fleet)
        self._loop.watch(self._store.control, self._hear_store)
        return self._store

    def _hear_store(self) -> None:
        if self._store is None:
            return
        found = self._store.found()
        if found is None:
            self._close_store()
            self._guarded(LiveGeneration.store_ended)
            return
        for key, value in found:
            self._guarded(lambda live, key=key, value=value: live.key_found(key, value))  # type: ignore[misc]

    def _close_store(self) -> None:
        if self._store is not None:
            self._loop.unwatch(self._store.control)
            self._store.close()

    def _follow_outputs(self) -> None:
        """Watch exactly those outputs that are to be read now."""
        wanted = {member.output: member for member in self._generation.outputs} if self._generation else {}
        for fd in [*self._reading.keys() - wanted.keys()]:
            del self._reading[fd]
            self._loop.unwatch(fd)
        for fd, member in wanted.items():
            if fd not in self._reading:
                self._reading[fd] = member
                self._loop.watch(fd, partial(self._read, fd, member))

    def _read(self, fd: int, member: RunningReplica) -> None:
        """Read output of a replica, unless its file was closed since the loop found it ready."""
        assert self._generation is not None
        if member.output == fd and self._reading.get(fd) is member:
            self._generation.logs.read(member)
            if member.output < 0:
                del self._reading[fd]
                self._loop.unwatch(fd)

    def _reap(self) -> None:
        for pid, code in ended_children():
            if self._store is not None and pid == self._store.pid:
                self._store.pid = None
            if self._generation is not None:
                member = self._generation.on_exit(pid, code)
                if member is not None:
                    self._replica_ended(self._generation, member)

    def _handle_node_events(self) -> None:
        """Handle what happened to replicas on other machines."""
        if self._remote is None or self._generation is None:
            return
        self._remote.keep_connections()
        while self._remote.events:
            match self._remote.events.pop(0):
                case NodeLoss() as loss:
                    self._lose(self._generation, loss)
                case NodeLeaving() as leaving:
                    self._leave_node(self._generation, leaving)
                case RemoteExit() as told:
                    self._remote_exit(self._generation, told)
        while self._remote.false_alarms:
            self._services.tell(AlarmMessage(time.time(), self._remote.false_alarms.pop(0)))

    def _leave_node(self, generation: Generation, leaving: NodeLeaving) -> None:
        """Tell the service, which moves the job. Replicas that got SIGTERM save and end, so all others do, too."""
        self._services.tell(NodeLeavingMessage(leaving.node, leaving.why))
        if leaving.is_ending and not generation.told_to_stop:
            if self._live is not None:
                self._live.end_changes()
            generation.end_for_restart(leaving.why)

    def _remote_exit(self, generation: Generation, told: RemoteExit) -> None:
        member = generation.on_remote_exit(told.process, told.code, told.asked)
        if member is not None:
            self._replica_ended(generation, member)

    def _lose(self, generation: Generation, lost: NodeLoss) -> None:
        if lost.silent:
            self._services.tell(NodeSilentMessage(lost.node, lost.why))
        members = generation.on_node_loss(lost.processes)
        if generation.told_to_stop:
            self._guarded(lambda live: live.report_deaths(members))
        if not members or generation.told_to_stop:
            return
        cared_for: list[bool] = []
        self._guarded(lambda live: cared_for.append(live.handle_node_loss(members, lost.why)))
        if not any(cared_for):
            generation.end_for_restart(lost.why)

    def _replica_ended(self, generation: Generation, member: RunningReplica) -> None:
        cared_for: list[bool] = []
        if generation.told_to_stop:
            self._guarded(lambda live: live.report_deaths([member]))
        else:
            self._guarded(lambda live: cared_for.append(live.replica_ended(member)))
        if not any(cared_for) and member.code != 0:
            generation.on_failure()

    def _act_on_due(self) -> None:
        generation = self._generation
        if generation is not None:
            self._tell_start(generation)
            if generation.ended is None:
                self._advance(generation)
        runs = generation is not None and generation.ended is None and generation.replicas.are_up
        self._run_clock.note(generation.order.generation if generation is not None and runs else None)
        if self._unwritten is not None:
            self._write_end(self._unwritten)

    def _tell_start(self, generation: Generation) -> None:
        """Tell the services once that all replicas run."""
        if self._start_untold and generation.replicas.are_up:
            self._start_untold = False
            self._services.tell(StartedMessage(time.time(), generation.order.generation))

    def _advance(self, generation: Generation) -> None:
        """Do what is due in a generation that has not ended; its end is to be written."""
        if not generation.told_to_stop:
            self._guarded(LiveGeneration.act_on_due)
        generation.act_on_due()
        self._follow_outputs()
        if generation.ended is not None:
            self._unwritten = generation.ended
            self._release_remote()

    def _write_end(self, ended: ReplicasEnded) -> None:
        path = record_path(self._folder, "ended", ended.generation)
        try:
            intent = record_path(self._folder, "generation", ended.generation)
            if not intent.exists():
                write_record(intent, {"generation": ended.generation, "job_id": ended.job_id})
            write_record(path, ended_to(ended))
            remove_records(self._folder, ended.generation)
            self._unwritten = None
            self._services.idle_since = time.monotonic()
            self._services.tell(EndedMessage(ended_to(ended)))
        except BackendFailed as error:
            if self._said_unwritten != ended.generation:
                self._said_unwritten = ended.generation
                say(f"the end of generation {ended.generation} is reported once it can be written: {error}")
        if self._unwritten is not None and not self._folder.exists():
            # The shim's folder was removed while it ran: the end cannot be written, and no service will ask for it.
            self._unwritten, self._leaving = None, True


def serve(folder: Path, listener: socket.socket, warm_variables: Mapping[str, str] | None) -> int:
    """Run the shim of this folder; this process must hold the folder's lock, by an open file.

    Returns only in a forked replica, with its exit code.
    """
    pid = os.getpid()
    proc.name_this("pollux-shim")
    try:
        write_record(folder / "shim.json", {"pid": pid, "start": proc.start_time(pid)})
    except BackendFailed as error:
        # Go on, since only people read this file: other records decide whether the job is launched.
        say(str(error))
    shim = Shim(folder, listener, warm_variables)
    try:
        shim.run()
    except ForkedReplica as forked:
        become = forked.become
    else:
        os._exit(0)
    del shim, listener
    return become()


def _main() -> int:
    folder, listener, lock = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for fd in (listener, lock):
        os.set_inheritable(fd, False)
    return serve(folder, socket.socket(fileno=listener), None)


if __name__ == "__main__":
    sys.exit(_main())
