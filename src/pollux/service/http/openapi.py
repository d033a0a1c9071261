"""The API's description: an OpenAPI document made from the operations, and a page that loads nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

from pollux.core.version import __version__
from pollux.service.http.operations import Operation, Param
from pollux.service.http.schemas import ID_PATTERN, NAME_PATTERN, components, ref

__all__ = ["STYLE", "describe", "page"]

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;"
    "color-scheme:light dark}table{border-collapse:collapse}td,th{border-bottom:1px solid #8884;"
    "padding:.3rem .6rem;text-align:left;vertical-align:top}td:nth-child(2){font-family:monospace}"
)
"""The style of the API's page; a file of its own, since nothing inline is allowed."""

_REASONS = {
    401: "no token, or one that is not known",
    403: "a token that may not do this, or a host name that is not answered for",
    404: "not there",
    405: "the path does not have this method",
    409: "it clashes with what is there",
    413: "more than 1 MiB",
    429: "too many reports of one job; `retry-after` has the seconds to wait",
    422: "something in the request cannot be used",
    500: "a mistake of ours",
    503: "something that is needed does not answer",
    507: "a fact could not be written; nothing of it is in force",
}


def describe(operations: Iterable[Operation]) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pollux", "version": __version__, "description": "Scheduler service of Pollux."},
        "paths": paths,
        "components": {
            "schemas": components(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    good: dict[str, Any] = {
        "description": "done",
        "content": {operation.media: {"schema": dict(operation.gives)}},
    }
    if operation.links:
        good["links"] = {
            name: {"operationId": name, "parameters": {"job_id": "$response.body#/job/id"}} for name in operation.links
        }
    found: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.about,
        "parameters": [*_path_parameters(operation.path), *map(_parameter, operation.params), *operation.headers],
        "responses": {str(operation.status): good, **{str(code): _error(code) for code in _codes(operation)}},
        "security": [] if operation.open else [{"token": []}],
    }
    if operation.takes is not None:
        content = {"application/json": {"schema": dict(operation.takes)}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _codes(operation: Operation) -> list[int]:
    always = {403, 405, 422, 500} if operation.open else {401, 403, 405, 413, 422, 500, 503}
    return sorted(always | set(operation.errors) | ({507} if operation.method != "GET" else set()))


def _error(code: int) -> dict[str, Any]:
    return {"description": _REASONS[code], "content": {"application/json": {"schema": ref("Error")}}}


def _path_parameters(path: str) -> list[dict[str, Any]]:
    shapes: dict[str, dict[str, Any]] = {
        "job_id": {"pattern": ID_PATTERN},
        "queue": {"pattern": NAME_PATTERN},
        "node": {"minLength": 1},
        "replay_id": {"pattern": "^[0-9a-f]{1,32}$"},
    }
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", **shape}}
        for name, shape in shapes.items()
        if f"{{{name}}}" in path
    ]


def _parameter(param: Param) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": param.kind}
    for key, value in (("minimum", param.low), ("maximum", param.high), ("pattern", param.pattern)):
        if value is not None:
            schema[key] = value
    if param.choices:
        schema["enum"] = list(param.choices)
    if param.default is not None:
        schema["default"] = param.default
    return {"name": param.name, "in": "query", "required": False, "schema": schema, "description": param.about}


def page(document: Mapping[str, Any]) -> str:
    """The document as one plain page."""
    rows = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            names = ", ".join(str(each["name"]) for each in operation["parameters"])
            cells = (method.upper(), path, operation["summary"], names, ", ".join(operation["responses"]))
            rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("method", "path", "what it does", "parameters", "answers"))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Pollux API</title>'
        '<link rel="stylesheet" href="/docs.css">'
        f"<h1>Pollux API {html.escape(str(document['info']['version']))}</h1>"
        '<p>The whole description, with the shapes of bodies, is in <a href="/openapi.json">openapi.json</a>.</p>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></html>"
    )
