"""What the network of this machine has."""

import socket

__all__ = ["has_ipv6"]


def has_ipv6() -> bool:
    """Whether sockets can listen on ::1 here; `socket.has_ipv6` says only what Python was built with."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
