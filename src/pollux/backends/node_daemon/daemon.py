"""The node daemon: the process on every lent node that takes connections and forks a runner for each job.

It is started with `python -m pollux.backends.node_daemon.daemon`.

It has one thread and has imported what training scripts import, so that replicas start in milliseconds. It does not
know which engine lends the node: the engine's part of Pollux starts it, and reads its address from a file.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pollux.backends.node_daemon.job_runner import NodeJobRunner
from pollux.backends.process import proc
from pollux.backends.process.fork_replica import ForkedReplica
from pollux.backends.process.records import write_record
from pollux.backends.process.refusals import RefusalLog
from pollux.backends.process.replica_env import inherited
from pollux.backends.process.select_loop import SelectLoop, ended_children
from pollux.backends.process.warm_python import import_all
from pollux.backends.transport import channel
from pollux.backends.transport.channel import SecureLine
from pollux.core.errors import BackendFailed, InvalidInput, PolluxError
from pollux.storage.foreign_file import read_inside
from pollux.wire.live.codec import MalformedValue, encode, to_plain
from pollux.wire.live.node_messages import (
    ConnectionHandover,
    SeenMessage,
    SeeRequest,
    SessionRequest,
    decode_daemon_request,
)

__all__ = ["SECRET_VARIABLE", "NodeDaemon", "main"]

SECRET_VARIABLE = "POLLUX_FLEET_SECRET"
"""Holds the fleet's secret, in hexadecimal, where no file is named."""

_STRANGER_SECONDS = 10.0
_MAX_STRANGERS = 256
_BACKLOG = 256
_REST_SECONDS = 0.05
_SECRET_BYTES = 4096


@dataclass(slots=True)
class _UnprovenPeer:
    """A connection whose other end has not yet shown that it knows the secret."""

    line: SecureLine
    address: tuple[str, int]
    nonce: str
    until: float


@dataclass(slots=True)
class _RunnerHandle:
    """A job runner: its process, and the socket by which connections are handed to it."""

    pid: int
    control: socket.socket


