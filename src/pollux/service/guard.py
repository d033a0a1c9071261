"""What stands before every request: the host it was sent to, who sends it, how much; and what each token may do.

An ASGI wrapper, so that nothing behind it sees a request that was refused.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from pollux.core.errors import Forbidden, PolluxError, TooLarge, Unauthorised
from pollux.service.settings import is_loopback
from pollux.service.tokens import Caller, Tokens
from pollux.wire.codec import MAX_BODY_BYTES

__all__ = ["OPEN_PATHS", "Guard", "check_scope", "error_body"]

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
"""What anybody who reaches the service may read: it says nothing about jobs."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def error_body(code: str, message: str, retryable: bool = False) -> bytes:
    """The one shape of every error."""
    return json.dumps({"error": {"code": code, "message": message, "retryable": retryable}}).encode()


class Guard:
    """Refuses foreign host names (DNS rebinding), unknown tokens and bodies above the limit."""

    def __init__(self, app: App, tokens: Tokens, allowed_hosts: Iterable[str] = ()) -> None:
        self._app = app
        self._tokens = tokens
        self._hosts = {host.lower() for host in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            self._check_host(headers.get(b"host", b"").decode("latin-1"))
            scope["pollux.caller"] = self._caller(scope["path"], headers)
            self._check_length(headers.get(b"content-length"))
        except PolluxError as error:
            await _refuse(send, error)
            return
        await self._app(scope, _limited(receive), send)

    def _check_host(self, host: str) -> None:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if is_loopback(name) or name.lower() in self._hosts:
            return
        raise Forbidden(
            f"the request was sent to host '{name[:80]}', which this service does not answer for; "
            "use 127.0.0.1, or start it with that name allowed"
        )

    def _caller(self, path: str, headers: dict[bytes, bytes]) -> Caller | None:
        if path in OPEN_PATHS:
            return None
        shown = headers.get(b"authorization")
        return self._tokens.caller(None if shown is None else shown.decode("latin-1"))

    def _check_length(self, length: bytes | None) -> None:
        if length is not None and length.isdigit() and int(length[:20]) > MAX_BODY_BYTES:
            raise _too_large()


def _too_large() -> TooLarge:
    return TooLarge(f"the body has more than {MAX_BODY_BYTES} bytes; send less")


def _limited(receive: Receive) -> Receive:
    """Bodies without a length, or with a wrong one, are counted as they come."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY_BYTES:
            raise _too_large()
        return message

    return counted


async def _refuse(send: Send, error: PolluxError) -> None:
    body = error_body(type(error).__name__, str(error), error.retryable)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if isinstance(error, Unauthorised):
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def check_scope(caller: Caller | None, allows_job: bool, job_id: str | None) -> None:
    """Refuse a job's token anything but its own job's reports and status."""
    if caller is None or caller.job_id is None:
        return
    if not allows_job or job_id != caller.job_id:
        raise Forbidden(f"the token of job '{caller.job_id}' may report for that job and read it, nothing else")
