"""The operations of a replay: begin one, see how far it is, end it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.responses import Response

import pollux.policies as policies
from pollux.core.errors import InvalidInput, UnknownName
from pollux.service.http.operations import Call, Operation, json_response
from pollux.service.http.schemas import listed, only
from pollux.service.replay.replays import MOST_CHOICES, Replay, Replays

__all__ = ["WHATIF_OPERATIONS"]

_NODES = r"[+-]?[1-9][0-9]{0,4}"


async def _begin(call: Call) -> Response:
    body = call.body
    if not isinstance(body, dict) or not set(body) <= {"policies", "nodes"}:
        raise InvalidInput('the body must be an object with "policies", "nodes" or both')
    chosen = _words(body.get("policies", ["castor"]), "policies", "the names of policies")
    for name in chosen:
        if name not in policies.names():
            raise UnknownName("policy", name[:80], policies.names())
    if not chosen:
        raise InvalidInput("policies is empty; give at least one, or leave it out")
    nodes = _words(body.get("nodes", []), "nodes", "sizes such as +2, -1 or 6")
    for word in nodes:
        if re.fullmatch(_NODES, word) is None:
            raise InvalidInput(f"nodes has '{word[:80]}'; give sizes such as +2, -1 or 6")
    return json_response({"id": _replays(call).start(chosen, nodes).id}, 202)


def _words(value: Any, name: str, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value) or len(value) > MOST_CHOICES:
        raise InvalidInput(f"{name} must be a list of at most {MOST_CHOICES} texts: {what}")
    return list(dict.fromkeys(value))


async def _list(call: Call) -> Response:
    return json_response({"replays": [replay.summary() for replay in _replays(call).all()]})


async def _show(call: Call) -> Response:
    return _shown(_replays(call).get(call.path["replay_id"]))


async def _cancel(call: Call) -> Response:
    return _shown(await asyncio.to_thread(_replays(call).cancel, call.path["replay_id"]))


def _shown(replay: Replay) -> Response:
    return Response(replay.to_json(), media_type="application/json")


def _replays(call: Call) -> Replays:
    found: Replays = call.request.app.state.replays
    return found


_TEXT = {"type": "string"}
_BRIEF = {
    "id": _TEXT, "state": {"enum": ["running", "done", "failed", "cancelled"]},
    "progress": {"type": "number", "minimum": 0, "maximum": 1}, "detail": _TEXT,
    "policies": listed(_TEXT), "nodes": listed(_TEXT),
}  # fmt: skip
_REPLAY = only({**_BRIEF, "result": {"anyOf": [{"type": "object"}, {"type": "null"}]}})


def _list_of(item: dict[str, Any], least: int) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": least, "maxItems": MOST_CHOICES}


WHATIF_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST", "/v1/whatif", "begin_replay", "Replay this cluster's history under other policies and sizes.", _begin,
        only({"id": _TEXT}), 202,
        takes=only({}, {
            "policies": _list_of({"enum": list(policies.names())}, 1),
            "nodes": _list_of({**_TEXT, "pattern": f"^{_NODES}$"}, 0),
        }),
        errors=(404, 409),
    ),
    Operation(
        "GET", "/v1/whatif", "list_replays", "The last few replays, the newest first, without what they came to.",
        _list, only({"replays": listed(only(_BRIEF))}),
    ),
    Operation(
        "GET", "/v1/whatif/{replay_id}", "show_replay", "How far a replay is, and what it came to.", _show, _REPLAY,
        errors=(404,),
    ),
    Operation(
        "POST", "/v1/whatif/{replay_id}/cancel", "cancel_replay", "End a replay that is under way.", _cancel, _REPLAY,
        errors=(404,),
    ),
)  # fmt: skip
