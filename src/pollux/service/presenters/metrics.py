"""The service's numbers for Prometheus, with a bounded number of labels: the jobs with most GPUs, the rest summed.

Every name is documented in docs/metrics.md. `prometheus_text` makes the text.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from pollux.controller import HOLDING, JobState
from pollux.core.version import __version__
from pollux.service.engine.engine import Engine
from pollux.service.presenters.prometheus_text import Family
from pollux.service.views.job_board import JobEntry

__all__ = ["MOST_JOBS", "MOST_QUEUES", "NAMES", "OTHER", "families"]

MOST_JOBS = 200
"""The number of jobs with their own labels: those with most GPUs."""

MOST_QUEUES = 50
"""The number of queues with their own labels: those with most GPUs."""

OTHER = "(other)"
"""The label of all others; no job or queue can have this name."""

_GAUGES = {
    "pollux_build_info": "Always 1; version, policy and backend are labels.",
    "pollux_start_time_seconds": "When the service started, in seconds since 1970.",
    "pollux_nodes": "Nodes of the cluster.",
    "pollux_nodes_set_aside": "Nodes that take nothing new, since jobs failed there or an operator said so.",
    "pollux_gpus": "GPUs of the cluster.",
    "pollux_gpus_used": "GPUs that jobs hold.",
    "pollux_jobs": "Jobs by state.",
    "pollux_queue_jobs": "Jobs of a queue that have not ended.",
    "pollux_queue_gpus": "GPUs that the jobs of a queue hold.",
    "pollux_goodput_relative": "Goodput of all jobs, each in units of its own on the fewest GPUs it can run on.",
    "pollux_goodput_static_relative": "The same under a static allocation of the same jobs.",
    "pollux_goodput_ratio": "Goodput now over that of a static allocation.",
    "pollux_fairness_worst": "Largest finish-time fairness of jobs that have not ended; above 1 is unfair.",
    "pollux_fairness_median": "Median finish-time fairness of jobs that have not ended.",
    "pollux_fairness_unfair_ratio": "Share of these jobs with a finish-time fairness above 1.",
    "pollux_eta_covered_ratio": "Share of the predicted intervals that held the true end.",
    "pollux_decision_seconds": "How long the policy took for the last decision.",
    "pollux_decision_delay_seconds": "How late the policy started on the last decision, after it was due.",
    "pollux_last_decision_timestamp_seconds": "When the last decision came in, in seconds since 1970.",
    "pollux_resident_memory_bytes": "Memory of the service.",
    "pollux_job_gpus": "GPUs that a job holds.",
    "pollux_job_goodput": "Useful samples per second of a job, as its agent reported.",
    "pollux_job_throughput": "Samples per second of a job, as its agent reported.",
    "pollux_job_efficiency": "Useful samples per sample of a job.",
    "pollux_job_batch_size": "Total batch of a job, in samples.",
    "pollux_job_noise_scale": "Gradient noise scale of a job, in samples.",
    "pollux_job_loss": "Training loss of a job, as its agent reported.",
    "pollux_job_progress_ratio": "Share of a job's work that is done.",
}
_COUNTERS = {
    "pollux_facts_total": "Facts in the log.",
    "pollux_gpu_seconds_total": "GPU-seconds that jobs have held.",
    "pollux_reallocations_total": "Changes of what a running job held.",
    "pollux_reallocation_gpu_seconds_total": "GPU-seconds that jobs stood still for such changes.",
    "pollux_false_alarms_total": "Nodes or replicas given up of which a sign of life came later.",
    "pollux_refused_connections_total": "Connections and requests that the API and processes of jobs refused.",
    "pollux_cpu_seconds_total": "CPU time of the service.",
}

NAMES: tuple[str, ...] = (*_GAUGES, *_COUNTERS)
"""Every name."""


class _Numbers:
    """All families, filled by name."""

    def __init__(self) -> None:
        self.families = {name: Family(name, "gauge", about) for name, about in _GAUGES.items()}
        self.families |= {name: Family(name, "counter", about) for name, about in _COUNTERS.items()}

    def add(self, name: str, value: float | None, **labels: str) -> None:
        self.families[f"pollux_{name}"].add(value, **labels)


def families(engine: Engine, summary: Mapping[str, Any]) -> Iterable[Family]:
    """All present numbers, with those of a `summary`. May be called in any thread; takes some milliseconds."""
    numbers = _Numbers()
    now = engine.now()
    entries = list(engine.views.board.entries())
    _service(numbers, engine)
    numbers.add("nodes", len(engine.cluster.nodes))
    numbers.add("nodes_set_aside", len(engine.set_aside))
    _summed(numbers, summary)
    # The sum includes forgotten jobs, since a counter must not fall.
    held = sum(entry.record.attained(now) for entry in entries)
    numbers.add("gpu_seconds_total", engine.views.board.forgotten_gpu_seconds + held)
    active = [entry for entry in entries if not entry.ended]
    named = _queues(numbers, active)
    _jobs(numbers, [entry for entry in active if entry.record.state in HOLDING], named)
    return numbers.families.values()


def _service(numbers: _Numbers, engine: Engine) -> None:
    numbers.add("build_info", 1, version=__version__, policy=engine.policy.name, backend=engine.backend.name)
    numbers.add("start_time_seconds", engine.started_at)
    numbers.add("facts_total", engine.store.revision)
    numbers.add("decision_seconds", engine.last_decision.seconds)
    numbers.add("decision_delay_seconds", engine.last_decision.delay_seconds)
    numbers.add("last_decision_timestamp_seconds", engine.last_decision.at)
    numbers.add("eta_covered_ratio", engine.views.etas.overall()["covered"])
    numbers.add("cpu_seconds_total", time.process_time())
    numbers.add("resident_memory_bytes", _memory())
    numbers.add("refused_connections_total", (engine.backend.refusals or 0) + engine.refusals.count)


def _memory() -> float:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return float(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        # The peak instead of the present memory, on systems without /proc.
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(most if sys.platform == "darwin" else most * 1024)


def _summed(numbers: _Numbers, summary: Mapping[str, Any]) -> None:
    numbers.add("gpus", summary["gpus"]["total"])
    numbers.add("gpus_used", summary["gpus"]["used"])
    for state in sorted(JobState):
        numbers.add("jobs", summary["jobs_by_state"].get(state, 0), state=str(state))
    goodput, fairness = summary["goodput"], summary["fairness"]
    numbers.add("goodput_relative", goodput["now"])
    numbers.add("goodput_static_relative", goodput["static"])
    numbers.add("goodput_ratio", goodput["ratio"])
    numbers.add("fairness_worst", fairness["worst"])
    numbers.add("fairness_median", fairness["median"])
    numbers.add("fairness_unfair_ratio", fairness["unfair_share"])
    numbers.add("reallocations_total", summary["reallocations"]["count"])
    numbers.add("reallocation_gpu_seconds_total", summary["reallocations"]["gpu_seconds"])
    numbers.add("false_alarms_total", summary["false_alarms"])


def _queues(numbers: _Numbers, active: Sequence[JobEntry]) -> frozenset[str]:
    """The numbers of queues; returns the queues that have a label of their own."""
    jobs: dict[str, int] = {}
    gpus: dict[str, int] = {}
    for entry in active:
        name = entry.record.spec.queue
        jobs[name] = jobs.get(name, 0) + 1
        gpus[name] = gpus.get(name, 0) + entry.record.placement.num_gpus
    ranked = sorted(jobs, key=lambda name: (-gpus[name], -jobs[name], name))
    shown, rest = ranked[:MOST_QUEUES], ranked[MOST_QUEUES:]
    for name in shown:
        numbers.add("queue_jobs", jobs[name], queue=name)
        numbers.add("queue_gpus", gpus[name], queue=name)
    if rest:
        numbers.add("queue_jobs", sum(jobs[name] for name in rest), queue=OTHER)
        numbers.add("queue_gpus", sum(gpus[name] for name in rest), queue=OTHER)
    return frozenset(shown)


def _jobs(numbers: _Numbers, holding: Sequence[JobEntry], named: Collection[str]) -> None:
    ranked = sorted(holding, key=lambda entry: (-entry.record.placement.num_gpus, entry.record.spec.id))
    for entry in ranked[:MOST_JOBS]:
        entry.work_out("metrics", partial(_job, numbers, entry, named))
    rest = ranked[MOST_JOBS:]
    if rest:
        numbers.add("job_gpus", sum(entry.record.placement.num_gpus for entry in rest), job_id=OTHER, queue=OTHER)


def _job(numbers: _Numbers, entry: JobEntry, named: Collection[str]) -> None:
    record, report = entry.record, entry.report
    labels = {"job_id": record.spec.id, "queue": record.spec.queue if record.spec.queue in named else OTHER}
    noise = report.get("noise") or {}
    total, done = report.get("total_progress"), report.get("progress")
    numbers.add("job_gpus", record.placement.num_gpus, **labels)
    # Rates that were measured on earlier GPUs do not hold for the present ones.
    for name in () if entry.outdated else ("goodput", "throughput"):
        numbers.add(f"job_{name}", report.get(name), **labels)
    for name in ("efficiency", "batch_size", "loss"):
        numbers.add(f"job_{name}", report.get(name), **labels)
    numbers.add("job_noise_scale", noise.get("scale"), **labels)
    if total and done is not None:
        numbers.add("job_progress_ratio", min(max(done / total, 0.0), 1.0), **labels)
