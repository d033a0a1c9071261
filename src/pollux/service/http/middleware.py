"""What is checked before every request: the host it was sent to, the token, the length; and what each token may do.

An ASGI wrapper, so that nothing behind it sees a request that was refused, and every answer has the same headers.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from pollux.core.errors import Forbidden, PolluxError, TooLarge, Unauthorised
from pollux.service.auth.sessions import CSRF_HEADER, Sessions
from pollux.service.auth.tokens import Caller, Tokens
from pollux.service.http.request_checks import KnownHosts, check_content_type, check_origin, check_page, headers_of
from pollux.service.http.web_files import is_page
from pollux.service.views.refusals import ApiRefusals
from pollux.wire.codec import MAX_BODY_BYTES

__all__ = ["OPEN_PATHS", "PEER_KEY", "SECURITY_HEADERS", "Guard", "check_scope", "error_body"]

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/docs", "/docs.css", "/openapi.json"})
"""Paths that anybody may read, beside the page's own files: they say nothing about jobs."""

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Sent with every answer: no foreign script, style or frame, and nothing inline."""

PEER_KEY = "pollux.peer"
"""The key of a request's `state` under which the server puts the `Peer`, to learn when it has shown a token."""

_ADDED = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
_READING = ("GET", "HEAD", "OPTIONS")
_SESSION_PATH = "/v1/session"
# Anybody may try to sign in, and needs only send a token.
_MAX_SIGN_IN_BYTES = 8192

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def error_body(code: str, message: str, retryable: bool = False) -> bytes:
    """The body of every error."""
    return json.dumps({"error": {"code": code, "message": message, "retryable": retryable}}).encode()


class Guard:
    """Refuses foreign host names (DNS rebinding), unknown tokens, foreign pages (CSRF) and bodies above the limit.

    `close` ends work that requests have left running; it must be called at the end.
    """

    def __init__(
        self,
        app: App,
        tokens: Tokens,
        allowed_hosts: Iterable[str] = (),
        sessions: Sessions | None = None,
        close: Callable[[], None] = lambda: None,
        refusals: ApiRefusals | None = None,
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._sessions = sessions
        self.close = close
        self.refusals = refusals or ApiRefusals()
        self._hosts = KnownHosts(allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = _with_headers(send, scope["path"].startswith("/v1/"))
        signs_in = scope["path"] == _SESSION_PATH and scope["method"] == "POST"
        most = _MAX_SIGN_IN_BYTES if signs_in else MAX_BODY_BYTES
        kind = "request"
        try:
            headers = headers_of(scope)
            kind = "host"
            self._hosts.check(_text(headers.get(b"host")) or "", _arrived_at(scope))
            kind = "sign-in page" if signs_in else "token"
            if signs_in:
                check_origin(headers)
                check_content_type(headers)
            scope["pollux.caller"] = self._caller(scope["method"], scope["path"], headers)
            _tell_known(scope)
            kind = "length"
            _check_length(headers.get(b"content-length"), most)
        except PolluxError as error:
            # A token that is unknown and a page that is foreign are two kinds.
            self._tell(scope, f"{kind} {error.http_status}", str(error))
            await _refuse(send, error)
            return
        await self._app(scope, _limited(receive, most), self._counted(scope, send))

    def _tell(self, scope: Scope, kind: str, why: str) -> None:
        client, server = scope.get("client"), scope.get("server")
        who = "somebody" if client is None else (str(client[0]), int(client[1]))
        self.refusals.tell(who, kind, why, None if server is None else tuple(server))

    def _counted(self, scope: Scope, send: Send) -> Send:
        """Operations refuse wrong tokens at the sign-in, and tokens that are good for other things."""

        async def sending(message: Message) -> None:
            status = message.get("status")
            if message["type"] == "http.response.start" and status in (401, 403):
                why = f"{scope['method']} {scope['path'][:80]!r} was answered {status}: its token does not do"
                self._tell(scope, f"operation {status}", why)
            await send(message)

        return sending

    def _caller(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> Caller | None:
        if _is_open(method, path):
            return None
        shown = headers.get(b"authorization")
        caller = None if shown is not None else self._signed_in(method, headers)
        if caller is None:
            caller = self._tokens.caller(None if shown is None else shown.decode("latin-1"))
        if caller.role == "viewer" and method not in _READING and path != _SESSION_PATH:
            raise Forbidden("this token may look, not change anything; sign in with the operator's token for that")
        return caller

    def _signed_in(self, method: str, headers: Mapping[bytes, bytes]) -> Caller | None:
        """The person signed in at the browser, if there is one. Refuses requests from other pages than ours."""
        if self._sessions is None:
            return None
        session_id = self._sessions.id_in(_text(headers.get(b"cookie")))
        session = None if session_id is None else self._sessions.find(session_id)
        if session is None:
            return None
        check_page(headers)
        word = _text(headers.get(CSRF_HEADER.encode())) or ""
        if method not in _READING and not hmac.compare_digest(word.encode(), session.csrf.encode()):
            raise Forbidden("the header X-Pollux-CSRF is missing or wrong; reload the page, or sign in again")
        return Caller(role=session.role, session_id=session_id)


def _is_open(method: str, path: str) -> bool:
    """Whether a request needs no token."""
    return path in OPEN_PATHS or is_page(path) or (path == _SESSION_PATH and method == "POST")


def _arrived_at(scope: Scope) -> str | None:
    """The address of this machine that the request came to; None if it is unknown."""
    server = scope.get("server")
    return None if server is None else str(server[0])


def _tell_known(scope: Scope) -> None:
    """Note a peer that has shown a token: its connection is not among the first to be dropped."""
    peer = (scope.get("state") or {}).get(PEER_KEY)
    if peer is not None and scope["pollux.caller"] is not None:
        peer.know()


def _check_length(length: bytes | None, most: int) -> None:
    if length is not None and length.isdigit() and int(length[:20]) > most:
        raise _too_large(most)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _with_headers(send: Send, is_data: bool) -> Send:
    """Every answer says what a browser may do with it; data is cached nowhere unless the answer says otherwise."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), *_ADDED]
            if is_data and not any(name.lower() == b"cache-control" for name, _ in headers):
                headers.append((b"cache-control", b"no-store"))
            message = {**message, "headers": headers}
        await send(message)

    return sending


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"the body has more than {most} bytes; send less")


def _limited(receive: Receive, most: int) -> Receive:
    """Bodies without a length, or with a wrong one, are counted as they come."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > most:
            raise _too_large(most)
        return message

    return counted


async def _refuse(send: Send, error: PolluxError) -> None:
    body = error_body(type(error).__name__, str(error), error.retryable)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if isinstance(error, Unauthorised):
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def check_scope(caller: Caller | None, allows_job: bool, job_id: str | None, allows_viewer: bool = True) -> None:
    """Refuse a job's token anything but its own job's reports and status, and a viewer what only the operator sees."""
    if caller is not None and caller.role == "viewer" and not allows_viewer:
        raise Forbidden("this shows what jobs were given, secrets among it; sign in with the operator's token for that")
    if caller is None or caller.job_id is None:
        return
    if not allows_job or job_id != caller.job_id:
        raise Forbidden(f"the token of job '{caller.job_id}' may report for that job and read it, nothing else")
