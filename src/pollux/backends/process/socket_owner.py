"""Finds the user at the other end of a connection, if its process runs on this machine."""

from __future__ import annotations

import functools
import ipaddress
import socket
import struct

__all__ = ["owner_of", "user_of"]

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

_End = tuple[bytes, int]


def owner_of(theirs: tuple[str, int], ours: tuple[str, int]) -> int | None:
    """The user whose socket is bound to `theirs` and connected to `ours`; None where this machine has no such socket.

    The kernel notes the user who made the socket. One that is closed already has no user any more. The kernel is asked
    for this one connection, so that the answer takes no longer where there are many; a sandbox that cannot answer that
    has a list of all.
    """
    find = _ask if _is_answered() else _look_up
    for family, written in ((socket.AF_INET, _as_ipv4), (socket.AF_INET6, _as_ipv6)):
        user = find(family, (written(theirs[0]), theirs[1]), (written(ours[0]), ours[1]))
        if user is not None:
            return user
    return None


@functools.cache
def _is_answered() -> bool:
    """Whether the kernel tells about a connection that there is."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as line:
        ends = [(_as_ipv4(host), port) for host, port in (line.getsockname(), line.getpeername())]
        return _ask(socket.AF_INET, *ends) is not None


def _ask(family: int, theirs: _End, ours: _End) -> int | None:
    """The user of that socket, by the kernel's `sock_diag`, which any user may ask."""
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << _ESTABLISHED)
    body += _SOCKET.pack(struct.pack("!HH", theirs[1], ours[1]), theirs[0], ours[0], _ANY_COOKIE)
    head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            kernel.send(head + body)
            answer = kernel.recv(_ANSWER_BYTES)
        kind, state = _HEADER.unpack_from(answer)[1], answer[_HEADER.size + 1]
        *_, user, inode = _REST.unpack_from(answer, _HEADER.size + 4 + _SOCKET.size)
    except (OSError, struct.error, IndexError):
        return None
    return int(user) if (kind, state) == (_SOCK_DIAG_BY_FAMILY, _ESTABLISHED) and inode else None


def _look_up(family: int, theirs: _End, ours: _End) -> int | None:
    """The user of that socket, by the kernel's list of all."""
    wanted = [_text(*theirs), _text(*ours), f"{_ESTABLISHED:02X}"]
    try:
        with open("/proc/net/tcp" if family == socket.AF_INET else "/proc/net/tcp6") as rows:
            for row in rows:
                fields = row.split()
                if fields[1:4] == wanted and fields[9] != "0":
                    return int(fields[7])
    except (OSError, ValueError, IndexError):
        pass
    return None


def user_of(peer: socket.socket) -> int | None:
    """The user who connected a Unix socket, as the kernel noted it then; None where it does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _as_ipv4(address: str) -> bytes:
    return ipaddress.IPv4Address(address).packed


def _as_ipv6(address: str) -> bytes:
    """An IPv4 address as a socket of IPv6 has it."""
    return (_MAPPED + int(ipaddress.IPv4Address(address))).packed


def _text(packed: bytes, port: int) -> str:
    """An end as the kernel prints it: each word in this machine's byte order."""
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"
