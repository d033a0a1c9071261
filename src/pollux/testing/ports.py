"""Ports for test servers that must know their port before they listen, beside other test runs on the machine."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]

# Below the ports that systems give to connections (from 32768 on Linux) and those of node daemons on Slurm (from
# 20000): nobody gets a port of this range by chance.
_FIRST, _LAST = 12_000, 19_999
_chosen = random.SystemRandom()


def free_port() -> int:
    """A port on the loopback that is free, and that no process gets by chance."""
    while True:
        port = _chosen.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
