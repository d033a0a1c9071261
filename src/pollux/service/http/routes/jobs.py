"""The operations on jobs: submitted, listed, steered, explained, reported for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace

from starlette.responses import Response

from pollux.controller import JobRecord, JobState
from pollux.controller.explanations.explain import explain_lack
from pollux.controller.explanations.forecast import lack_of
from pollux.core.errors import InvalidInput, choices
from pollux.service.http.operations import (
    Call,
    Operation,
    Param,
    answer,
    answer_response,
    foreign,
    json_response,
    keys_of,
)
from pollux.service.http.routes.pages import Views
from pollux.service.http.schemas import ID_PATTERN, NAME_PATTERN, listed, only, ref
from pollux.service.presenters.explanations import Explainer, explanation_of
from pollux.service.presenters.job_series import series_of
from pollux.service.views.estimates import explained
from pollux.wire.codec import decode, encode
from pollux.wire.job import JobRequest
from pollux.wire.jobfile import job_to_mapping, parse_job
from pollux.wire.quantities import parse_gpus
from pollux.wire.report import Report

__all__ = ["OPERATIONS"]

# Making a job's JSON takes a fraction of a millisecond: after this many, others get their turn.
_FRESH_AT_ONCE = 20
_USUAL_QUEUE = "default"


async def _request(call: Call) -> JobRequest:
    request = parse_job(call.body, None, "job")
    check = call.engine.admission.check
    await foreign(call).folders.run(f"workdir {request.workdir}", request.workdir, lambda: check(request))
    return request


async def _submit(call: Call) -> Response:
    key = call.request.headers.get("idempotency-key")
    if key is not None and not re.fullmatch(_KEY_PATTERN, key):
        raise InvalidInput(
            f"Idempotency-Key has {len(key)} characters; give 1 to 128 of ASCII that can be printed, without spaces"
        )
    request = await _request(call)
    note = await _note(call, request)
    status, plan = await answer(call.engine.submit(request, key))
    return json_response({"job": encode(status), "plan": encode(replace(plan, note=note))}, 201)


async def _plan(call: Call) -> Response:
    request = await _request(call)
    note = await _note(call, request)
    return json_response(replace(await answer(call.engine.plan(request)), note=note))


async def _note(call: Call, request: JobRequest) -> str:
    notes = (await _queue_note(call, request.queue), call.engine.admission.note_on(request))
    return "; ".join(note for note in notes if note)


async def _queue_note(call: Call, name: str) -> str:
    """A note if nobody set this queue up or uses it: its name may be a typing error. Else empty."""
    if name == _USUAL_QUEUE or call.engine.has_queue(name):
        return ""
    known = {_USUAL_QUEUE, *(queue.name for queue in await answer(call.engine.queues()))}
    return "" if name in known else f"queue '{name}' is new: weight 1, no quota; {choices(name, known)}"


async def _list(call: Call) -> Response:
    query = call.query
    views: Views = call.request.app.state.views
    call.engine.views.board.check(query["after"])
    if views.many_watch:
        body = await views.shared(tuple(query.items()), lambda: b"".join(_pieces(call)))
        return Response(body, media_type="application/json")
    found: list[bytes] = []
    for piece in _pieces(call):
        if piece:
            found.append(piece)
        else:
            await asyncio.sleep(0)
    return Response(b"".join(found), media_type="application/json")


def _pieces(call: Call) -> Iterator[bytes]:
    """A page of the list; an empty piece after so much work that others should get their turn."""
    query, fairness, explainer = call.query, call.engine.fairness(), Explainer(call.engine)
    words: list[bytes] = []
    count = fresh = 0
    last: str | None = None
    yield b'{"jobs":['
    more = False
    for entry in call.engine.views.board.entries(query["after"], query["state"], query["active"]):
        if query["queue"] is not None and entry.record.spec.queue != query["queue"]:
            continue
        if count == query["limit"]:
            more = True
            break
        fresh += not entry.rendered
        row = entry.json(fairness.now, fairness.of(entry))
        words.append(explainer.json(entry))
        yield row if count == 0 else b"," + row
        if fresh >= _FRESH_AT_ONCE:
            fresh = 0
            yield b""
        count += 1
        last = entry.record.spec.id
    yield b'],"explanations":{' + b",".join(words)
    yield b'},"next":' + (f'"{last}"' if more else "null").encode() + b"}"


async def _show(call: Call) -> Response:
    engine, job_id = call.engine, call.job_id
    request = engine.views.board.get(job_id).record.spec.request
    if request is not None and call.caller is not None and call.caller.role == "viewer":
        request = replace(request, env=dict.fromkeys(request.env, "(hidden)"))
    cost, changes = engine.views.timeline.cost_of(job_id)
    lines = [
        {"at": line.at, "kind": line.kind, "text": line.text, "jobs": list(line.jobs)}
        for line in engine.events_of(job_id)
    ]
    job = engine.job(job_id)
    return json_response(
        {
            "job": encode(job),
            "request": None if request is None else job_to_mapping(request),
            "events": lines,
            "eta_quality": engine.views.etas.quality(job_id),
            "fairness": job.fairness,
            "reallocations": {"count": changes, "gpu_seconds": cost},
        }
    )


async def _cancel(call: Call) -> Response:
    return await answer_response(call.engine.cancel(call.job_id), "job")


async def _pause(call: Call) -> Response:
    return await answer_response(call.engine.pause(call.job_id), "job")


async def _resume(call: Call) -> Response:
    return await answer_response(call.engine.resume(call.job_id), "job")


async def _resize(call: Call) -> Response:
    body = keys_of(call.body, ("gpus",), '{"gpus": "2..8"}')
    if "gpus" not in body:
        raise InvalidInput('the body has no "gpus"; give an object such as {"gpus": "2..8"}')
    low, high = parse_gpus(body["gpus"], "gpus")
    status = await answer(call.engine.resize(call.job_id, low, high))
    entry = call.engine.views.board.get(call.job_id)
    lack = None if entry.around is None else lack_of(entry.record, entry.around)
    notes = ("" if lack is None else explain_lack(lack), _pinned_note(entry.record, low, high))
    return json_response({"job": encode(status), "note": "; ".join(note for note in notes if note)})


def _pinned_note(record: JobRecord, low: int, high: int) -> str:
    """A note that a rigid job cannot be resized; empty for other jobs, and if it has the GPUs that are asked for."""
    held, name = record.placement.num_gpus, record.spec.id
    if not record.spec.limits.pinned or held == 0 or low == high == held:
        return ""
    return (
        f"it is rigid and keeps its {held} GPU{'s' * (held != 1)} as long as it runs; "
        f"the new limits count from its next start, as after 'pollux pause {name}' and 'pollux resume {name}'"
    )


async def _explain(call: Call) -> Response:
    entry = call.engine.views.board.get(call.job_id)
    found = explanation_of(entry, call.engine.leaving_before(call.job_id), call.engine.views.board)
    reason = explained(entry.record)
    return json_response({"job_id": call.job_id, **encode(found), "reason": None if reason is None else encode(reason)})


async def _logs(call: Call) -> Response:
    query, job_id = call.query, call.job_id
    chunk = await foreign(call).home.run(
        f"the log of job '{job_id}'",
        job_id,
        lambda: call.engine.logs(job_id, query["replica"], query["offset"], query["limit"]),
    )
    return json_response({"text": chunk.text, "offset": chunk.offset, "at_end": chunk.at_end})


async def _series(call: Call) -> Response:
    query = call.query
    # Thousands of rows take a while to write as well.
    return await asyncio.to_thread(
        lambda: json_response(
            {"rows": series_of(call.engine, call.job_id, query["kind"], query["since"], query["limit"])}
        )
    )


async def _report(call: Call) -> Response:
    report = decode(Report, call.body, "report")
    return await answer_response(call.engine.report(call.job_id, report))


_JOB = only({"job": ref("JobStatus")})
_TEXT, _NULL = {"type": "string"}, {"type": "null"}
_FREE = {"type": "object"}
_WORDS = only({"text": _TEXT, "jobs": listed(_TEXT)})
_KEY_PATTERN = "^[!-~]{1,128}$"
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": _KEY_PATTERN},
    "description": "the same key with the same job is taken once, however often it is sent",
}
_AFTER_SUBMIT = (
    "show_job", "cancel_job", "pause_job", "resume_job", "resize_job", "explain_job", "job_logs", "job_series",
    "report",
)  # fmt: skip

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST", "/v1/jobs", "submit_job", "Submit a job: the job file as JSON, with an absolute `workdir`.", _submit,
        only({"job": ref("JobStatus"), "plan": ref("Plan")}), 201, headers=(_KEY,), takes=ref("JobFile"),
        errors=(404, 409, 422, 503), links=_AFTER_SUBMIT,
    ),
    Operation(
        "GET", "/v1/jobs", "list_jobs", "Jobs in order of submission, page by page, each explained in words.",
        _list,
        only({
            "jobs": listed(ref("JobStatus")), "explanations": {"type": "object", "additionalProperties": _WORDS},
            "next": {"anyOf": [_TEXT, _NULL]},
        }),
        params=(
            Param("state", "string", "only jobs in this state", choices=tuple(str(state) for state in JobState)),
            Param("queue", "string", "the name of a queue: only its jobs", pattern=NAME_PATTERN),
            Param("active", "boolean", "true: only jobs that have not ended; false: only those that have"),
            Param("limit", "integer", "how many at most", 100, 1, 1000),
            Param("after", "string", "the id of the last job of the page before", pattern=ID_PATTERN),
        ),
        errors=(404, 422),
    ),
    Operation(
        "POST", "/v1/plan", "plan_job", "What would happen to a job if it were submitted now; nothing changes.", _plan,
        ref("Plan"), takes=ref("JobFile"), errors=(404, 409, 422, 503),
    ),
    Operation(
        "GET", "/v1/jobs/{job_id}", "show_job", "Everything about one job.", _show,
        only({
            "job": ref("JobStatus"), "request": {"anyOf": [_FREE, _NULL]}, "eta_quality": _FREE,
            "events": listed(only({"at": {"type": "number"}, "kind": _TEXT, "text": _TEXT, "jobs": listed(_TEXT)})),
            "fairness": {"anyOf": [{"type": "number"}, _NULL]},
            "reallocations": only({"count": {"type": "integer"}, "gpu_seconds": {"type": "number"}}),
        }),
        errors=(404, 422), job_token=True,
    ),
    Operation(
        "POST", "/v1/jobs/{job_id}/cancel", "cancel_job", "End a job for good.", _cancel, _JOB, errors=(404, 409, 422)
    ),
    Operation(
        "POST", "/v1/jobs/{job_id}/pause", "pause_job", "Take its GPUs away until it is resumed.", _pause, _JOB,
        errors=(404, 409, 422),
    ),
    Operation(
        "POST", "/v1/jobs/{job_id}/resume", "resume_job", "Let a paused job run again.", _resume, _JOB,
        errors=(404, 409, 422),
    ),
    Operation(
        "POST", "/v1/jobs/{job_id}/resize", "resize_job", "Change how many GPUs it may hold.", _resize,
        only({"job": ref("JobStatus"), "note": _TEXT}),
        takes=only({"gpus": ref("Gpus")}), errors=(404, 409, 422),
    ),
    Operation(
        "GET", "/v1/jobs/{job_id}/explain", "explain_job", "Why it has what it has, and one next step.", _explain,
        only({
            "job_id": _TEXT, "text": _TEXT, "next_step": _TEXT, "jobs": listed(_TEXT),
            "reason": {"anyOf": [ref("ReasonStatus"), _NULL]},
        }),
        errors=(404, 422),
    ),
    Operation(
        "GET", "/v1/jobs/{job_id}/logs", "job_logs", "A piece of a replica's log, over all generations.", _logs,
        only({"text": _TEXT, "offset": {"type": "integer"}, "at_end": {"type": "boolean"}}),
        params=(
            Param("replica", "integer", "which replica", 0, 0, 100_000),
            Param("offset", "integer", "where to begin; negative: from the end", 0, -(2**53), 2**53),
            Param("limit", "integer", "how many bytes at most", 65536, 1, 1_048_576),
        ),
        errors=(404, 409, 422, 503),
    ),
    Operation(
        "GET", "/v1/jobs/{job_id}/series", "job_series", "Measurements over time, evenly thinned.", _series,
        only({"rows": listed(only({"at": {"type": "number"}, "values": _FREE}))}),
        params=(
            Param("kind", "string", "what was measured", "report", choices=("report", "eta", "decision")),
            Param("since", "number", "seconds since 1970", 0.0, 0.0, 1e12),
            Param("limit", "integer", "how many at most", 2000, 1, 2000),
        ),
        errors=(404, 422),
    ),
    Operation(
        "POST", "/v1/jobs/{job_id}/reports", "report", "What a job's agent has to tell; durable before the reply.",
        _report, ref("ReportReply"), takes=ref("Report"), errors=(404, 409, 422), job_token=True,
    ),
)  # fmt: skip
