"""A process that has imported what training scripts import, and forks shims.

It is started with `python -m pollux.backends.shim.forkserver`.

It has only one thread, runs no operation and opens no GPU: more would not survive a fork. Shims forked from it, and the
replicas forked from those, share its memory and start in milliseconds.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from pollux.backends.process import proc
from pollux.backends.process.warm_python import import_all
from pollux.backends.shim import process as process_module
from pollux.storage.state_file import keep_end
from pollux.wire.live.codec import decode, encode
from pollux.wire.live.messages import ForkserverMessage, ForkShimRequest

__all__ = ["serve"]


def _fork_shim(
    request: ForkShimRequest, fds: list[int], variables: Mapping[str, str], control: socket.socket
) -> int | None:
    """Fork twice, so that the shim is no child of this process; None here, an exit code in the forked process."""
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return None
    os.setsid()
    if os.fork():
        os._exit(0)
    control.close()
    for standard in (1, 2):
        os.dup2(fds[2], standard)
    os.close(fds.pop())
    return process_module.serve(Path(request.folder), socket.socket(fileno=fds[0]), variables)


def serve(control: socket.socket, log: Path) -> int:
    """Fork shims as ordered until the other end is closed; the exit code, in a forked replica that of the replica.

    `log`: where its output goes.
    """
    proc.name_this("pollux-nursery")
    variables = dict(os.environ)
    control.send(encode(ForkserverMessage(import_all())).encode())
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 16, 3)
        if not message:
            return 0
        keep_end(log, sys.stderr.fileno())
        for fd in fds:
            os.set_inheritable(fd, False)
        code = _fork_shim(decode(ForkShimRequest, message), fds, variables, control)
        if code is not None:
            return code
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])))
