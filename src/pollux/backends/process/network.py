"""Addresses of this machine, and the network interface that its replicas use to reach each other."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping

__all__ = ["interface_of", "is_loopback", "meeting_variables", "own_address"]

_SIOCGIFADDR = 0x8915
_GLOO = "GLOO_SOCKET_IFNAME"


def own_address() -> str:
    """The address of this machine for others, as the kernel chooses it; the loopback where there is no network."""
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Whether an address can be reached from its own machine only."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def interface_of(address: str) -> str:
    """The name of the interface that has this IPv4 address; empty where none has it, or for another kind of address."""
    try:
        wanted = ipaddress.IPv4Address(address).packed
    except ValueError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                # This interface has no address.
                continue
            if answer[20:24] == wanted:
                return name
    return ""


def meeting_variables(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables by which replicas meet on the interface of this address; none where `environ` has them, or at loopback.

    Gloo would use the address of the machine's own name, which on Debian is 127.0.1.1: other nodes cannot reach that.
    """
    name = "" if _GLOO in environ else interface_of(address)
    return {_GLOO: name} if name and not ipaddress.ip_address(address).is_loopback else {}
