"""Cuts TCP connections between replicas, so that the others stop waiting for a replica that is silent.

A collective over gloo ends only at its timeout or when a connection ends: no call from another thread ends it, nor does
a node's loss of its network. So the other replicas cut their connections themselves. They cut a connection only if a
replica of the same job has published its other end.

Gloo accepts any connection as one from the replica that it waits for. The kernel knows the user of each connection from
this machine: those of other users are cut before a group carries any values.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator

from pollux.wire.socket_owners import End, end_of, tcp_sockets

__all__ = ["cut", "cut_other_users", "is_possible", "listening_ports", "own_ends"]

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_MAPPED = "::ffff:"
_READS = 3


def is_possible() -> bool:
    """Whether connections can be listed here: not where a script has set a default timeout for its sockets."""
    # A socket object of ours would then set this timeout on the connection itself.
    return socket.getdefaulttimeout() is None and os.path.isdir("/proc/self/fd")


def own_ends() -> list[str]:
    """This process's ends of its TCP connections, as "address port"."""
    return sorted(_text(mine) for _, mine, _ in _connections())


def cut(ends: Collection[str]) -> int:
    """Cut the connections of this process to these ends; returns their number."""
    count = 0
    for connection, _, theirs in _connections():
        if _text(theirs) in ends:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def listening_ports() -> frozenset[int]:
    """The ports at which this process takes TCP connections."""
    return frozenset(int(str(own[1])) for _, own in _sockets(listening=True))


def cut_other_users(ports: Collection[int]) -> int:
    """End the connections that other users of this machine have made to these ports; returns their number.

    So does a connection from this machine whose user the kernel no longer has, since who made it has left; what it said
    may still be read.
    """
    there = {(end_of(theirs), end_of(mine)): str(theirs[0]) for _, mine, theirs in _connections() if mine[1] in ports}
    users: dict[tuple[End, End], int] = {}
    for _ in range(_READS):
        # The list may lack a row while others come and go.
        users |= {(each.own, each.other): each.user for each in tcp_sockets(ports) if not each.listens}
        if users.keys() >= there.keys():
            break
    strange = {ends for ends in there if users.get(ends, os.geteuid()) != os.geteuid()}
    # Where our own side is not listed, the list is of other connections.
    left = [ends for ends in there if ends not in users and ends[::-1] in users and _is_here(there[ends])]
    count = 0
    for connection, mine, theirs in _connections():
        if (end_of(theirs), end_of(mine)) in strange.union(left):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _is_here(host: str) -> bool:
    """Whether it is an address of this machine: no other can be bound to."""
    plain = host.removeprefix(_MAPPED)
    try:
        with socket.socket(socket.AF_INET6 if ":" in plain else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((plain, 0))
    except OSError:
        return False
    return True


def _text(address: tuple[object, ...]) -> str:
    """The text of an address, equal on both sides: one may see as IPv6 what the other sees as IPv4."""
    host, port = end_of(address)
    return f"{host} {port}"


def _connections() -> Iterator[tuple[socket.socket, tuple[object, ...], tuple[object, ...]]]:
    for connection, own in _sockets(listening=False):
        with contextlib.suppress(OSError):
            yield connection, own, connection.getpeername()


def _sockets(listening: bool) -> Iterator[tuple[socket.socket, tuple[object, ...]]]:
    """The TCP sockets of this process, each as a copy while it is read."""
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
                if bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == listening:
                    yield connection, connection.getsockname()
