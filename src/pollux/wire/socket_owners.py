"""Finds the users behind TCP and Unix sockets of this machine, as the kernel lists them.

A server without a certificate cannot prove who it is, but on one machine the kernel knows whose process listens. So
whoever is about to send a token in clear text to this machine asks the kernel first (`check_server`). Tables of the
kernel show the network namespace of the process that reads them.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from pollux.core.errors import Unreachable

__all__ = ["End", "TcpSocket", "check_server", "end_of", "owner_of", "tcp_sockets", "user_of"]

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENS, _ESTABLISHED = "0A", "01"
_ROOT = 0
# A row can be missed while others come and go between two pages of a table.
_READS = 3
# Process, user and group.
_CREDENTIALS = struct.Struct("3i")


class End(NamedTuple):
    """One end of a connection: an address, equal for IPv4 and what IPv6 makes of it, and a port."""

    host: str
    port: int


class TcpSocket(NamedTuple):
    """A socket that a process has: its end, the other one, and the user who made it."""

    own: End
    other: End
    listens: bool
    user: int


def end_of(address: tuple[object, ...]) -> End:
    """The end that the `socket` module calls `address`."""
    host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return End(str(mapped or host), int(str(address[1])))


def tcp_sockets(ports: Collection[int]) -> Iterator[TcpSocket]:
    """Listening and connected sockets of this machine with one of these ports at either end.

    A connection that is not accepted yet, or closed already, belongs to nobody and is left out.
    """
    wanted = {f"{port:04X}" for port in ports}
    for table in _TABLES:
        try:
            with open(table) as rows:
                for row in rows:
                    fields = row.split()
                    known = len(fields) > 9 and fields[3] in (_LISTENS, _ESTABLISHED) and fields[9] != "0"
                    if known and not wanted.isdisjoint((fields[1].rpartition(":")[2], fields[2].rpartition(":")[2])):
                        yield TcpSocket(_end(fields[1]), _end(fields[2]), fields[3] == _LISTENS, int(fields[7]))
        except OSError:
            continue


def owner_of(theirs: tuple[object, ...], ours: tuple[object, ...]) -> int | None:
    """The user whose socket is bound to `theirs` and connected to `ours`; None where this machine has none."""
    ends = end_of(theirs), end_of(ours)
    found = (each.user for each in tcp_sockets({ends[0].port}) if (each.own, each.other) == ends and not each.listens)
    return next(found, None)


def user_of(peer: socket.socket) -> int | None:
    """The user who connected a Unix socket, as the kernel noted it then; None where it does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def check_server(connection: socket.socket, trusted: Callable[[], Collection[int]]) -> None:
    """Raise `Unreachable` if another user of this machine serves this connection; nothing is sent before.

    Trusted are root, this process's user and `trusted`. Nothing is checked where the server is another machine, nor
    where the kernel's tables show no server: there are none (no Linux), or root has led this port elsewhere.
    """
    own, server = end_of(connection.getsockname()), end_of(connection.getpeername())
    if own.host != server.host and not ipaddress.ip_address(server.host).is_loopback:
        return
    for _ in range(_READS):
        rows = list(tcp_sockets({server.port}))
        users = {each.user for each in rows if each.listens and _takes(each.own, server)}
        if _ROOT not in users:  # what root's proxy accepts may be served by a user of its own
            users |= {each.user for each in rows if (each.own, each.other) == (server, own)}
        if users:
            break
    strangers = users - {_ROOT, os.geteuid(), *(trusted() if users else ())}
    if strangers:
        raise Unreachable(
            f"user {min(strangers)} of this machine listens at {server.host}:{server.port}, not user {os.geteuid()} or "
            "root: no token was sent there. Start the service with 'pollux up'; if this user's process is yours or "
            f"leads to your service, set POLLUX_SERVER_UID={min(strangers)}"
        )


def _takes(listener: End, server: End) -> bool:
    """Whether the listener may have taken a connection to that end."""
    everywhere = ipaddress.ip_address(listener.host).is_unspecified
    return listener.port == server.port and (everywhere or listener.host == server.host)


def _end(text: str) -> End:
    """An end in the kernel's table: words in the processor's byte order."""
    host, _, port = text.rpartition(":")
    packed = struct.pack(f"={len(host) // 8}I", *(int(host[at : at + 8], 16) for at in range(0, len(host), 8)))
    return end_of((ipaddress.ip_address(packed), int(port, 16)))
