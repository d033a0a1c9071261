"""The operations on everything but jobs: the service itself, nodes, queues, policies, streams and shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

from starlette.responses import Response, StreamingResponse

import pollux.policies as policies
from pollux.controller import require
from pollux.controller.machine.settings import SERVICE_FIELDS
from pollux.core import Queue
from pollux.core.errors import InvalidInput
from pollux.service.auth.sessions import Sessions
from pollux.service.http.operations import (
    ANSWER_SECONDS,
    Call,
    Handler,
    Operation,
    Param,
    answer,
    answer_response,
    json_response,
    keys_of,
)
from pollux.service.http.readiness import ServiceReadiness
from pollux.service.http.routes.pages import Views
from pollux.service.http.schemas import listed, only, ref
from pollux.service.http.sse import SignIn, event_stream, resume_point
from pollux.service.settings import AtStop
from pollux.wire.codec import encode, encode_json
from pollux.wire.jobfile import is_job_name
from pollux.wire.status import QueueStatus

__all__ = ["cluster_operations"]

_TEXT, _FREE = {"type": "string"}, {"type": "object"}
_MOST_WORDS = 500
_OK = only({"status": _TEXT})
_STOPPING = only({"status": _TEXT, "seconds": {"type": "number"}})
# A proxy that buffers answers would hold back a stream.
_STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_MESSAGE = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "the revision of the fact"},
        "event": {"type": "string", "description": "the kind of fact, or `resync`"},
        "data": {"type": "string", "description": "JSON: revision, at, kind, lines"},
    },
}


async def _health(call: Call) -> Response:
    return json_response({"status": "ok"})


async def _ready(call: Call) -> Response:
    readiness: ServiceReadiness = call.request.app.state.readiness
    await readiness.check()
    return json_response({"status": "ok"})


async def _status(call: Call) -> Response:
    views: Views = call.request.app.state.views
    if views.many_watch:
        made = await views.shared("status", lambda: encode_json(call.engine.status().result(ANSWER_SECONDS)).encode())
        return Response(made, media_type="application/json")
    status = await answer(call.engine.status())
    # A thousand nodes take a while to write: others are answered meanwhile.
    return await asyncio.to_thread(json_response, status)


async def _cluster(call: Call) -> Response:
    nodes = await answer(call.engine.nodes())
    return await asyncio.to_thread(lambda: json_response({"nodes": encode(nodes)}))


async def _queues(call: Call) -> Response:
    return await answer_response(call.engine.queues(), "queues")


async def _set_queue(call: Call) -> Response:
    name, body = call.path["queue"], call.body
    if not is_job_name(name):
        raise InvalidInput(f"queue name '{name[:80]}' cannot be used; give 1 to 63 of a-z 0-9 . _ -")
    body = keys_of(body, ("weight", "gpu_quota"), '{"weight": 2, "gpu_quota": 8}')
    if not body:
        raise InvalidInput('the body is empty; give "weight", "gpu_quota" or both')
    now = next((queue for queue in await answer(call.engine.queues()) if queue.name == name), QueueStatus(name))
    weight, quota = body.get("weight", now.weight), body.get("gpu_quota", now.gpu_quota)
    _check_share(weight, quota)
    return await answer_response(call.engine.set_queue(Queue(name, float(weight), quota)))


def _check_share(weight: object, quota: object) -> None:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 1e-6 <= weight <= 1e6:
        raise InvalidInput(f"weight is {str(weight)[:80]}; give a number from 0.000001 to 1000000")
    if quota is not None and (isinstance(quota, bool) or not isinstance(quota, int) or not 0 <= quota <= 10**9):
        raise InvalidInput(f"gpu_quota is {str(quota)[:80]}; give a whole number from 0, or null for no quota")


async def _set_aside(call: Call) -> Response:
    body = keys_of(call.body, ("why",), '{"why": "its fan is broken"}')
    why = body.get("why", "")
    if not isinstance(why, str) or len(why) > _MOST_WORDS:
        raise InvalidInput(f"why is {str(why)[:80]}; give a text of at most {_MOST_WORDS} characters")
    return await answer_response(call.engine.set_node_aside(call.path["node"], why))


async def _take_back(call: Call) -> Response:
    return await answer_response(call.engine.take_node_back(call.path["node"]))


async def _policies(call: Call) -> Response:
    return json_response({"policies": [_policy(name) for name in policies.names()]})


def _policy(name: str) -> dict[str, object]:
    policy = policies.create(name)
    try:
        require(policy, SERVICE_FIELDS)
        runs = True
    except InvalidInput:
        runs = False
    return {"name": name, "summary": policies.summary(name), "needs": sorted(policy.needs), "runs_here": runs}


async def _events(call: Call) -> Response:
    after = resume_point(call.request.headers.get("last-event-id"))
    session_id = None if call.caller is None else call.caller.session_id
    sessions: Sessions = call.request.app.state.sessions
    held = None if session_id is None else SignIn(sessions, session_id)
    stream = event_stream(call.engine, after, call.query["follow"], held)
    return StreamingResponse(stream, media_type="text/event-stream", headers=_STREAM_HEADERS)


async def _history(call: Call) -> Response:
    lines = await asyncio.to_thread(call.engine.history)
    return StreamingResponse(_in_pieces(lines), media_type="application/x-ndjson")


async def _in_pieces(lines: Iterator[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(_next_piece, lines):
        yield piece


def _next_piece(lines: Iterator[bytes]) -> bytes:
    piece = bytearray()
    for line in lines:
        piece += line if line.endswith(b"\n") else line + b"\n"
        if len(piece) > 65536:
            break
    return bytes(piece)


async def _eta(call: Call) -> Response:
    return json_response(call.engine.views.etas.overall())


def _shutdown(stop: Callable[[AtStop], None]) -> Handler:
    async def handler(call: Call) -> Response:
        body = keys_of(call.body, ("jobs",), '{"jobs": "keep"}')
        if body.get("jobs", "stop") not in ("stop", "keep"):
            raise InvalidInput(f'jobs is {str(body["jobs"])[:80]}; give "stop" or "keep"')
        jobs: AtStop = body.get("jobs", "stop")
        seconds = call.engine.loop.stopping_seconds(jobs)
        stop(jobs)
        return json_response({"status": "stopping", "seconds": seconds}, 202)

    return handler


_LAST_ID = {
    "name": "Last-Event-ID",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": "^[0-9]{1,18}$"},
    "description": "go on after the message of this id",
}


def cluster_operations(stop: Callable[[AtStop], None]) -> tuple[Operation, ...]:
    """The operations; `stop` is called when somebody asks the service to end."""
    return (
        Operation(
            "GET", "/healthz", "health", "Whether the process answers; no token needed.", _health, _OK, open=True
        ),
        Operation(
            "GET", "/readyz", "ready", "Whether it takes requests; no token needed.", _ready, _OK,
            errors=(503,), open=True,
        ),
        Operation("GET", "/v1/status", "service_status", "The service about itself.", _status, ref("ServiceStatus")),
        Operation(
            "GET", "/v1/cluster", "cluster", "Nodes, and who holds what.", _cluster,
            only({"nodes": listed(ref("NodeStatus"))}),
        ),
        Operation(
            "GET", "/v1/queues", "list_queues", "Queues, their weights and quotas.", _queues,
            only({"queues": listed(ref("QueueStatus"))}),
        ),
        Operation(
            "PUT", "/v1/queues/{queue}", "set_queue", "Create a queue, or change its weight or quota; the rest stays.",
            _set_queue, ref("QueueStatus"),
            takes={
                **only({}, {
                    "weight": {"type": "number", "minimum": 1e-6, "maximum": 1e6},
                    "gpu_quota": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 10**9}, {"type": "null"}]},
                }),
                "minProperties": 1,
            },
        ),
        Operation(
            "POST", "/v1/nodes/{node}/set-aside", "set_node_aside",
            "Place nothing new on a node; what runs there stays.", _set_aside, ref("NodeStatus"),
            takes=only({}, {"why": {"type": "string", "maxLength": _MOST_WORDS}}), errors=(404, 422),
        ),
        Operation(
            "POST", "/v1/nodes/{node}/take-back", "take_node_back", "Use a node again that was set aside.",
            _take_back, ref("NodeStatus"), errors=(404, 409, 422),
        ),
        Operation(
            "GET", "/v1/policies", "list_policies", "Policies, and which of them can run a real cluster.", _policies,
            only({"policies": listed(_FREE)}),
        ),
        Operation(
            "GET", "/v1/events", "events", "Server-sent events: every fact, as it becomes durable.", _events, _MESSAGE,
            params=(Param("follow", "boolean", "false: end after what was missed", True),), headers=(_LAST_ID,),
            media="text/event-stream",
        ),
        Operation(
            "GET", "/v1/history", "history", "Everything that happened, for `pollux simulate` and `whatif`.", _history,
            _TEXT, media="application/x-ndjson", viewer=False,
        ),
        Operation("GET", "/v1/eta", "eta_quality", "How good the predicted intervals were.", _eta, _FREE),
        Operation(
            "POST", "/v1/shutdown", "shutdown", "End the service; its jobs stop with grace, or keep running.",
            _shutdown(stop), _STOPPING, 202, takes=only({}, {"jobs": {"enum": ["stop", "keep"]}}),
        ),
    )  # fmt: skip
