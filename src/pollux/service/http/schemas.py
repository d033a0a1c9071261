"""The shapes of bodies as JSON Schema: made from the dataclasses for wire values, written out for the job file."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from pollux.controller.state.costs import LIVE_KINDS, RESTART
from pollux.storage.address import PACKAGES
from pollux.wire.report import (
    LARGEST_BATCH,
    LARGEST_NUMBER,
    LARGEST_SECONDS,
    MOST_ERROR_CHARACTERS,
    MOST_METRIC_LETTERS,
    MOST_METRICS,
    SMALLEST_NUMBER,
    Report,
    ReportReply,
)
from pollux.wire.status import Eta, JobStatus, NodeStatus, Plan, QueueStatus, ReasonStatus, ServiceStatus

__all__ = ["COMPONENTS", "ID_PATTERN", "NAME_PATTERN", "components", "listed", "only", "ref"]

NAME_PATTERN = "^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"
ID_PATTERN = "^[a-z0-9]([a-z0-9._-]{0,70}[a-z0-9])?$"

_PLAIN_TEXT = {"type": "string", "pattern": "^[^\\x00]*$"}
_BATCH = {"type": "integer", "minimum": 1, "maximum": 10**9}
_LONGEST_SECONDS = 3650 * 86400
_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*"


def ref(name: str) -> dict[str, Any]:
    """A reference to a component."""
    return {"$ref": f"#/components/schemas/{name}"}


def listed(item: Mapping[str, Any]) -> dict[str, Any]:
    """A list of such items."""
    return {"type": "array", "items": dict(item)}


def only(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """An object of exactly these keys."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def _one_or_more(pattern: str) -> dict[str, Any]:
    one = {"type": "string", "pattern": pattern}
    return {"anyOf": [one, listed(one) | {"uniqueItems": True}]}


_DURATION = "seconds, or a time such as 90s, 10min, 24h or 1h30min"
_SECONDS = {
    "anyOf": [
        {"type": "number", "minimum": 1, "maximum": _LONGEST_SECONDS},
        {"type": "string", "pattern": r"^[1-9][0-9]{0,2}(s|sec|m|min|h|d)?$"},
    ],
    "description": _DURATION,
}
_GRACE = {
    "anyOf": [
        {"type": "number", "minimum": 0, "maximum": 3600},
        {"type": "string", "pattern": "^(0|[1-9][0-9]{0,2})(s|sec)?$"},
    ],
    "description": f"{_DURATION}, at most an hour",
}

_GPUS = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": 100_000},
        {"type": "string", "pattern": r"^[1-9](\.\.[1-9][0-9]{1,3})?$"},
    ],
    "description": "a number such as 4, or a range such as 1..16",
}

_JOB_FILE = only(
    {
        "run": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"anyOf": [_PLAIN_TEXT, {"type": ["number", "boolean"]}]}, "minItems": 1},
            ],
            "description": "the command: one string, or a list of its words",
        },
        "workdir": {"type": "string", "pattern": "^/", "description": "an absolute folder that is there"},
    },
    {
        "name": {"type": "string", "pattern": NAME_PATTERN, "description": "made from the command where missing"},
        "gpus": _GPUS,
        "batch_size": {
            "anyOf": [_BATCH, only({}, {"initial": _BATCH, "max": _BATCH, "per_gpu_max": _BATCH})],
            "description": "samples; initial may not be above max",
        },
        "resources": only(
            {},
            {
                "cpus": {"type": "number", "minimum": 0, "maximum": 100_000},
                "memory": {
                    "anyOf": [
                        {"type": "number", "minimum": 0, "maximum": 10**18 - 1},
                        {"type": "string", "pattern": "^[1-9][0-9]{0,2}(GiB|MB)$"},
                    ]
                },
                "gpu_type": _one_or_more("^[A-Za-z0-9]{1,63}$"),
                "mixed_types": {"type": "boolean"},
            },
        ),
        "env": {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z_][a-z0-9_]{0,63}$"},
            "additionalProperties": {"anyOf": [_PLAIN_TEXT, {"type": ["number", "boolean"]}]},
        },
        "priority": {"enum": ["low", "normal", "high"]},
        "queue": {"type": "string", "pattern": NAME_PATTERN},
        "preemptible": {"type": "boolean"},
        "after": _one_or_more(ID_PATTERN),
        "time_limit": _SECONDS,
        "group": {"type": "string", "pattern": NAME_PATTERN, "description": "jobs of one group are one claimant"},
        "deadline": {
            "type": "number",
            "exclusiveMinimum": 0,
            "exclusiveMaximum": 1e11,
            "description": "when it should have ended: seconds since 1970, or a date and time with its zone",
        },
        "retries": {"type": "integer", "minimum": 0, "maximum": 100},
        "grace": _GRACE,
        "on_resize": {"enum": ["live", "restart", "never"]},
        "checkpoint": only(
            {},
            {
                "dir": {
                    "anyOf": [
                        {"type": "string", "pattern": rf"^(?!{_SCHEME}://)[^\x00]*[^\x00\s][^\x00]*$"},
                        {
                            "type": "string",
                            "pattern": rf"^({'|'.join(PACKAGES)})://[A-Za-z0-9._-]+(/[A-Za-z0-9_-][A-Za-z0-9._-]*){{1,9}}$",
                        },
                    ],
                    "description": "a folder, or the address of a store such as s3://bucket/path",
                },
                "every": _SECONDS,
                "keep": {"type": "integer", "minimum": 1, "maximum": 1000},
            },
        ),
    },
)

