"""The cluster in a few numbers: use, goodput relative to a static allocation, fairness, cost of re-allocations.

It reads entries of the job board, so any thread may call it. Goodputs come from the policy's models.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pollux.controller import HOLDING, JobRecord
from pollux.core import Cluster
from pollux.service.views.fairness import Fairness
from pollux.service.views.goodput_curves import largest_nodes, packed, placed, static_model, suitable
from pollux.service.views.job_board import JobBoard, JobEntry
from pollux.service.views.timeline import Timeline

__all__ = ["goodputs", "summary_of", "unfairness"]

_SHOWN = 50


def summary_of(
    board: JobBoard, timeline: Timeline, cluster: Cluster, now: float, false_alarms: int | None = None
) -> dict[str, Any]:
    """The whole summary; unknown numbers are None."""
    entries = list(board.entries())
    active = [entry for entry in entries if not entry.ended]
    states: dict[str, int] = {}
    for entry in entries:
        states[str(entry.record.state)] = states.get(str(entry.record.state), 0) + 1
    used = sum(entry.record.placement.num_gpus for entry in active if entry.record.state in HOLDING)
    total = cluster.num_gpus
    spent = board.forgotten_gpu_seconds + sum(entry.record.attained(now) for entry in entries)
    cost = timeline.reallocation_cost
    return {
        "now": now,
        "gpus": {"total": total, "used": used, "utilisation": used / total if total else None},
        "jobs_by_state": states,
        "goodput": goodputs(active, cluster),
        "fairness": unfairness(active, Fairness(cluster, len(active), now)),
        "reallocations": {
            "count": timeline.num_reallocations,
            "gpu_seconds": cost,
            "share": min(cost / spent, 1.0) if spent > 0.0 else None,
        },
        "false_alarms": false_alarms,
    }


def goodputs(active: Sequence[JobEntry], cluster: Cluster) -> dict[str, Any]:
    """The present goodput, and that of a static allocation of the same jobs, models and GPUs.

    Static: in order of submission each job gets the GPUs that a policy of fixed sizes would give it, while they last,
    and keeps its initial batch. Samples of different jobs cannot be added, so each job's goodput counts in units of its
    own on the fewest GPUs it can run on with its initial batch; `ratio` = Σ now / Σ static. Jobs without a model count
    on neither side.
    """
    now = static = 0.0
    num_now = num_static = unknown = 0
    free, nodes = cluster.num_gpus, largest_nodes(cluster)
    for entry in active:
        record = entry.record
        relative = entry.work_out("relative goodput", partial(_relative_goodput, record, cluster, nodes))
        if relative is None:
            unknown += 1
            continue
        rate, fixed = relative
        if rate is not None:
            now += rate
            num_now += 1
        size = _static_size(record, cluster)
        if record.is_ready and 0 < size <= free:
            free -= size
            static += fixed
            num_static += 1
    return {
        "now": now,
        "static": static,
        "ratio": now / static if static > 0.0 else None,
        "jobs": num_now,
        "static_jobs": num_static,
        "unknown_jobs": unknown,
    }


def _static_size(record: JobRecord, cluster: Cluster) -> int:
    return min(record.spec.requested_gpus, cluster.num_gpus)


def _relative_goodput(
    record: JobRecord, cluster: Cluster, nodes: Mapping[str, int]
) -> tuple[float | None, float] | None:
    """Goodput now and under the static allocation, in the job's own unit; None without a model."""
    if record.goodput is None:
        return None
    largest = suitable(nodes, record.spec.limits)
    plain = static_model(record.goodput)
    unit = packed(plain, record.spec.limits.min_gpus, largest)
    if unit <= 0.0:
        return None
    rate, size = placed(record, cluster), _static_size(record, cluster)
    fixed = packed(plain, size, largest) / unit if size > 0 else 0.0
    now = None if rate is None else rate / unit
    return (now, fixed) if math.isfinite(fixed) and (now is None or math.isfinite(now)) else None


def unfairness(active: Sequence[JobEntry], fairness: Fairness) -> dict[str, Any]:
    """Finish-time fairness of the unfinished jobs, as far as it is known: the median, and the worst with its job."""
    known = [(rho, entry.record.spec.id) for entry in active if (rho := fairness.of(entry)) is not None]
    known.sort(key=lambda entry: (-entry[0], entry[1]))
    values = [rho for rho, _ in known]
    return {
        "jobs": [{"job": job_id, "rho": rho} for rho, job_id in known[:_SHOWN]],
        "num_jobs": len(known),
        "median": statistics.median(values) if values else None,
        "worst": values[0] if values else None,
        "unfair_share": sum(rho > 1.0 for rho in values) / len(values) if values else None,
    }
