"""The operations behind pages and dashboards: the cluster over time and in numbers, a job's speed-up and receipt."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

from starlette.responses import Response

from pollux.service.engine.engine import Engine
from pollux.service.http.operations import Call, Operation, Param, foreign
from pollux.service.http.schemas import listed, only
from pollux.service.http.shared_cache import SharedCache
from pollux.service.presenters.cluster_summary import summary_of
from pollux.service.presenters.metrics import families
from pollux.service.presenters.prometheus_text import CONTENT_TYPE, text_of
from pollux.service.presenters.receipts import receipt_of
from pollux.service.presenters.timeline import MOST_JOBS, view_of
from pollux.service.views.goodput_curves import points_of

__all__ = ["PAGE_OPERATIONS", "Views"]

_DAY = 86400.0
_LONGEST = 90 * _DAY
_KEPT_SECONDS = 2.0
# For a few watchers each answer is made for the request; for more, one answer serves all and may be this old.
_FEW_WATCHERS = 8
_SHARED_SECONDS = 1.0


class Views:
    """Answers that the pages of many people request repeatedly, made once for all."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept = SharedCache(_KEPT_SECONDS)
        self._shared = SharedCache(_SHARED_SECONDS)
        self._lock = threading.Lock()
        self._summed: tuple[float, dict[str, Any]] | None = None

    async def timeline(self, since: float | None, until: float | None, limit: int) -> bytes:
        """The timeline of a window, at most 90 days; by default the last one."""
        now = self._engine.now()
        end = now if until is None else until
        begin = min(max(end - _DAY if since is None else since, end - _LONGEST), end)
        timeline = self._engine.views.timeline
        make = lambda: _json(view_of(timeline.changes(), begin, end, limit))  # noqa: E731
        # People who look at the same hours ask some seconds apart; a difference of a thousandth is invisible.
        grid = 2 ** max(round(math.log2(max(end - begin, 1.0) / 1000.0)), 0)
        key = ("timeline", round(begin / grid), round(end / grid), grid, limit)
        return await self._kept.get(key, make)

    @property
    def many_watch(self) -> bool:
        """Whether so many follow the events that they share the answers they read after each event."""
        return self._engine.views.feed.num_listeners > _FEW_WATCHERS

    async def shared(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """An answer that is a second old at most, for when many watch; `make` is called in a thread."""
        return await self._shared.get(key, make)

    async def summary(self) -> bytes:
        """The cluster in a few numbers."""
        return await self._kept.get("summary", lambda: _json(self._summary()))

    async def metrics(self) -> bytes:
        """All numbers for Prometheus."""
        return await self._kept.get("metrics", lambda: text_of(families(self._engine, self._summary())))

    def _summary(self) -> dict[str, Any]:
        """Made by one thread for all; the page and Prometheus see the same."""
        with self._lock:
            if self._summed is None or time.monotonic() - self._summed[0] > _KEPT_SECONDS:
                engine = self._engine
                views, cluster = engine.views, engine.cluster
                alarms = engine.backend.false_alarms
                found = summary_of(views.board, views.timeline, cluster, engine.now(), alarms)
                found["watchers"] = engine.views.feed.num_listeners
                self._summed = time.monotonic(), found
            return self._summed[1]


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _answer(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def _timeline(call: Call) -> Response:
    query = call.query
    views: Views = call.request.app.state.views
    return _answer(await views.timeline(query["since"], query["until"], query["limit"]))


async def _summary(call: Call) -> Response:
    views: Views = call.request.app.state.views
    return _answer(await views.summary())


async def _metrics(call: Call) -> Response:
    views: Views = call.request.app.state.views
    return Response(await views.metrics(), headers={"content-type": CONTENT_TYPE})


async def _speedup(call: Call) -> Response:
    record = call.engine.views.board.get(call.job_id).record
    points = await asyncio.to_thread(points_of, record, call.engine.cluster)
    return _answer(_json({"points": points, "current": record.placement.num_gpus}))


async def _receipt(call: Call) -> Response:
    call.engine.views.board.get(call.job_id)
    home, job_id = call.engine.settings.home, call.job_id
    found = await foreign(call).home.run(f"the receipt of job '{job_id}'", job_id, lambda: receipt_of(home, job_id))
    return _answer(b'{"receipt":' + (b"null" if found is None else found) + b"}")


_TEXT, _NUMBER, _COUNT = {"type": "string"}, {"type": "number"}, {"type": "integer"}
_FREE = {"type": "object"}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_PAIRS = listed(listed(_NUMBER))
_TIMELINE = only({
    "since": _NUMBER, "until": _NUMBER, "num_jobs": _COUNT, "capacity": _PAIRS,
    "jobs": listed(only({"id": _or_null(_TEXT), "name": _TEXT, "gpu_seconds": _NUMBER, "intervals": _PAIRS})),
    "reallocations": listed(only({"at": _NUMBER, "job": _TEXT, "from": _COUNT, "to": _COUNT, "reason": _TEXT})),
})  # fmt: skip
_SUMMARY = only({
    "now": _NUMBER,
    "gpus": only({"total": _COUNT, "used": _COUNT, "utilisation": _or_null(_NUMBER)}),
    "jobs_by_state": {"type": "object", "additionalProperties": _COUNT},
    "goodput": only({
        "now": _NUMBER, "static": _NUMBER, "ratio": _or_null(_NUMBER), "jobs": _COUNT, "static_jobs": _COUNT,
        "unknown_jobs": _COUNT,
    }),
    "fairness": only({
        "jobs": listed(only({"job": _TEXT, "rho": _NUMBER})), "num_jobs": _COUNT, "median": _or_null(_NUMBER),
        "worst": _or_null(_NUMBER), "unfair_share": _or_null(_NUMBER),
    }),
    "reallocations": only({"count": _COUNT, "gpu_seconds": _NUMBER, "share": _or_null(_NUMBER)}),
    "false_alarms": _or_null(_COUNT), "watchers": _COUNT,
})  # fmt: skip
_POINT = only({"gpus": _COUNT, "goodput": _NUMBER, "speedup": _NUMBER, "batch_size": _or_null(_COUNT)})

PAGE_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "GET", "/v1/timeline", "timeline", "Who held how many GPUs when: the jobs with most GPU-time, the rest as one.",
        _timeline, _TIMELINE,
        params=(
            Param("since", "number", "seconds since 1970; a day before `until` where missing", None, 0.0, 1e12),
            Param("until", "number", "seconds since 1970; now where missing", None, 0.0, 1e12),
            Param("limit", "integer", "how many jobs are told apart at most", 50, 1, MOST_JOBS),
        ),
        errors=(422,),
    ),
    Operation(
        "GET", "/v1/summary", "summary", "The cluster in a few numbers: use, goodput, fairness, cost of changes.",
        _summary, _SUMMARY,
    ),
    Operation(
        "GET", "/metrics", "metrics", "Numbers for Prometheus; the viewer's token is enough.", _metrics, _TEXT,
        media="text/plain",
    ),
    Operation(
        "GET", "/v1/jobs/{job_id}/speedup", "job_speedup", "What its model says of other numbers of GPUs.", _speedup,
        only({"points": _or_null(listed(_POINT)), "current": _COUNT}), errors=(404, 422),
    ),
    Operation(
        "GET", "/v1/jobs/{job_id}/receipt", "job_receipt", "What adaptation did to its training; null before it ends.",
        _receipt, only({"receipt": _or_null(_FREE)}), errors=(404, 409, 413, 422, 503),
    ),
)  # fmt: skip
