"""What a request says about itself: its target, its headers, the host it was sent to and the page it comes from.

Nothing here looks at tokens; that is done in `middleware`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from pollux.backends.process.network import is_loopback
from pollux.core.errors import Forbidden, InvalidInput

__all__ = ["KnownHosts", "check_content_type", "check_origin", "check_page", "headers_of"]

# Two of these could be read differently by a proxy and by this service.
_GIVEN_ONCE = frozenset({
    b"authorization", b"content-length", b"content-type", b"host", b"idempotency-key", b"last-event-id", b"origin",
    b"sec-fetch-site", b"transfer-encoding", b"x-pollux-csrf",
})  # fmt: skip
_OTHER_PAGE = "the request comes from a page of another address; use the service's own page"
_USUAL_PORTS = ("80", "443")


def headers_of(scope: MutableMapping[str, Any]) -> dict[bytes, bytes]:
    """The headers of a request by their names in lower case.

    InvalidInput for a target that is not a path, a header that is wrongly repeated, and two lengths of one body.
    """
    if not scope["path"].startswith("/"):
        raise InvalidInput(f"the request is for '{scope['path'][:80]}'; ask for a path, such as /v1/jobs")
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        key = name.lower()
        if key in found and key in _GIVEN_ONCE:
            raise InvalidInput(f"the header '{key.decode('latin-1')}' is there twice; send it once")
        found[key] = value
    if b"transfer-encoding" in found and b"content-length" in found:
        raise InvalidInput("the body has both Content-Length and Transfer-Encoding; send one of them")
    return found


class KnownHosts:
    """The names under which the service may be addressed, beside this machine's own addresses. Case does not matter."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {_plain(name) for name in names}

    def check(self, host: str, arrived_at: str | None) -> None:
        """Refuse a `Host` that is none of ours; `arrived_at` is the address that the request came to."""
        name = _plain(_without_port(host))
        if is_loopback(name) or name in self._names:
            return
        # No foreign page can make a browser name the address that it connects to.
        address = _address(name)
        if address is not None and arrived_at is not None and address == _address(arrived_at):
            return
        raise Forbidden(
            f"the request was sent to host '{name[:80]}', which this service does not answer for; "
            "use its address, or start it with 'pollux up --allow-host NAME'"
        )


def check_page(headers: Mapping[bytes, bytes]) -> None:
    """Refuse a request from a page of another address, as the browser tells. Other clients tell nothing, and pass."""
    if headers.get(b"sec-fetch-site", b"same-origin") not in (b"same-origin", b"none"):
        raise Forbidden(_OTHER_PAGE)


def check_origin(headers: Mapping[bytes, bytes]) -> None:
    """The same before signing in; over plain HTTP browsers tell less, but always the origin of a form."""
    check_page(headers)
    origin = headers.get(b"origin")
    if b"sec-fetch-site" in headers or origin is None:
        return
    if _host_of(origin) != _usual(headers.get(b"host", b"").decode("latin-1")):
        raise Forbidden(_OTHER_PAGE)


def check_content_type(headers: Mapping[bytes, bytes]) -> None:
    """Refuse a body that is not announced as JSON: a form on another page cannot announce that."""
    given = headers.get(b"content-type", b"").decode("latin-1")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise InvalidInput(f"the content type is '{given[:80]}'; send JSON as 'Content-Type: application/json'")


def _plain(name: str) -> str:
    """A host name in lower case, without the dot that may end it."""
    return name.lower().removesuffix(".")


def _without_port(host: str) -> str:
    """The name in a `Host` header; the whole header if its end is no port, so that it matches no name."""
    if host.endswith("]"):
        return host
    name, _, port = host.rpartition(":")
    return name if name and port.isascii() and port.isdigit() and len(port) <= 5 else host


def _usual(host: str) -> str:
    name = _without_port(host)
    port = host[len(name) :].lstrip(":")
    return _plain(name) if port in ("", *_USUAL_PORTS) else f"{_plain(name)}:{port}"


def _host_of(origin: bytes) -> str | None:
    """Host and port of an origin; None for `null`, which stands for pages without any."""
    try:
        return _usual(urlsplit(origin.decode("latin-1")).netloc) or None
    except ValueError:
        return None


def _address(name: str) -> str | None:
    """An IP address in its usual spelling; None for a name."""
    try:
        found = ipaddress.ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
