"""What re-allocation costs a whole workload: pauses times GPUs held, over all GPU-seconds. For `resize.py`.

The jobs of `examples/demo` under `pollux up` on CPU slots, the first of them longer, and so many that shares change
often. Every pause is the one that was measured: of a change in living processes by the backend; of a restart by the
job's agent, from the request to stop to the first step after.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

SLOTS = 4
LEAST_RESIZES = 10
# The service is on this machine: whatever proxy its user has for others is not asked.
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def measure(quick: bool) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "demo"))
    from cluster import WORKLOAD, Service, run

    first, *short = WORKLOAD
    rounds = 1 if quick else 5
    jobs = (
        replace(first, epochs=first.epochs * (1 + rounds)),
        *(
            replace(job, name=f"{job.name}-{number}", at=job.at + 30.0 * number, seed=job.seed + 10 * number)
            for number in range(rounds)
            for job in short
        ),
    )
    held: dict[tuple[str, int], int] = {}

    def look(now: float, statuses: list[dict[str, Any]]) -> None:
        held.update({(each["id"], each["generation"]): each["gpus"] for each in statuses if each["gpus"]})

    with tempfile.TemporaryDirectory(prefix="pollux-resize-") as folder, Service(Path(folder), "pollux", SLOTS) as made:
        seen = run(made, jobs, look, limit_seconds=1200.0)
        statuses = made.get("/v1/jobs?limit=100")["jobs"]
        facts = _facts(made)
    pauses = _pauses(facts, held)
    lost = sum((pause["seconds"] or 0.0) * pause["gpus"] for pause in pauses)
    total = sum(each["gpu_seconds"] for each in statuses)
    return {
        "resizes": len(pauses),
        "enough": len(pauses) >= LEAST_RESIZES,
        "live": sum(pause["kind"] != "restart" for pause in pauses),
        "not_measured": sum(pause["seconds"] is None for pause in pauses),
        "paused_gpu_seconds": round(lost, 2),
        "gpu_seconds": round(total, 1),
        "share": round(lost / total, 5) if total else None,
        "failed": [name for name, job in seen.items() if job.state != "succeeded"],
        "pauses": pauses,
    }


def _facts(service: Any) -> list[dict[str, Any]]:
    request = urllib.request.Request(f"{service.url}/v1/history", headers={"Authorization": f"Bearer {service.token}"})
    with _DIRECTLY(request, timeout=60) as response:
        lines = [json.loads(line) for line in response.read().splitlines()]
    return [line["fact"] for line in lines if "fact" in line]


def _pauses(facts: list[dict[str, Any]], held: dict[tuple[str, int], int]) -> list[dict[str, Any]]:
    """One entry for every generation of a job after its first; where its size was not seen, all slots count."""
    pauses: list[dict[str, Any]] = []
    for fact in facts:
        job_id, kind = fact.get("job_id"), fact.get("resize_kind")
        if fact["type"] == "job-running" and fact["generation"] > 1:
            gpus = held.get((str(job_id), fact["generation"]), SLOTS)
            pauses.append(
                {"job": job_id, "kind": kind or "restart", "seconds": fact.get("pause_seconds"), "gpus": gpus}
            )
        elif fact["type"] == "job-reported" and kind == "restart":
            # The newest restart of the job that nobody has told the length of yet.
            mine = [pause for pause in pauses if pause["job"] == job_id and pause["kind"] == "restart"]
            if mine and all(pause["seconds"] != fact["resize_cost_seconds"] for pause in mine):
                mine[-1]["seconds"] = fact["resize_cost_seconds"]
    return pauses
