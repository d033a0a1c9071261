"""The names by which clients can reach a service with a certificate and trust it. Nothing is served here."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pollux.backends.process.network import is_loopback
from pollux.core.errors import InvalidInput
from pollux.service.settings import ANY_ADDRESS

__all__ = ["host_for_nodes", "host_to_announce", "names_of", "trusted_text"]

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
# A handshake in memory takes two turns of each side; one that takes more never ends.
_TURNS = 8


def names_of(cert: Path, key: Path) -> tuple[str, ...]:
    """The host names and addresses that a certificate is made out to; refuses one that no client would trust."""
    try:
        found = _handshake(cert, key, None).getpeercert() or {}
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"certificate '{cert}' cannot be verified ({getattr(error, 'verify_message', '') or error}); "
            "give a valid one with --tls-cert and --tls-key"
        ) from None
    names: Any = found.get("subjectAltName", ())
    return tuple(str(name) for kind, name in names if kind in ("DNS", "IP Address"))


def host_to_announce(cert: Path, key: Path, host: str, bound: str) -> str:
    """The name to tell clients on this machine, for a service that was told to listen at `host` and listens at `bound`.

    The name leads to `bound`, and the certificate is valid for it; refuses a certificate without one.
    """
    names = names_of(cert, key)
    for candidate in _candidates(host.strip("[]"), bound, names):
        if _is_valid(cert, key, candidate) and _leads_to(candidate, bound):
            return candidate
    raise InvalidInput(
        f"certificate '{cert}' is valid for {', '.join(names) or 'no name'}, which does not lead to {host} here: "
        "listen at one of its names with --host, or get one with this machine's name as subjectAltName"
    )


def host_for_nodes(cert: Path, key: Path, head: str) -> str:
    """The name to tell agents on other machines, which reach this one at `head`; refuses a certificate without one.

    The name may lead elsewhere from here: machines often resolve their own name to the loopback.
    """
    names = names_of(cert, key)
    known = [name for name in names if "*" not in name and not is_loopback(name) and _is_valid(cert, key, name)]
    if _is_valid(cert, key, head):
        return head
    for name in sorted(known, key=lambda name: not _leads_to(name, head)):
        return name
    raise InvalidInput(
        f"certificate '{cert}' is valid for {', '.join(names) or 'no name'}, and nodes reach this machine at {head}: "
        "get one with that as subjectAltName, or name what it is valid for with --option head="
    )


def trusted_text(cert: Path) -> str:
    """The certificates of a PEM file as text, without a key that may be in it."""
    try:
        return "\n".join(_CERTIFICATE.findall(cert.read_text(encoding="utf-8"))) + "\n"
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"certificate '{cert}' cannot be read: {error}; give a PEM file") from error


def _candidates(host: str, bound: str, names: tuple[str, ...]) -> Iterator[str]:
    if host not in ANY_ADDRESS:
        yield from (host, bound)
    yield from ("localhost", "127.0.0.1", "::1", socket.gethostname())
    yield from (name for name in names if "*" not in name)


def _is_valid(cert: Path, key: Path, host: str) -> bool:
    try:
        _handshake(cert, key, host)
    except (OSError, ValueError):
        return False
    return True


def _leads_to(host: str, bound: str) -> bool:
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bound in ANY_ADDRESS or bound in found


def _handshake(cert: Path, key: Path, host: str | None) -> ssl.SSLObject:
    """A client that trusts this certificate meets its server, in memory; raises if they do not agree."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key, password="")
    client = ssl.create_default_context(cafile=str(cert))
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.check_hostname = host is not None
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True))
    for _ in range(_TURNS):
        waiting = False
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                waiting = True
        if not waiting:
            break
    return sides[0]
