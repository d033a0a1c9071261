"""Brings up the loopback interface of a new network namespace, as `ip link set lo up` does where there is an `ip`."""

import fcntl
import socket
import struct

# From linux/sockios.h and linux/if.h.
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
REQUEST = struct.Struct("16sh14x")

if __name__ == "__main__":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        _, flags = REQUEST.unpack(fcntl.ioctl(asked, SIOCGIFFLAGS, REQUEST.pack(b"lo", 0)))
        fcntl.ioctl(asked, SIOCSIFFLAGS, REQUEST.pack(b"lo", flags | IFF_UP))
