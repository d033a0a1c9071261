"""The REST API as an ASGI application over an engine. Serving it is in `server`, what it does in the routes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse

from pollux.core.errors import PolluxError
from pollux.service.cluster_routes import cluster_operations
from pollux.service.engine import Engine
from pollux.service.guard import Guard, error_body
from pollux.service.job_routes import OPERATIONS
from pollux.service.openapi import describe, page
from pollux.service.routing import Operation, endpoint, error_response
from pollux.service.settings import AtStop
from pollux.service.tokens import Tokens

__all__ = ["create_app", "operations"]


def operations(stop: Callable[[AtStop], None] | None = None) -> tuple[Operation, ...]:
    """Every operation of the API."""
    return (*OPERATIONS, *cluster_operations(stop or (lambda jobs: None)))


def create_app(
    engine: Engine,
    tokens: Tokens,
    allowed_hosts: Iterable[str] = (),
    stop: Callable[[AtStop], None] | None = None,
) -> Guard:
    """The application; `stop` is called when somebody asks the service to end."""
    app = FastAPI(title="Pollux", openapi_url=None, docs_url=None, redoc_url=None)
    every = operations(stop)
    document = describe(every)
    by_path: dict[str, list[Operation]] = {}
    for operation in every:
        by_path.setdefault(operation.path, []).append(operation)
    for path, group in by_path.items():
        app.add_route(path, endpoint(engine, group), methods=[operation.method for operation in group])
    _describe_at(app, document)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_exception_handler(PolluxError, _refused)
    return Guard(app, tokens, allowed_hosts)


def _describe_at(app: FastAPI, document: dict[str, Any]) -> None:
    text = page(document)

    async def schema(request: Request) -> Response:
        return JSONResponse(document)

    async def docs(request: Request) -> Response:
        return HTMLResponse(text)

    app.add_route("/openapi.json", schema, methods=["GET"])
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
