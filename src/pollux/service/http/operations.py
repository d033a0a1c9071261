"""How a request becomes a call: operations as data, strict parameters and bodies, one shape of errors.

`routes` has the operations, `openapi` their description.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pollux.core.errors import InvalidInput, PolluxError, TooOften, Unreachable, choices
from pollux.service.auth.tokens import Caller
from pollux.service.engine.engine import Engine
from pollux.service.http.foreign_reads import ForeignReads
from pollux.service.http.middleware import check_scope, error_body
from pollux.wire.codec import decode_json, encode, encode_json

__all__ = [
    "ANSWER_SECONDS",
    "Call",
    "Handler",
    "Operation",
    "Param",
    "answer",
    "answer_response",
    "endpoint",
    "error_response",
    "foreign",
    "json_response",
    "keys_of",
]

_log = logging.getLogger("pollux.service")

ANSWER_SECONDS = 120.0
"""How long a request waits for the engine."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Param:
    """One query parameter. `choices`, if any, are its only values; numbers lie between the bounds."""

    name: str
    kind: Literal["integer", "number", "boolean", "string"]
    about: str
    default: Any = None
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    pattern: str | None = None

    def read(self, text: str) -> Any:
        """The value; InvalidInput with the parameter's name, the value seen and the remedy."""
        if self.kind == "boolean":
            if text not in ("true", "false"):
                raise InvalidInput(f"{self.name} is '{text[:80]}'; give true or false")
            return text == "true"
        if self.kind == "string":
            if self.choices and text not in self.choices:
                raise InvalidInput(f"{self.name} is '{text[:80]}': {choices(text[:80], self.choices)}")
            if self.pattern is not None and re.fullmatch(self.pattern.strip("^$"), text) is None:
                raise InvalidInput(f"{self.name} is '{text[:80]}', which cannot be one; give {self.about}")
            return text
        return self._number(text)

    def _number(self, text: str) -> float:
        value = self._parsed(text)
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        if not math.isfinite(value) or not low <= value <= high:
            span = f" from {low:g}" if self.low is not None else ""
            span += f" to {high:g}" if self.high is not None else ""
            what = "a whole number" if self.kind == "integer" else "a number"
            raise InvalidInput(f"{self.name} is '{text[:80]}'; give {what}{span}")
        return value

    def _parsed(self, text: str) -> float:
        """The text as a number; NaN if it is none. Stricter than Python, which reads `1_000` too."""
        if not text.isascii() or "_" in text or text != text.strip() or len(text) >= 40:
            return math.nan
        try:
            return int(text) if self.kind == "integer" else float(text)
        except ValueError:
            return math.nan


@dataclass(frozen=True, slots=True)
class Call:
    """One request, read: the path's parts, the query with its defaults, the body as a JSON value."""

    engine: Engine
    request: Request
    caller: Caller | None
    path: Mapping[str, str]
    query: Mapping[str, Any]
    body: Any = None

    @property
    def job_id(self) -> str:
        """The job that the path names."""
        return self.path["job_id"]


Handler = Callable[[Call], Awaitable[Response]]
"""Answers a call."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path: its handler, input and output, for routing and for the description.

    `job_token`: a job's own token allows it; `viewer`: the viewer's does. `links` are names of operations that can
    follow with the job's id.
    """

    method: str
    path: str
    name: str
    about: str
    handler: Handler
    gives: Mapping[str, Any]
    status: int = 200
    params: tuple[Param, ...] = ()
    headers: tuple[Mapping[str, Any], ...] = ()
    takes: Mapping[str, Any] | None = None
    errors: tuple[int, ...] = ()
    job_token: bool = False
    open: bool = False
    media: str = "application/json"
    viewer: bool = True
    links: tuple[str, ...] = field(default=())


def json_response(value: object, status: int = 200) -> Response:
    """A wire value, or plain JSON values, as an answer."""
    return Response(encode_json(value), status, media_type="application/json")


def error_response(error: Exception) -> Response:
    """The answer for any error; an unforeseen one is logged, and its details are not sent."""
    if isinstance(error, PolluxError):
        body = error_body(type(error).__name__, str(error), error.retryable)
        headers = {"retry-after": "1"} if isinstance(error, TooOften) else None
        return Response(body, error.http_status, headers, media_type="application/json")
    _log.error("a request failed", exc_info=error)
    body = error_body("PolluxError", "the service failed inside; its log has the details")
    return Response(body, 500, media_type="application/json")


def endpoint(engine: Engine, operations: Sequence[Operation]) -> Callable[[Request], Awaitable[Response]]:
    """The function for one path: picks the operation by method, reads the request, answers."""
    by_method = {operation.method: operation for operation in operations}

    async def answer(request: Request) -> Response:
        operation = by_method["GET" if request.method == "HEAD" else request.method]
        try:
            caller: Caller | None = request.scope.get("pollux.caller")
            path = {name: str(value) for name, value in request.path_params.items()}
            check_scope(caller, operation.job_token, path.get("job_id"), operation.viewer)
            query = _query(request, operation)
            body = None
            if operation.takes is not None:
                body = _whole_numbers(decode_json(await request.body(), "the body"))
            return await operation.handler(Call(engine, request, caller, path, query, body))
        except ClientDisconnect:
            # The client is gone, and nothing of ours has failed.
            return Response(status_code=400)
        except Exception as error:
            return error_response(error)

    return answer


def foreign(call: Call) -> ForeignReads:
    """The threads for all work on files and folders of jobs: no other part of a request does any."""
    found: ForeignReads = call.request.app.state.foreign
    return found


async def answer(future: Future[T]) -> T:
    """The engine's answer; other requests are served while this one waits."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_SECONDS)
    except TimeoutError:
        raise Unreachable(f"no answer after {ANSWER_SECONDS:g} s; try again later") from None


async def answer_response(future: Future[Any], key: str | None = None) -> Response:
    """The engine's answer as the body, or under one key of it."""
    value = await answer(future)
    return json_response(value if key is None else {key: encode(value)})


def keys_of(body: object, known: Sequence[str], example: str) -> dict[str, Any]:
    """The body of a request: an object of `known` keys only. An unknown key is named, with the closest known one."""
    if not isinstance(body, dict):
        raise InvalidInput(f"the body is no object; give one such as {example}")
    for key in body:
        if key not in known:
            raise InvalidInput(f"unknown key '{key[:80]}' in the body: {choices(key[:80], known)}")
    return body


def _whole_numbers(value: Any) -> Any:
    """JSON has one kind of number: 4.0 becomes 4. Numbers that become text for a job stay as they were written."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: item if key in ("env", "run") else _whole_numbers(item) for key, item in value.items()}
    return value


def _query(request: Request, operation: Operation) -> dict[str, Any]:
    known = {param.name: param for param in operation.params}
    found: dict[str, Any] = {name: param.default for name, param in known.items()}
    seen: set[str] = set()
    for name, text in request.query_params.multi_items():
        if name not in known:
            names = choices(name[:80], known) if known else "it takes none"
            raise InvalidInput(f"unknown query parameter '{name[:80]}': {names}")
        if name in seen:
            raise InvalidInput(f"query parameter '{name}' is there twice; give it once")
        seen.add(name)
        found[name] = known[name].read(text)
    return found
