"""Cuts TCP connections between replicas, so that the others stop waiting for a replica that is silent.

A collective over gloo ends only with its timeout or with a connection: not by a call from another thread, and not when
a node loses its network. So the other replicas cut their connections themselves. They cut a connection only if a
replica of the same job has published its other end.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator

__all__ = ["cut", "is_possible", "own_ends"]

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_MAPPED = "::ffff:"


def is_possible() -> bool:
    """Whether connections can be listed here: not where a script has set a default timeout for its sockets."""
    # A socket object of ours would then set this timeout on the connection itself.
    return socket.getdefaulttimeout() is None and os.path.isdir("/proc/self/fd")


def own_ends() -> list[str]:
    """This process's ends of its TCP connections, as "address port"."""
    return sorted(_text(mine) for _, mine, _ in _connections())


def cut(ends: Collection[str]) -> int:
    """Cut the connections of this process to these ends; how many there were."""
    count = 0
    for connection, _, theirs in _connections():
        if _text(theirs) in ends:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _text(address: tuple[object, ...]) -> str:
    """The text of an address, equal on both sides: one may see as IPv6 what the other sees as IPv4."""
    host = str(address[0]).partition("%")[0].lower()
    plain = host.removeprefix(_MAPPED)
    return f"{plain if '.' in plain else host} {address[1]}"


def _connections() -> Iterator[tuple[socket.socket, tuple[object, ...], tuple[object, ...]]]:
    for name in os.listdir("/proc/self/fd") if is_possible() else ():
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with connection:
            if connection.family not in _INTERNET or connection.type != socket.SOCK_STREAM:
                continue
            with contextlib.suppress(OSError):
                yield connection, connection.getsockname(), connection.getpeername()
