"""Ports for servers of tests that must know theirs before they listen: another test run may be on this machine."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]

# Below those that systems hand out for connections (from 32768 on Linux) and those of hosts on Slurm (from 20000):
# whatever is free there stays free until it is taken by name.
_FIRST, _LAST = 12_000, 19_999
_chosen = random.SystemRandom()


def free_port() -> int:
    """A port on the loopback where nobody listens, and which nobody is given by chance before it is used."""
    while True:
        port = _chosen.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
