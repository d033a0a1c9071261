"""The REST API as an ASGI application over an engine. `serve` serves it; `routes` has its operations."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from pollux.core.errors import PolluxError
from pollux.service.auth.sessions import Sessions, WrongTokens
from pollux.service.auth.tokens import Tokens
from pollux.service.clocks.job_rates import JobRates
from pollux.service.engine.engine import Engine
from pollux.service.http.foreign_reads import ForeignReads
from pollux.service.http.middleware import Guard, error_body
from pollux.service.http.openapi import STYLE, describe, page
from pollux.service.http.operations import Operation, endpoint, error_response
from pollux.service.http.readiness import ServiceReadiness
from pollux.service.http.routes.cluster import cluster_operations
from pollux.service.http.routes.jobs import OPERATIONS
from pollux.service.http.routes.pages import PAGE_OPERATIONS, Views
from pollux.service.http.routes.replays import WHATIF_OPERATIONS
from pollux.service.http.routes.sessions import SESSION_OPERATIONS
from pollux.service.http.routes.uploads import PACKAGE_OPERATIONS
from pollux.service.http.uploads import Packages
from pollux.service.http.web_files import WebFiles, add_pages
from pollux.service.replay.replays import Replays
from pollux.service.settings import AtStop

__all__ = ["create_app", "operations"]


def operations(stop: Callable[[AtStop], None] | None = None) -> tuple[Operation, ...]:
    """Every operation of the API."""
    return (
        *OPERATIONS,
        *cluster_operations(stop or (lambda jobs: None)),
        *PACKAGE_OPERATIONS,
        *PAGE_OPERATIONS,
        *SESSION_OPERATIONS,
        *WHATIF_OPERATIONS,
    )


def create_app(
    engine: Engine,
    tokens: Tokens,
    allowed_hosts: Iterable[str] = (),
    stop: Callable[[AtStop], None] | None = None,
    foreign: ForeignReads | None = None,
) -> Guard:
    """The application; `stop` is called when somebody asks the service to end, `foreign` reads what jobs wrote."""
    app = Starlette()
    sessions = Sessions(engine.store, tokens, engine.now)
    app.state.sessions, app.state.wrong_tokens = sessions, WrongTokens(engine.now)
    app.state.views = Views(engine)
    app.state.report_rates = JobRates(burst=60, refill_seconds=0.5)
    app.state.packages = Packages(engine.settings.home, lambda: _folders_in_use(engine), engine.now)
    app.state.foreign = foreign or ForeignReads()
    app.state.readiness = ServiceReadiness(engine, app.state.foreign)
    app.state.replays = replays = Replays(engine.history)
    every = operations(stop)
    by_path: dict[str, list[Operation]] = {}
    for operation in every:
        by_path.setdefault(operation.path, []).append(operation)
    for path, group in by_path.items():
        app.add_route(path, endpoint(engine, group), methods=[operation.method for operation in group])
    _describe_at(app, every)
    add_pages(app, WebFiles())
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_exception_handler(PolluxError, _refused)
    return Guard(app, tokens, allowed_hosts, sessions, replays.close, engine.refusals)


def _folders_in_use(engine: Engine) -> list[tuple[str, float]]:
    """The working folders of jobs, and until when each was used: now, if its job has not ended."""
    records = [entry.record for entry in engine.views.board.entries()]
    return [
        (record.spec.request.workdir, engine.now() if record.ended_at is None else record.ended_at)
        for record in records
        if record.spec.request is not None
    ]


def _describe_at(app: Starlette, every: Iterable[Operation]) -> None:
    @functools.cache
    def document() -> dict[str, Any]:
        # Made on request, since that takes longer than the rest of the application.
        return describe(every)

    async def schema(request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(document))

    async def docs(request: Request) -> Response:
        return HTMLResponse(await asyncio.to_thread(lambda: page(document())))

    async def style(request: Request) -> Response:
        return Response(STYLE, media_type="text/css")

    app.add_route("/openapi.json", schema, methods=["GET"])
    app.add_route("/docs.css", style, methods=["GET"])
    app.add_route("/docs", docs, methods=["GET"])


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        code, text = "MethodNotAllowed", f"{request.method} is not possible on {request.url.path[:200]}; see /docs"
    else:
        code, text = "UnknownName", f"there is nothing at {request.url.path[:200]}; see /docs for what there is"
    headers = dict(error.headers or {})
    return Response(error_body(code, text), error.status_code, headers, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    return error_response(error)
