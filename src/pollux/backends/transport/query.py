"""A question to a node daemon that waits for the answer, such as whether files exist on the node."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping
from typing import Any

from pollux.backends.transport import channel
from pollux.backends.transport.channel import SecureLine
from pollux.core.errors import BackendFailed

__all__ = ["ask_host"]


def ask_host(
    address: tuple[str, int], secret: bytes, request: Mapping[str, Any], timeout_seconds: float = 5.0
) -> Mapping[str, Any]:
    """The answer of the node daemon at that address; BackendFailed where it gives none, or has another secret."""
    deadline = time.monotonic() + timeout_seconds
    where = f"{address[0]}:{address[1]}"
    try:
        with socket.create_connection(address, timeout=timeout_seconds) as peer:
            line = SecureLine(peer, where)
            channel.answer(secret, line, _next(line, deadline), request)
            said = _next(line, deadline)
    except OSError as error:
        raise BackendFailed(f"the host at {where} does not answer: {error.strerror or error}") from error
    if not isinstance(said, Mapping):
        raise BackendFailed(f"the host at {where} gave an answer that is not known here: {said!r:.80}")
    return said


def _next(line: SecureLine, deadline: float) -> Any:
    while time.monotonic() < deadline:
        line.flush()
        if select.select([line.peer], [], [], max(0.0, deadline - time.monotonic()))[0]:
            values = line.get()
            if values:
                return values[0]
        if line.broken:
            raise BackendFailed(f"the host at {line.where} refused the connection: is it of another fleet?")
    raise BackendFailed(f"the host at {line.where} does not answer")
