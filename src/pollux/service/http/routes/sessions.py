"""The operations by which a browser signs in and out; who is signed in is kept in `sessions`."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

from pollux.core.errors import InvalidInput, Unauthorised, Unreachable
from pollux.service.auth.sessions import SESSION_SECONDS, Session, Sessions, WrongTokens
from pollux.service.http.operations import Call, Operation, json_response
from pollux.service.http.schemas import only

__all__ = ["SESSION_OPERATIONS"]

_TEXT = {"type": "string"}
_SESSION = only({"role": {"enum": ["operator", "viewer"]}, "csrf": {"anyOf": [_TEXT, {"type": "null"}]}})
_LONGEST_TOKEN = 512


async def _sign_in(call: Call) -> Response:
    body = call.body
    if not isinstance(body, dict) or set(body) != {"token"} or not isinstance(body["token"], str):
        raise InvalidInput('the body must be an object with the one key "token", a text')
    if len(body["token"]) > _LONGEST_TOKEN:
        raise InvalidInput(f"the token has {len(body['token'])} characters; give at most {_LONGEST_TOKEN}")
    try:
        session_id, session = await asyncio.to_thread(_sessions(call).open, body["token"].strip())
    except Unauthorised:
        await _delay_wrong_token(call.request.app.state.wrong_tokens)
        raise
    answer = json_response(_shown(session))
    is_secure = call.request.url.scheme == "https"
    answer.set_cookie(
        _sessions(call).cookie,
        session_id,
        max_age=int(SESSION_SECONDS),
        path="/",
        httponly=True,
        samesite="strict",
        secure=is_secure,
    )
    return answer


async def _delay_wrong_token(wrong: WrongTokens) -> None:
    seconds = wrong.start_attempt()
    if seconds is None:
        raise Unreachable("too many wrong tokens were shown; wait a minute and try again")
    try:
        await asyncio.sleep(seconds)
    finally:
        wrong.end_attempt()


async def _who(call: Call) -> Response:
    session_id = _sessions(call).id_in(call.request.headers.get("cookie"))
    session = None if session_id is None else _sessions(call).find(session_id)
    if session is not None:
        return json_response(_shown(session))
    return json_response({"role": "operator" if call.caller is None else call.caller.role, "csrf": None})


async def _sign_out(call: Call) -> Response:
    session_id = _sessions(call).id_in(call.request.headers.get("cookie"))
    if session_id is not None:
        await asyncio.to_thread(_sessions(call).close, session_id)
    answer = json_response({"status": "ok"})
    answer.delete_cookie(_sessions(call).cookie, path="/", httponly=True, samesite="strict")
    return answer


def _sessions(call: Call) -> Sessions:
    found: Sessions = call.request.app.state.sessions
    return found


def _shown(session: Session) -> dict[str, Any]:
    return {"role": session.role, "csrf": session.csrf}


SESSION_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST", "/v1/session", "sign_in", "Sign a browser in with a token: sets its cookie; nothing else is needed.",
        _sign_in, _SESSION, takes=only({"token": {**_TEXT, "maxLength": _LONGEST_TOKEN}}), errors=(401, 413, 503),
        open=True,
    ),
    Operation(
        "GET", "/v1/session", "session", "Who is signed in, and what its page sends as `X-Pollux-CSRF`.", _who,
        _SESSION,
    ),
    Operation("DELETE", "/v1/session", "sign_out", "Sign the browser out.", _sign_out, only({"status": _TEXT})),
)  # fmt: skip