class NodeDaemon:
    """The loop of a node's daemon. `warm_variables`: the environment during the imports, None if nothing was imported.

    `with_parent`: the daemon ends when its input is closed. `is_patient`: it ignores SIGTERM, which its parent handles.
    """

    def __init__(
        self,
        node: str,
        secret: bytes,
        listener: socket.socket,
        warm_variables: Mapping[str, str] | None,
        with_parent: bool,
        is_patient: bool = False,
    ) -> None:
        self.boot = secrets.token_hex(8)
        self._node, self._secret = node, secret
        self._listener = listener
        self._warm_variables = warm_variables
        self._loop = SelectLoop()
        # The oldest first.
        self._strangers: dict[int, _UnprovenPeer] = {}
        self._refusals = RefusalLog("the node's host")
        self._runners: dict[str, _RunnerHandle] = {}
        self._children: set[int] = set()
        self._with_parent = with_parent
        self._is_patient = is_patient
        self._ending = False
        self._accepts_at: float | None = None

    def run(self) -> None:
        """Run until told to end; a forked replica leaves through `ForkedReplica`."""
        proc.adopt_orphans()
        self._loop.listen_to_signals(None if self._is_patient else self._end)
        self._listener.setblocking(False)
        self._loop.watch(self._listener, self._accept)
        if self._with_parent:
            self._loop.watch(0, self._parent_said)
        while not self._ending:
            self._loop.turn(self._due())
            self._accept_again()
            self._reap()
            for stranger in [each for each in self._strangers.values() if each.until < time.monotonic()]:
                self._refuse(stranger, "slow", f"it had not proved itself after {_STRANGER_SECONDS:g} s")
        self._end_all()

    def _end(self) -> None:
        self._ending = True

    def _parent_said(self) -> None:
        if not os.read(0, 4096):
            self._ending = True

    def _end_all(self) -> None:
        """No process outlives this one."""
        for _ in range(500):
            left = proc.descendants(os.getpid(), proc.process_table())
            if not left:
                return
            proc.kill_all(left)
            self._reap()
            time.sleep(0.01)

    # Connections

    def _accept(self) -> None:
        try:
            peer, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._rest()
            return
        with contextlib.suppress(OSError):
            if len(self._strangers) >= _MAX_STRANGERS:
                # A shim proves itself within milliseconds, so the oldest of these is not a shim.
                self._refuse(next(iter(self._strangers.values())), "crowd", "too many had not proved themselves")
            stranger = _UnprovenPeer(
                SecureLine(peer, f"{address[0]}:{address[1]}"),
                address[:2],
                channel.challenge(),
                time.monotonic() + _STRANGER_SECONDS,
            )
            self._strangers[peer.fileno()] = stranger
            self._loop.watch(peer, lambda: self._hear(stranger))
            stranger.line.put(channel.hello(stranger.nonce))

    def _rest(self) -> None:
        """Accept nobody for a moment, without files; the oldest that has not proved itself gives its own back."""
        if self._strangers:
            self._refuse(next(iter(self._strangers.values())), "crowd", "there are no more files for connections")
        else:
            self._refusals.tell("connections", "files", "this process has no more files; raise its limit (ulimit -n)")
        self._loop.unwatch(self._listener)
        self._accepts_at = time.monotonic() + _REST_SECONDS

    def _due(self) -> float | None:
        """When to look again, on the monotonic clock; None: only when something happens."""
        return self._accepts_at or (time.monotonic() + 1.0 if self._strangers else None)

    def _accept_again(self) -> None:
        if self._accepts_at is not None and self._accepts_at <= time.monotonic():
            self._accepts_at = None
            self._loop.watch(self._listener, self._accept)

    def _drop(self, stranger: _UnprovenPeer) -> None:
        if self._strangers.pop(stranger.line.peer.fileno(), None) is not None:
            self._loop.unwatch(stranger.line.peer)
        stranger.line.close()

    def _refuse(self, stranger: _UnprovenPeer, kind: str, why: str) -> None:
        self._refusals.refuse(stranger.line.peer, stranger.address, kind, why)
        self._drop(stranger)

    def _hear(self, stranger: _UnprovenPeer) -> None:
        values = stranger.line.get()
        if not values:
            if stranger.line.broken:
                self._refuse(stranger, "left", "it left, or said what no shim says, before it had proved itself")
            return
        try:
            self._serve(stranger.line, channel.check(self._secret, stranger.line, stranger.nonce, values[0]))
        except BackendFailed:
            self._refuse(stranger, "proof", "it does not know the fleet's secret")
        except MalformedValue as error:
            self._refuse(stranger, "request", f"what it asks for has no meaning: {error}"[:200])
        self._drop(stranger)

    def _serve(self, line: SecureLine, text: str) -> None:
        request = decode_daemon_request(text)
        # The caller has proved which node it means: nobody in between can lead it to another one of the fleet.
        if request.node and not f"{self._node}.".startswith(f"{request.node}."):
            raise MalformedValue(f"it is meant for node '{request.node}', and this is '{self._node}'")
        if isinstance(request, SeeRequest):
            self._look_for_files(line, request)
        else:
            self._hand_over(line, request)

    def _look_for_files(self, line: SecureLine, request: SeeRequest) -> None:
        """Answer which files exist, from a forked process, since some file systems answer late or never."""
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._children.add(pid)
            return
        try:
            proc.die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            line.encrypt()
            line.put(to_plain(SeenMessage(tuple(map(os.path.exists, request.paths)))))
            line.finish(_STRANGER_SECONDS)
        finally:
            os._exit(0)

    # Job runners

    def _hand_over(self, line: SecureLine, request: SessionRequest) -> None:
        if request.session not in self._runners:
            self._fork_runner(request.session, request.lease)
        told = encode(ConnectionHandover(line.key, line.where, request)).encode()
        try:
            socket.send_fds(self._runners[request.session].control, [told], [line.peer.fileno()])
        except OSError:
            self._lose_runner(request.session)

    def _fork_runner(self, session: str, lease: float) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            self._runners[session] = _RunnerHandle(pid, ours)
            return
        ours.close()
        signal.set_wakeup_fd(-1)
        self._close_in_fork()
        NodeJobRunner(lease, theirs, self._warm_variables, inherited(os.environ), self.boot, self._secret).run(host)
        os._exit(0)

    def _close_in_fork(self) -> None:
        self._loop.close()
        self._listener.close()
        for stranger in self._strangers.values():
            stranger.line.peer.close()
        for runner in self._runners.values():
            runner.control.close()

    def _lose_runner(self, session: str) -> None:
        runner = self._runners.pop(session, None)
        if runner is not None:
            runner.control.close()

    def _reap(self) -> None:
        ended = {pid for pid, _ in ended_children()}
        if not ended:
            return
        self._children -= ended
        for session in [name for name, runner in self._runners.items() if runner.pid in ended]:
            self._lose_runner(session)
        # Processes that a runner left behind become children of the daemon: no job owns them.
        ours = {*self._children, *(runner.pid for runner in self._runners.values())}
        table = proc.process_table()
        proc.kill_all(
            row.pid for row in table.values() if row.parent == os.getpid() and row.pid not in ours and row.state != "Z"
        )


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pollux.backends.node_daemon.daemon", description=__doc__)
    parser.add_argument("--node", required=True, help="the node's name")
    parser.add_argument("--places", type=int, required=True, help="how many replicas it may run")
    parser.add_argument("--gpus", default="", help="device indices behind the places, as in 0,1,2; none: CPU slots")
    parser.add_argument("--listen", default="127.0.0.1", help="address, or address:port; for IPv6, [address]:port")
    parser.add_argument("--announce", type=Path, required=True, help="file to write once it is ready")
    parser.add_argument("--secret-file", type=Path, help=f"holds the secret; without it, {SECRET_VARIABLE} does")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input is closed")
    parser.add_argument("--patient", action="store_true", help="leave SIGTERM to the parent and to replicas")
    parser.add_argument("--cold", action="store_true", help="import nothing beforehand")
    return parser.parse_args(words)


