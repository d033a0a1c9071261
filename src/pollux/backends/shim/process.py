"""The small process that owns one job's replicas and outlives the service: `python -m pollux.backends.shim.process`.

One thread, so that it may fork. Lines of JSON go over a socket in its folder: it is told `launch`, `resize`, `stop`,
`status` and `release`, and tells `started`, `lost`, `ended` and `status`. What it was told and how it ended is on disk
first.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pollux.backends.process import proc
from pollux.backends.process.fork_replica import ForkedReplica
from pollux.backends.process.launcher import Hands, OwnHands
from pollux.backends.process.records import (
    ended_to,
    newest_generation,
    read_record,
    record_path,
    remove_records,
    write_record,
)
from pollux.backends.protocol import ReplicasEnded
from pollux.backends.shim import store_server
from pollux.backends.shim.generation import Generation, Member
from pollux.backends.shim.live_generation import LiveGeneration
from pollux.backends.shim.remote_launcher import FarAnswer, FarExit, FarHands, FarLoss, FarNotice
from pollux.core.errors import BackendFailed, PolluxError
from pollux.wire.live.codec import from_plain
from pollux.wire.live.messages import LaunchOrder

__all__ = ["IDLE_SECONDS", "Shim", "serve"]

IDLE_SECONDS = 60.0
"""How long a shim without replicas waits for somebody to connect before it ends."""

_MAX_LINE_BYTES = 16 << 20
_RETRY_SECONDS = 1.0
_LONGEST_SLEEP_SECONDS = 3600.0


class _Connection:
    """One client: lines in, lines out."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(True)
        peer.settimeout(5.0)
        self.peer = peer
        self.rest = b""

    def lines(self) -> list[bytes] | None:
        """Whole lines that came; None once the client is gone."""
        try:
            piece = self.peer.recv(1 << 16)
        except (TimeoutError, InterruptedError):
            return []
        except OSError:
            return None
        if not piece or len(self.rest) > _MAX_LINE_BYTES:
            return None
        *whole, self.rest = (self.rest + piece).split(b"\n")
        return whole

    def send(self, message: Mapping[str, Any]) -> bool:
        """Whether the client took it."""
        try:
            self.peer.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True


