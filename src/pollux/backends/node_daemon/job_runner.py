"""The job runner: the process on a node that runs the replicas of one job. The node daemon forks it.

It starts and signals replicas, and reads their output, as the shim orders over a channel. It ends them all when its
lease runs out, that is, when the shim has confirmed no message for the time of the lease. Engines send SIGTERM to all
processes on a node that they take back; the runner reports that to the shim.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from functools import partial

from pollux.backends.process import proc
from pollux.backends.process.fork_replica import ReplicaStart
from pollux.backends.process.launcher import LocalLauncher, ReplicaProcess
from pollux.backends.process.memory_check import MemoryCheck
from pollux.backends.process.select_loop import SelectLoop, ended_children
from pollux.backends.transport.channel import Channel, SecureLine, clock
from pollux.wire.live.codec import to_plain
from pollux.wire.live.node_messages import (
    ClearMessage,
    ClearRequest,
    EndRunnerRequest,
    ExitMessage,
    ForkedMessage,
    KillAllRequest,
    KillRequest,
    NodeNoticeMessage,
    OutputMessage,
    OverMemoryMessage,
    PingRequest,
    PongMessage,
    RunnerRequest,
    SessionGreeting,
    StartReplicaRequest,
    SweepRequest,
    SweptMessage,
    TerminateRequest,
    decode_runner_request,
)
from pollux.wire.live.store_channel import with_derived_secret

__all__ = ["NodeJobRunner"]

_READ_BYTES = 48 << 10
_MAX_WAITING_BYTES = 4 << 20
_DRAIN_READS = 1024
_SWEEP_SECONDS = 0.01
# An engine signals one process after another: a replica may get its signal this much earlier than the runner.
_NOTICE_SECONDS = 0.2
_MOMENT = "POLLUX_STOPPED_AT"


class NodeJobRunner:
    """The loop of the runner. `environ`: what replicas inherit; `secret`: the fleet's; `control` brings connections."""

    def __init__(
        self,
        lease_seconds: float,
        control: socket.socket,
        warm_variables: Mapping[str, str] | None,
        environ: Mapping[str, str],
        boot: str,
        secret: bytes,
    ) -> None:
        self._lease_seconds = lease_seconds
        self._control = control
        self._environ = environ
        self._boot = boot
        self._secret = secret
        self._channel = Channel(decode_runner_request)
        self._launcher = LocalLauncher(warm_variables, self._close_in_fork)
        self._loop = SelectLoop()
        self._processes: dict[str, ReplicaProcess] = {}
        self._codes: dict[str, int] = {}
        self._asked: set[str] = set()
        self._known: set[str] = set()
        self._memory = MemoryCheck(self._launcher)
        self._clear: ClearRequest | None = None
        self._ending = False
        self._noticed = False
        self._notice_sent = False
        self._reading: dict[int, str] = {}
        self._awaits_write = False
        self._connections = 0

    def run(self, parent: int) -> None:
        """Run until the shim ends it or the lease runs out; a forked replica leaves through `ForkedReplica`."""
        proc.die_with_parent(parent)
        proc.adopt_orphans()
        proc.name_this("pollux-keeper")
        self._loop.listen_to_signals(self._notice)
        self._control.setblocking(False)
        self._loop.watch(self._control, self._take_connection)
        while not (self._ending and self._launcher.is_clear(kill=True)):
            self._loop.turn(time.monotonic() + self._timeout())
            self._pass_on_notice()
            self._reap()
            self._act_on_due()

    def _notice(self) -> None:
        self._noticed = True

    def _await_notice(self) -> None:
        """Wait for the engine's SIGTERM: a replica ended by a SIGTERM that we did not send."""
        until = time.monotonic() + _NOTICE_SECONDS
        while not self._noticed and time.monotonic() < until:
            time.sleep(_SWEEP_SECONDS)

    def _pass_on_notice(self) -> None:
        """Report the engine's SIGTERM to the shim, once, before the exits that it causes."""
        if self._noticed and not self._notice_sent:
            self._notice_sent = True
            self._asked.update(self._processes.keys() - self._codes.keys())
            self._channel.send(NodeNoticeMessage())

    def _close_in_fork(self) -> None:
        """Close the copies of the sockets in a forked process; the other sides notice nothing."""
        self._loop.close()
        self._control.close()
        self._channel.detach()

    def _timeout(self) -> float:
        if self._ending:
            return _SWEEP_SECONDS
        times = [self._channel.confirmed_at + self._lease_seconds - clock()]
        if self._clear is not None:
            times.append(_SWEEP_SECONDS if self._clear.kill else 10 * _SWEEP_SECONDS)
        if self._memory.due is not None and self._processes:
            times.append(self._memory.due - time.monotonic())
        return max(0.0, min(times))

    # The connection

    def _take_connection(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 1)
        except BlockingIOError:
            return
        if not message:
            self._ending = True
            return
        told = json.loads(message)
        self._drop_line()
        line = SecureLine(socket.socket(fileno=fds[0]), told["where"])
        line.secure(told["key"].encode(), "host")
        line.encrypt()
        line.put(to_plain(SessionGreeting(self._connections > 0, self._channel.seen, self._boot)))
        self._connections += 1
        self._lease_seconds = float(told["lease"])
        self._channel.attach(line, int(told["seen"]))
        self._awaits_write = False
        self._loop.watch(line.peer, self._hear)

    def _drop_line(self) -> None:
        line = self._channel.line
        if line is not None:
            self._loop.unwatch(line.peer)
            self._channel.detach()

    def _hear(self) -> None:
        line = self._channel.line
        if line is None:
            return
        line.flush()
        for request in self._channel.receive():
            self._carry_out(request)
        if line.broken:
            self._drop_line()

    def _watch_line(self) -> None:
        line = self._channel.line
        if line is None:
            return
        if line.broken:
            self._drop_line()
            return
        if line.wants_to_write != self._awaits_write:
            self._awaits_write = line.wants_to_write
            self._loop.watch(line.peer, self._hear, write=self._awaits_write)

    # Orders

    def _carry_out(self, request: RunnerRequest) -> None:
        match request:
            case PingRequest():
                self._channel.confirm()
                self._channel.send(PongMessage())
            case StartReplicaRequest():
                if request.key not in self._known:
                    self._known.add(request.key)
                    self._start(request)
            case TerminateRequest() | KillRequest() | SweepRequest():
                process = self._processes.get(request.key)
                if process is not None:
                    self._end_process(request, process)
            case KillAllRequest():
                self._launcher.kill_all()
            case ClearRequest():
                self._clear = request
            case EndRunnerRequest():
                self._ending = True

    def _end_process(self, request: TerminateRequest | KillRequest | SweepRequest, process: ReplicaProcess) -> None:
        """Signal a replica, or end the processes that an ended replica left behind."""
        match request:
            case TerminateRequest(key, alone):
                if key not in self._codes and self._launcher.terminate(process, alone):
                    self._asked.add(key)
            case KillRequest():
                self._launcher.kill(process)
            case SweepRequest(key):
                self._launcher.sweep(process)
                self._drain(key, process)
                self._forget(key)
                self._channel.send(SweptMessage(key))

    def _start(self, request: StartReplicaRequest) -> None:
        key, self._memory.limit_bytes = request.key, request.memory_bytes
        own = with_derived_secret(request.environ, self._secret)
        environ = {**self._environ, **_by_own_clock(own, request.sent_at)}
        start = ReplicaStart(request.argv, request.workdir, environ, request.cores, request.path_was_set)
        try:
            process = self._launcher.start(start, "", request.memory_bytes, lambda piece: None)
        except OSError as error:
            why = f"pollux: no process could be started: {error}\n"
            self._channel.send(OutputMessage(key, why.encode()))
            self._channel.send(ExitMessage(key, 126, asked=False, lacks_memory=False))
            return
        self._processes[key] = process
        self._channel.send(ForkedMessage(key, process.pid))

    def _forget(self, key: str) -> None:
        process = self._processes.pop(key, None)
        if process is not None:
            self._close_output(process)

    # Replicas

    def _read(self, key: str, process: ReplicaProcess) -> bool:
        """Send a piece of a replica's output to the shim; whether there may be more."""
        if process.output < 0:
            return False
        try:
            piece = os.read(process.output, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        if piece:
            self._channel.send(OutputMessage(key, piece))
            return True
        self._close_output(process)
        return False

    def _close_output(self, process: ReplicaProcess) -> None:
        self._unfollow(process.output)
        process.close_output()

    def _drain(self, key: str, process: ReplicaProcess) -> None:
        for _ in range(_DRAIN_READS):
            if not self._read(key, process):
                return

    def _unfollow(self, fd: int) -> None:
        if self._reading.pop(fd, None) is not None:
            self._loop.unwatch(fd)

    def _follow(self) -> None:
        """Read outputs only while the shim keeps up with what was read before."""
        held_back = self._channel.unconfirmed_bytes > _MAX_WAITING_BYTES
        for key, process in self._processes.items():
            if held_back:
                self._unfollow(process.output)
            elif process.output >= 0 and process.output not in self._reading:
                self._reading[process.output] = key
                self._loop.watch(process.output, partial(self._read, key, process))

    def _reap(self) -> None:
        for pid, code in ended_children():
            for key, process in [*self._processes.items()]:
                # A replica that ends because the lease ran out has not failed: the shim already reports the silence.
                if process.pid == pid and key not in self._codes and not self._ending:
                    self._replica_ended(key, process, code)

    def _replica_ended(self, key: str, process: ReplicaProcess, code: int) -> None:
        if code == -signal.SIGTERM and key not in self._asked:
            self._await_notice()
        self._pass_on_notice()
        self._codes[key] = code
        self._drain(key, process)
        self._channel.send(ExitMessage(key, code, key in self._asked, self._launcher.lacks_memory))

    def _act_on_due(self) -> None:
        if clock() - self._channel.confirmed_at > self._lease_seconds:
            self._ending = True
        if self._ending:
            return
        self._pass_on_notice()
        if self._clear is not None and self._launcher.is_clear(self._clear.kill):
            for key, process in [*self._processes.items()]:
                self._drain(key, process)
                self._forget(key)
            self._channel.send(ClearMessage(self._clear.number))
            self._clear = None
        self._check_memory()
        self._follow()
        self._watch_line()

    def _check_memory(self) -> None:
        """Report a replica above the memory limit, once: the shim then ends the job."""
        keys = [*self._processes]
        found = self._memory.find_excess(dict(enumerate(self._processes.values())))
        if found is not None:
            self._memory.limit_bytes = 0.0
            self._channel.send(OverMemoryMessage(keys[found[0]], found[1]))


def _by_own_clock(environ: Mapping[str, str], sent_at: float) -> dict[str, str]:
    """The environment with a moment in it converted from the sender's clock to the clock of this node."""
    own = dict(environ)
    with contextlib.suppress(ValueError):
        if _MOMENT in own:
            own[_MOMENT] = repr(float(own[_MOMENT]) + time.time() - sent_at)
    return own
