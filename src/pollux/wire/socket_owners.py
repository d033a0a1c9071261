"""Finds the users behind TCP and Unix sockets of this machine, as the kernel lists them.

A server without a certificate cannot prove who it is, but on one machine the kernel knows whose process listens. So
whoever is about to send a token in clear text to this machine asks the kernel first (`check_server`). Tables of the
kernel show the network namespace of the process that reads them.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from pollux.core.errors import Unreachable

__all__ = ["End", "TcpSocket", "check_server", "end_of", "owner_of", "tcp_sockets", "user_of"]

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENS = "0A"
_ROOT = 0
# A row can be missed while others come and go between two pages of a table.
_READS = 3
# Process, user and group.
_CREDENTIALS = struct.Struct("3i")
_MAPPED = ipaddress.IPv6Address("::ffff:0:0")
# From linux/netlink.h, sock_diag.h and inet_diag.h: the header of a message; family, protocol, extensions and states; a
# socket's ports, addresses, interface and cookie; and in an answer expiry, queues, user and inode.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_HEADER, _REQUEST, _SOCKET, _REST = map(struct.Struct, ("=IHHII", "=BBxxI", "=4s16s16s12s", "=5I"))
_ANY_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_ESTABLISHED = 1
_ANSWER_BYTES = 4096


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
                    known = len(fields) > 9 and fields[9] != "0"
                    if known and not wanted.isdisjoint((fields[1].rpartition(":")[2], fields[2].rpartition(":")[2])):
                        yield TcpSocket(_end(fields[1]), _end(fields[2]), fields[3] == _LISTENS, int(fields[7]))
        except OSError:
            continue


def owner_of(theirs: tuple[object, ...], ours: tuple[object, ...]) -> int | None:
    """The user whose socket is bound to `theirs` and connected to `ours`; None where this machine has none.

    The kernel is asked for this one connection, so that the answer takes no longer where there are many. A sandbox that
    cannot answer that has its table read.
    """
    ends = end_of(theirs), end_of(ours)
    if _answers():
        found = (_ask(family, *ends) for family in (socket.AF_INET, socket.AF_INET6))
        return next((user for user in found if user is not None), None)
    rows = tcp_sockets({ends[0].port})
    return next((each.user for each in rows if (each.own, each.other) == ends and not each.listens), None)


@functools.cache
def _answers() -> bool:
    """Whether the kernel tells about a connection that there is."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as line:
        return _ask(socket.AF_INET, end_of(line.getsockname()), end_of(line.getpeername())) is not None


def _ask(family: int, theirs: End, ours: End) -> int | None:
    """The user of that socket, by the kernel's `sock_diag`, which any user may ask."""
    addresses = [_packed(family, each.host) for each in (theirs, ours)]
    if None in addresses:
        return None
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << _ESTABLISHED)
    body += _SOCKET.pack(struct.pack("!HH", theirs.port, ours.port), *addresses, _ANY_COOKIE)
    head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            kernel.send(head + body)
            answer = kernel.recv(_ANSWER_BYTES)
        kind, state = _HEADER.unpack_from(answer)[1], answer[_HEADER.size + 1]
        *_, user, inode = _REST.unpack_from(answer, _HEADER.size + 4 + _SOCKET.size)
    except (OSError, struct.error, IndexError, AttributeError):
        return None
    return int(user) if (kind, state) == (_SOCK_DIAG_BY_FAMILY, _ESTABLISHED) and inode else None


def _packed(family: int, host: str) -> bytes | None:
    """The address as a socket of that family has it; None where it can have no such address."""
    address = ipaddress.ip_address(host)
    if family == socket.AF_INET:
        return address.packed if address.version == 4 else None
    return (_MAPPED + int(address)).packed if address.version == 4 else address.packed


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