class Shim:
    """The loop. `warm_variables`: the environment under which everything was imported, None where nothing was."""

    def __init__(self, folder: Path, listener: socket.socket, warm_variables: Mapping[str, str] | None) -> None:
        self._folder = folder
        self._listener = listener
        self._warm_variables = warm_variables
        self._selector = selectors.DefaultSelector()
        self._connections: list[_Connection] = []
        self._generation: Generation | None = None
        self._live: LiveGeneration | None = None
        self._store: store_server.StoreHost | None = None
        self._far: FarHands | None = None
        self._start_untold = False
        self._unwritten: ReplicasEnded | None = None
        self._reading: dict[int, Member] = {}
        self._idle_since = time.monotonic()
        self._leaving = False
        self._wake: tuple[int, int] = (-1, -1)

    def run(self) -> None:
        """Serve until released, idle or told to end; a forked replica leaves through `ForkedReplica`."""
        proc.adopt_orphans()
        self._listen_to_signals()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        while not self._is_done():
            for key, _ in self._selector.select(self._timeout()):
                key.data()
            self._reap()
            self._look_far()
            self._look_for_owner()
            self._look()

    def _listen_to_signals(self) -> None:
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wake = (reading, writing)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, lambda number, frame: self._leave())
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._selector.register(reading, selectors.EVENT_READ, self._woken)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake[0], 4096)

    def _leave(self) -> None:
        self._leaving = True
        if self._generation is not None:
            self._stop(self._generation.order.grace_seconds)

    def _stop(self, grace_seconds: float) -> None:
        if self._live is not None:
            self._live.over()
        if self._generation is not None:
            self._generation.stop(grace_seconds)

    def _let_go(self) -> None:
        """In a forked process: its copies of the sockets go, without a word to anybody."""
        self._selector.close()
        self._listener.close()
        for connection in self._connections:
            connection.peer.close()
        if self._store is not None:
            self._store.control.close()
        if self._far is not None:
            self._far.let_go()

    def _is_busy(self) -> bool:
        return (self._generation is not None and self._generation.ended is None) or self._unwritten is not None

    def _is_done(self) -> bool:
        if self._is_busy():
            return False
        idle = not self._connections and time.monotonic() - self._idle_since >= IDLE_SECONDS
        return self._leaving or idle

    def _timeout(self) -> float | None:
        times = []
        if self._generation is not None and self._generation.ended is None:
            at = self._generation.look_again_at()
            times += [] if at is None else [at]
            at = None if self._live is None else self._live.look_again_at
            times += [] if at is None else [at]
            at = self._orphaned_at()
            times += [] if at is None else [at]
        elif not self._connections:
            times.append(self._idle_since + IDLE_SECONDS)
        if self._unwritten is not None:
            times.append(time.monotonic() + _RETRY_SECONDS)
        due = None if self._far is None else self._far.due()
        times += [] if due is None else [time.monotonic() + due]
        return min(max(0.0, min(times) - time.monotonic()), _LONGEST_SLEEP_SECONDS) if times else None

    def _orphaned_at(self) -> float | None:
        """When what runs is stopped unless somebody connects; None: it is not."""
        if self._generation is None or self._connections or self._leaving or not self._is_busy():
            return None
        seconds = self._generation.order.orphan_seconds
        return None if seconds is None else self._idle_since + seconds

    def _look_for_owner(self) -> None:
        at = self._orphaned_at()
        if at is not None and time.monotonic() >= at:
            print("whoever started the job is gone: it is stopped", file=sys.stderr, flush=True)
            self._leave()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection = _Connection(self._listener.accept()[0])
            self._connections.append(connection)
            self._selector.register(connection.peer, selectors.EVENT_READ, lambda: self._hear(connection))

    def _hear(self, connection: _Connection) -> None:
        lines = connection.lines()
        if lines is None:
            self._drop(connection)
            return
        for line in lines:
            try:
                self._obey(connection, json.loads(line))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                # Told something by a version that it does not understand: another shim may.
                print(f"not understood: {error!r}", file=sys.stderr, flush=True)
                self._leaving = self._leaving or not self._is_busy()
            except OSError as error:
                # What runs is not to end with it.
                print(f"could not be done: {error}", file=sys.stderr, flush=True)

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._selector.unregister(connection.peer)
            connection.peer.close()
            self._connections.remove(connection)
            self._idle_since = time.monotonic()

    def _tell(self, message: Mapping[str, Any]) -> None:
        for connection in [*self._connections]:
            if not connection.send(message):
                self._drop(connection)

    def _obey(self, connection: _Connection, message: Mapping[str, Any]) -> None:
        what = message.get("op")
        if what == "launch":
            self._launch(from_plain(LaunchOrder, message["order"]))
        elif what == "stop":
            generation = self._generation
            if generation is not None and generation.order.generation <= message["generation"]:
                self._stop(float(message["grace_seconds"]))
        elif what == "resize":
            self._resize(from_plain(LaunchOrder, message["order"]))
        elif what == "gone":
            if self._far is not None:
                self._far.node_is_gone(message["node"], message["why"])
        elif what == "release":
            self._leaving = self._leaving or not self._is_busy()
        if not connection.send(self._status()):
            self._drop(connection)

    def _status(self) -> dict[str, Any]:
        newest = newest_generation(self._folder)
        if self._generation is not None and not self._generation.is_noted:
            newest = self._generation.order.generation
        status: dict[str, Any] = {"event": "status", "warm": self._warm_variables is not None, "generation": newest}
        # Older shims do not say so, and cannot.
        status["hands_over"] = True
        if self._generation is not None and self._generation.order.generation == newest:
            ended = None if self._unwritten else self._generation.ended
            status["state"] = "ended" if ended else "stopping" if self._generation.told_to_stop else "running"
            status["ended"] = ended_to(ended) if ended else None
            moving = self._live is not None and (self._live.is_moving or self._generation.is_ending)
            status["moving"] = moving or self._start_untold
            status["lost"] = None if self._live is None else self._live.lost
        elif newest is not None:
            status["state"] = "ended"
            status["ended"] = read_record(record_path(self._folder, "ended", newest))
        return status

    def _launch(self, order: LaunchOrder) -> None:
        newest = newest_generation(self._folder)
        known = self._generation.order.generation if self._generation is not None else 0
        if self._is_busy() or self._leaving or order.generation <= max(newest or 0, known):
            return
        warm = self._warm_variables is not None
        generation = Generation(order, self._folder, self._hands(order), warm, self._let_go)
        self._generation, self._live = generation, None
        try:
            if order.live and store_server.is_possible():
                generation.store = self._open_store(order)
            remove_records(self._folder, order.generation)
            generation.start()
        except (OSError, BackendFailed) as error:
            if generation.members:
                # Each by itself: to look for all that they started takes a file, which there may not be.
                for member in generation.members:
                    generation.kill(member.number)
                with contextlib.suppress(OSError):
                    generation.fail(f"replicas could not be started: {error}")
                self._follow_outputs()
            else:
                self._refuse(generation, error)
            return
        if generation.store is not None:
            self._live = LiveGeneration(generation, generation.store, self._tell)
        self._follow_outputs()
        self._start_untold = True

    def _refuse(self, generation: Generation, error: Exception) -> None:
        """No replica could be started for lack of files, processes, memory or disk: that is no fault of the job's."""
        why = f"no replica could be started on this machine ({error}): check its limits (ulimit -a), memory and disk"
        job_id, number = generation.order.job_id, generation.order.generation
        self._unwritten = generation.ended = ReplicasEnded(time.time(), job_id, number, "refused", (), why)
        self._start_untold = False
        generation.close()
        self._close_store()
        self._release_far()

    def _hands(self, order: LaunchOrder) -> Hands:
        if order.fleet is None:
            return OwnHands(self._warm_variables, self._let_go, self._spared)
        self._release_far()
        self._far = FarHands(order.fleet, self._selector)
        return self._far

    def _spared(self) -> tuple[int | None, ...]:
        """Processes below this one that are none of the job's."""
        generation, store = self._generation, self._store
        return (None if generation is None else generation.store_host, None if store is None else store.pid)

    def _release_far(self) -> None:
        if self._far is not None:
            self._far.release()
            self._far = None

    def _resize(self, order: LaunchOrder) -> None:
        """Change a generation that runs; where it has ended, so has this one, in the same way."""
        generation = self._generation
        newest = max(newest_generation(self._folder) or 0, generation.order.generation if generation else 0)
        if generation is None or order.generation <= newest:
            return
        if generation.ended is not None:
            self._unwritten = generation.ended = replace(generation.ended, generation=order.generation)
            generation.renumber(order.generation)
        elif self._live is not None:
            if self._far is not None and order.fleet is not None:
                self._far.learn(order.fleet)
            self._guarded(lambda live: live.resize(order))
            if generation.is_noted:
                remove_records(self._folder, order.generation)

    def _guarded(self, what: Callable[[LiveGeneration], None]) -> None:
        """Do something with the live generation; an error there ends it, since nobody knows how far it went."""
        if self._live is None or self._generation is None:
            return
        try:
            what(self._live)
        except (OSError, PolluxError, ValueError, TypeError, LookupError) as error:
            # Also where a replica has written what no agent would.
            self._live.over()
            self._generation.give_up(f"it cannot be followed any more: {error}")
        self._follow_outputs()

    def _open_store(self, order: LaunchOrder) -> store_server.StoreHost:
        """The job's store, another one for every launch.

        Scripts that make their group themselves do so under the same keys each time, and would find those of replicas
        that are gone.
        """
        self._close_store()
        head = "127.0.0.1" if order.fleet is None else order.fleet.head
        self._store = store_server.StoreHost(self._warm_variables is not None, self._let_go, head)
        self._selector.register(self._store.control, selectors.EVENT_READ, self._hear_store)
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
            self._guarded(lambda live, key=key, value=value: live.found(key, value))  # type: ignore[misc]

    def _close_store(self) -> None:
        if self._store is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._store.control)
            self._store.close()

    def _follow_outputs(self) -> None:
        """Have the loop wait for exactly those outputs that are to be read now."""
        wanted = {member.output: member for member in self._generation.outputs} if self._generation else {}
        for fd in [*self._reading.keys() - wanted.keys()]:
            del self._reading[fd]
            # A closed file has left the kernel's list already.
            with contextlib.suppress(KeyError, OSError, ValueError):
                self._selector.unregister(fd)
        for fd, member in wanted.items():
            if fd not in self._reading:
                self._reading[fd] = member
                self._selector.register(fd, selectors.EVENT_READ, self._reader(member))

    def _reader(self, member: Member) -> Callable[[], None]:
        def read() -> None:
            assert self._generation is not None
            if member.output >= 0 and self._reading.get(member.output) is member:
                fd = member.output
                self._generation.on_output(member)
                if member.output < 0:
                    del self._reading[fd]
                    with contextlib.suppress(KeyError, OSError, ValueError):
                        self._selector.unregister(fd)

        return read

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._store is not None and pid == self._store.pid:
                self._store.pid = None
            if self._generation is not None:
                member = self._generation.on_exit(pid, os.waitstatus_to_exitcode(status))
                if member is not None:
                    self._replica_ended(self._generation, member)

    def _look_far(self) -> None:
        """What became of replicas on other machines."""
        if self._far is None or self._generation is None:
            return
        self._far.look()
        while self._far.told:
            told = self._far.told.pop(0)
            if isinstance(told, FarLoss):
                self._lose(self._generation, told)
            elif isinstance(told, FarAnswer):
                # Whoever decides takes the job off it, with its grace.
                self._tell({"event": "leaving", "node": told.node, "why": told.why})
            elif isinstance(told, FarNotice):
                # What got the signal saves and ends, and the others with it: they go on elsewhere from there.
                self._tell({"event": "leaving", "node": told.node, "why": told.why})
                if not self._generation.told_to_stop:
                    if self._live is not None:
                        self._live.over()
                    self._generation.give_up(told.why)
            else:
                self._far_exit(self._generation, told)
        while self._far.false_alarms:
            self._tell({"event": "alarm", "text": self._far.false_alarms.pop(0), "at": time.time()})

    def _far_exit(self, generation: Generation, told: FarExit) -> None:
        member = generation.on_far_exit(told.body, told.code, told.asked)
        if member is not None:
            self._replica_ended(generation, member)

    def _lose(self, generation: Generation, lost: FarLoss) -> None:
        if lost.silent:
            self._tell({"event": "silent", "node": lost.node, "why": lost.why})
        members = generation.on_far_loss(lost.bodies)
        if generation.told_to_stop:
            self._guarded(lambda live: live.died_at_the_end(members))
        if not members or generation.told_to_stop:
            return
        cared_for: list[bool] = []
        self._guarded(lambda live: cared_for.append(live.lost_with_node(members, lost.why)))
        if not any(cared_for):
            generation.give_up(lost.why)

    def _replica_ended(self, generation: Generation, member: Member) -> None:
        cared_for: list[bool] = []
        if generation.told_to_stop:
            self._guarded(lambda live: live.died_at_the_end([member]))
        else:
            self._guarded(lambda live: cared_for.append(live.ended(member)))
        if not any(cared_for) and member.code != 0:
            generation.on_failure()

    def _look(self) -> None:
        generation = self._generation
        if generation is not None and self._start_untold and generation.is_up:
            self._start_untold = False
            self._tell({"event": "started", "generation": generation.order.generation, "at": time.time()})
        if generation is not None and generation.ended is None:
            if not generation.told_to_stop:
                self._guarded(LiveGeneration.look)
            generation.look()
            self._follow_outputs()
            if generation.ended is not None:
                self._unwritten = generation.ended
                self._release_far()
        if self._unwritten is not None:
            self._write_end(self._unwritten)

    def _write_end(self, ended: ReplicasEnded) -> None:
        path = record_path(self._folder, "ended", ended.generation)
        with contextlib.suppress(BackendFailed):
            intent = record_path(self._folder, "generation", ended.generation)
            if not intent.exists():
                write_record(intent, {"generation": ended.generation, "job_id": ended.job_id})
            write_record(path, ended_to(ended))
            remove_records(self._folder, ended.generation)
            self._unwritten = None
            self._idle_since = time.monotonic()
            self._tell({"event": "ended", "ended": ended_to(ended)})
        if self._unwritten is not None and not self._folder.exists():
            # Somebody removed it under our feet: there is no place to tell it, and nobody to ask.
            self._unwritten, self._leaving = None, True


def serve(folder: Path, listener: socket.socket, warm_variables: Mapping[str, str] | None) -> int:
    """Be the shim of that folder, whose lock this process holds by an open file; returns an exit code.

    In a replica forked with everything imported it returns that replica's.
    """
    pid = os.getpid()
    proc.name_this("pollux-shim")
    write_record(folder / "shim.json", {"pid": pid, "start": proc.start_time(pid)})
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
