"""What runs in the decision process: reads snapshots, asks the policy, writes decisions.

The service can give another process all that this one holds: it may be killed at any time. It ends with the service.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import traceback

from pollux.backends.process.proc import die_with_parent, name_this
from pollux.core import Policy
from pollux.service.deciding.changes import DecisionWriter, SnapshotReader
from pollux.service.deciding.frames import Frames

__all__ = ["DECIDED", "FAILED", "READY", "main", "serve"]

READY = b"r"
"""The message of a process that is ready."""

DECIDED = b"d"
"""The first byte of a message with a decision."""

FAILED = b"f"
"""The first byte of a message with the traceback of a policy that has failed."""


def serve(frames: Frames) -> None:
    """Answer until the other end closes."""
    policy: Policy = pickle.loads(frames.receive())
    frames.send(READY)
    reader, writer = SnapshotReader(), DecisionWriter()
    number, memory = 0, None
    while True:
        snapshot = reader.read(frames.receive(), (number, memory))
        try:
            decision = policy.allocate(snapshot)
        except Exception:
            frames.send(FAILED + traceback.format_exc().encode())
            continue
        number, memory = number + 1, decision.memory
        frames.send(DECIDED + writer.write(decision, snapshot, number))


def main() -> None:
    """Serve the parent: the arguments are its process id and the number of the socket it left open."""
    parent, descriptor = int(sys.argv[1]), int(sys.argv[2])
    # Signals to the whole group are for the service, which may still need decisions while it stops.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        die_with_parent(parent)
        name_this("pollux-decides")
    # What a policy prints belongs in the service's log, not between messages.
    with contextlib.suppress(OSError):
        os.dup2(2, 1)
    with contextlib.suppress(EOFError, ConnectionError):
        serve(Frames(socket.socket(fileno=descriptor)))