def _where(listen: str) -> tuple[str, int]:
    """Address and port, 0 for any; an IPv6 address has brackets around it where a port follows."""
    address, port = listen, "0"
    if listen.startswith("["):
        address, _, rest = listen[1:].partition("]")
        port = rest.removeprefix(":") or "0"
    elif listen.count(":") == 1:
        address, _, port = listen.partition(":")
    if not address or not port.isdecimal() or int(port) > 65535:
        raise InvalidInput(f"--listen is '{listen}': give ADDRESS, ADDRESS:PORT or [ADDRESS]:PORT")
    return address, int(port)


def _secret(file: Path | None) -> bytes:
    try:
        text = (
            os.environ.pop(SECRET_VARIABLE, "")
            if file is None
            else read_inside(file.parent, file.name, most_bytes=_SECRET_BYTES).decode()
        )
        secret = bytes.fromhex(text.strip())
    except (OSError, PolluxError) as error:
        raise InvalidInput(f"cannot read the secret from {file}: {error}; make it readable here") from error
    except ValueError:
        secret = b""
    if len(secret) < 16:
        raise InvalidInput(f"the secret in {file or SECRET_VARIABLE} is not 16 or more bytes in hexadecimal; set it")
    return secret


def _warm(cold: bool) -> dict[str, str] | None:
    """Import what training scripts import; returns the environment meanwhile, None where forks would not be safe."""
    variables = dict(os.environ)
    if cold or not import_all():
        return None
    return variables


def main(words: Sequence[str]) -> int:
    """Run the daemon of a node; returns its exit code, or in a forked replica that of the replica."""
    given = _arguments(words)
    if given.patient:
        # Before the imports, which take seconds: SIGTERM may come meanwhile.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    address, port = _where(given.listen)
    secret = _secret(given.secret_file)
    warm = _warm(given.cold)
    proc.name_this("pollux-host")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
    host = NodeDaemon(given.node, secret, listener, warm, given.with_parent, given.patient)
    gpus = [int(word) for word in given.gpus.split(",") if word]
    where = {"node": given.node, "address": address, "port": listener.getsockname()[1], "pid": os.getpid()}
    write_record(given.announce, {**where, "places": given.places, "gpus": gpus, "boot": host.boot})
    try:
        host.run()
    except ForkedReplica as forked:
        become = forked.become
    else:
        return 0
    del host, listener
    return become()


def _main() -> int:
    try:
        return main(sys.argv[1:])
    except (PolluxError, OSError) as error:
        print(f"pollux host: {error}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, PolluxError) else 1


if __name__ == "__main__":
    sys.exit(_main())
