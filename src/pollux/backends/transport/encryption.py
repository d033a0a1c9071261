"""TLS for connections whose two ends have proved a secret to each other: it hides what they say.

There are no certificates: the ends agree on a key anonymously (`AECDH`), and both mix the value that only this
agreement has (RFC 5929, `tls-unique`) into the key of their codes. An attacker between them has two agreements, so
that no code fits.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl

__all__ = ["EncryptedSocket", "is_possible"]

# OpenSSL offers anonymous key agreement at security level 0 only, and TLS 1.3 has none.
_CIPHER = "AECDH-AES256-SHA:@SECLEVEL=0"
_BINDING = "tls-unique"


@functools.cache
def is_possible() -> bool:
    """Whether OpenSSL offers anonymous key agreement here; some administrators forbid it (FIPS)."""
    try:
        for is_client in (True, False):
            _context(is_client).wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), not is_client)
    except (ssl.SSLError, ValueError):
        return False
    return _BINDING in ssl.CHANNEL_BINDING_TYPES


def _context(is_client: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if is_client else ssl.PROTOCOL_TLS_SERVER)
    if is_client:
        # Nobody has a certificate: the codes show who the other is.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    context.set_ciphers(_CIPHER)
    return context


class EncryptedSocket:
    """An encrypted socket that does not block; errors are `OSError`s, as those of sockets.

    `binding` is a value of the key agreement that only the two ends know. Until they agree on a key it
    is empty, and nothing can be sent.
    """

    def __init__(self, peer: socket.socket, is_client: bool) -> None:
        self.binding = b""
        self._peer = peer
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _context(is_client).wrap_bio(self._came, self._goes, not is_client)
        self._out = bytearray()
        self._agree()

    def recv(self, size: int) -> bytes:
        """All that can be decrypted after at most `size` more encrypted bytes; empty once the other side is gone.

        BlockingIOError: nothing yet.
        """
        piece = self._peer.recv(size)
        if not piece:
            return b""
        self._came.write(piece)
        self._agree()
        text = bytearray()
        with contextlib.suppress(ssl.SSLWantReadError):
            while self.binding and (more := self._tls.read(size)):
                text += more
        self.flush()
        if not text:
            raise BlockingIOError
        return bytes(text)

    def send(self, data: bytes | bytearray) -> int:
        """Send the data, or keep it where the other side takes no more now; BlockingIOError while some is kept."""
        self.flush()
        if self._out or not self.binding:
            raise BlockingIOError
        size = self._tls.write(data)
        self.flush()
        return size

    @property
    def wants_to_write(self) -> bool:
        """Whether something is kept."""
        return bool(self._out)

    def flush(self) -> None:
        """Send what is kept, as far as the other side takes it now."""
        self._out += self._goes.read()
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while self._out:
                del self._out[: self._peer.send(self._out[: 1 << 18])]

    def _agree(self) -> None:
        """Go on with the agreement on a key, if there is none yet."""
        if not self.binding:
            with contextlib.suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
                self.binding = self._tls.get_channel_binding(_BINDING) or b""
            self.flush()