_ERROR = only(
    {"error": only({"code": {"type": "string"}, "message": {"type": "string"}, "retryable": {"type": "boolean"}})}
)

COMPONENTS: tuple[type, ...] = (Eta, ReasonStatus, JobStatus, Plan, NodeStatus, QueueStatus, ServiceStatus, ReportReply)
"""Wire values that answers are made of."""


def components() -> dict[str, Any]:
    """All named shapes."""
    found: dict[str, Any] = {"Error": _ERROR, "JobFile": _JOB_FILE, "Gpus": _GPUS}
    for kind in (*COMPONENTS, Report):
        schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
        found.update(schema.pop("$defs", {}))
        found[kind.__name__] = schema
    for name in ("Report", "ModelReport", "NoiseReport"):
        found[name] = _strict(found[name])
    for name in ("Report", "NoiseReport"):
        for value in found[name]["properties"].values():
            for part in (value, *value.get("anyOf", ())):
                if part.get("type") == "number" and "maximum" in part:
                    part["anyOf"] = _NOT_TINY
    found["Report"]["properties"]["version"] = {"const": 1}
    found["Report"]["properties"]["resize_kind"]["enum"] = ["", RESTART, *LIVE_KINDS]
    found["Report"]["properties"]["checkpoint_error"]["maxLength"] = MOST_ERROR_CHARACTERS
    metrics = {"maxProperties": MOST_METRICS, "propertyNames": {"type": "string", "maxLength": MOST_METRIC_LETTERS}}
    found["Report"]["properties"]["metrics"] |= metrics
    model = found["ModelReport"]["properties"]
    seconds = {"type": "number", "minimum": 0, "maximum": LARGEST_SECONDS}
    model["parameters"] |= {"minItems": 7, "maxItems": 7, "items": seconds}
    for name in ("initial_batch", "max_batch", "local_batch_min", "local_batch_max"):
        model[name] |= {"minimum": 1, "maximum": LARGEST_BATCH}
    return found


# No training has numbers so small, and their products would be 0.
_NOT_TINY = [{"const": 0}, {"minimum": SMALLEST_NUMBER}, {"maximum": -SMALLEST_NUMBER}]


def _strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Strict schema: no other keys, whole numbers of 64 bits, counts and times not below zero, no number too large."""
    strict = copy.deepcopy(dict(schema))
    strict["additionalProperties"] = False
    for name, value in strict["properties"].items():
        for part in (value, *value.get("anyOf", ())):
            if part.get("type") == "integer":
                part |= {"minimum": 0, "maximum": 2**63 - 1}
            elif part.get("type") == "number" and name != "loss":
                least = 0 if name in ("progress", "total_progress", "resize_seconds") else -LARGEST_NUMBER
                part |= {"minimum": least, "maximum": LARGEST_NUMBER}
    return strict
