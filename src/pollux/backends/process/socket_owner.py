"""Finds the user at the other end of a connection, if its process runs on this machine."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys

__all__ = ["owner_of", "user_of"]

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED = "01"
# Process, user and group.
_CREDENTIALS = struct.Struct("3i")
_MAPPED = ipaddress.IPv6Address("::ffff:0:0")


def owner_of(theirs: tuple[str, int], ours: tuple[str, int]) -> int | None:
    """The user whose socket is bound to `theirs` and connected to `ours`; None where this machine has no such socket.

    The kernel notes the user who made the socket. One that is closed already has no user any more.
    """
    for table, written in zip(_TABLES, (_as_ipv4, _as_ipv6), strict=True):
        wanted = [written(theirs), written(ours), _ESTABLISHED]
        try:
            with open(table) as rows:
                for row in rows:
                    fields = row.split()
                    if fields[1:4] == wanted and fields[9] != "0":
                        return int(fields[7])
        except (OSError, ValueError, IndexError):
            continue
    return None


def user_of(peer: socket.socket) -> int | None:
    """The user who connected a Unix socket, as the kernel noted it then; None where it does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _as_ipv4(address: tuple[str, int]) -> str:
    return _text(ipaddress.IPv4Address(address[0]).packed, address[1])


def _as_ipv6(address: tuple[str, int]) -> str:
    """An IPv4 address as a socket of IPv6 has it."""
    return _text((_MAPPED + int(ipaddress.IPv4Address(address[0]))).packed, address[1])


def _text(packed: bytes, port: int) -> str:
    # The kernel prints each word in this machine's byte order.
    order = "<" if sys.byteorder == "little" else ">"
    words = struct.unpack(f"{order}{len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"
