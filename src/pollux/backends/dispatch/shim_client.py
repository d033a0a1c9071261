"""The service's side of a shim: starts one, directly or by the fork server, or finds one, and exchanges messages."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pollux.backends.transport.json_lines import LineReader
from pollux.core.errors import BackendFailed
from pollux.storage.state_file import open_log, open_plain, remove_state
from pollux.wire.live.codec import MalformedValue, decode, encode
from pollux.wire.live.messages import (
    MAX_MESSAGE_BYTES,
    ForkserverMessage,
    ForkShimRequest,
    ShimMessage,
    ShimRequest,
    decode_message,
    encode_message,
)

__all__ = ["ForkserverClient", "ShimClient", "find_shim", "start_shim"]

_log = logging.getLogger("pollux.backends")

_SEND_SECONDS = 10.0
_BACKLOG = 16


class ShimClient:
    """A connection to one job's shim. `warm`: whether the fork server forked the shim; None while that is not known."""

    def __init__(self, job_id: str, peer: socket.socket, warm: bool | None = None) -> None:
        peer.settimeout(_SEND_SECONDS)
        self.job_id = job_id
        self.peer = peer
        self.warm = warm
        self.leaving = False
        self._reader = LineReader(peer, MAX_MESSAGE_BYTES)

    def send(self, request: ShimRequest) -> None:
        """Send a request; `receive` notices if the shim is gone."""
        with contextlib.suppress(OSError):
            self.peer.sendall(encode_message(request))

    def receive(self) -> list[ShimMessage] | None:
        """The messages that came since the last call; None once the shim is gone."""
        lines = self._reader.lines()
        if lines is None:
            return None
        found = []
        for line in lines:
            try:
                found.append(decode_message(line))
            except MalformedValue as error:
                _log.warning("the shim of job '%s' is of another version, stop that job: %s", self.job_id, error)
        return found

    def close(self) -> None:
        """Close the connection; the shim goes on."""
        self.peer.close()


class ForkserverClient:
    """The process that forks warm shims. `is_ready`: it has imported everything."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = ours
        self.is_ready = False
        try:
            log = folder / "nursery.log"
            self._pid = _spawn("pollux.backends.shim.forkserver", ["3", str(log)], [theirs.fileno()], log, environ)
        finally:
            theirs.close()

    def read_message(self) -> bool:
        """Read its message; False once the process is gone, or cannot fork safely."""
        try:
            message = self.control.recv(1 << 12)
        except OSError:
            message = b""
        self.is_ready = bool(message) and decode(ForkserverMessage, message).ready
        return self.is_ready

    def fork_shim(self, folder: Path, listener: int, lock: int) -> bool:
        """Order a shim for that folder; False where the fork server cannot be reached."""
        log = open_log(folder / "shim.log")
        try:
            socket.send_fds(self.control, [encode(ForkShimRequest(str(folder))).encode()], [listener, lock, log])
        except OSError:
            return False
        finally:
            os.close(log)
        return True

    def close(self) -> None:
        """End the fork server; the shims that it forked go on."""
        self.control.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, 15)
            os.waitpid(self._pid, 0)


def _spawn(module: str, arguments: list[str], fds: list[int], output: Path, environ: Mapping[str, str]) -> int:
    """Start one of our modules in its own session; it has these files as descriptors 3, 4, ... and no others."""
    # Opened here: posix_spawn keeps all threads from running while it opens a file, which may be for ever.
    try:
        log = open_log(output)
    except OSError as error:
        raise BackendFailed(f"cannot open {output}: {error.strerror}") from error
    # Copies with high numbers, so that none is overwritten by the numbers of the child.
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in (log, *fds)]
    os.close(log)
    actions: list[tuple[Any, ...]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        *((os.POSIX_SPAWN_DUP2, copy, number) for number, copy in enumerate((copies[0], *copies), 1)),
    ]
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        # Signals that are blocked in this process would otherwise be blocked in every replica, too.
        return os.posix_spawn(sys.executable, command, dict(environ), file_actions=actions, setsid=True, setsigmask=())
    except OSError as error:
        raise BackendFailed(f"cannot start {sys.executable}: {error.strerror}") from error
    finally:
        for copy in copies:
            os.close(copy)


@contextlib.contextmanager
def _short_path(folder: Path) -> Any:
    """A path of the shim's socket that is short for any folder: the kernel takes at most 107 bytes."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{number}/shim.sock"
    finally:
        os.close(number)


def _connect(folder: Path) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(_SEND_SECONDS)
    try:
        with _short_path(folder) as path:
            peer.connect(path)
    except OSError:
        peer.close()
        raise
    return peer


def _try_lock(folder: Path) -> int | None:
    """Take the lock of a folder and return its file number; None where a running shim holds it."""
    lock = open_plain(folder / "lock")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def find_shim(job_id: str, folder: Path) -> ShimClient | None:
    """A connection to the shim that runs in that folder; None where none runs, or where it is just ending."""
    try:
        lock = _try_lock(folder)
        if lock is None:
            return ShimClient(job_id, _connect(folder))
        os.close(lock)
    except OSError:
        return None
    return None


def start_shim(
    job_id: str, folder: Path, forkserver: ForkserverClient | None, environ: Mapping[str, str]
) -> tuple[ShimClient, int]:
    """A connection to the job's shim, which is started if none runs, and the pid of a child that was started for it.

    The pid is 0 where there is no child to reap. Raises BlockingIOError where a shim is just ending: try again.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = _try_lock(folder)
    if lock is None:
        try:
            return ShimClient(job_id, _connect(folder)), 0
        except OSError as error:
            raise BlockingIOError(*error.args) from error
    try:
        with socket.socket(socket.AF_UNIX) as listener, _short_path(folder) as path:
            remove_state(folder / "shim.sock")
            listener.bind(path)
            listener.listen(_BACKLOG)
            link = ShimClient(job_id, _connect(folder))
            if forkserver is not None and forkserver.is_ready and forkserver.fork_shim(folder, listener.fileno(), lock):
                link.warm = True
                return link, 0
            link.warm = False
            arguments = [str(folder), "3", "4"]
            fds = [listener.fileno(), lock]
            return link, _spawn("pollux.backends.shim.process", arguments, fds, folder / "shim.log", environ)
    finally:
        os.close(lock)
