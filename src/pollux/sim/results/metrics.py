"""The numbers of a run for tables and JSON, and the configuration that they depend on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

import pollux.policies as registry
from pollux.core.version import __version__
from pollux.sim.applications.application import Application
from pollux.sim.results.bound import completion_bound
from pollux.sim.results.fairness import IsolatedTimes, finish_time_fairness
from pollux.sim.simulation.compare import PolicyChoice
from pollux.sim.simulation.disturbances import Disturbances
from pollux.sim.simulation.simulation import RunOutcome, SimulationSettings
from pollux.sim.workloads.classes import CLASSES, application_class
from pollux.sim.workloads.workload import Workload

__all__ = ["TIMINGS", "bounds", "configuration", "describe_world", "document", "jain_index", "measure", "to_json"]

TIMINGS = ("decision_ms_mean", "decision_ms_max", "cpu_seconds")
"""Fields of a result that depend on the machine; all others repeat to the byte."""

_HOUR = 3600.0


def measure(
    outcome: RunOutcome,
    applications: Mapping[str, Application],
    settings: SimulationSettings,
    times: IsolatedTimes | None = None,
) -> dict[str, Any]:
    """One result: a workload under a policy.

    Completion times (JCT) run from submission to finish; percentiles are linear between jobs. The makespan
    runs from the first submission to the last finish; utilisation is GPU time held, resizes included, over
    the GPU time of the makespan. A restart is any placement after a job's first. `ftf` is the ρ of
    `fairness`; a job is unfairly treated when ρ > 1. `classes` are those of `workloads.classes` that have jobs.
    """
    jobs = outcome.jobs
    hours = np.array([job.finished - job.submitted for job in jobs]) / _HOUR
    makespan_hours = (max(job.finished for job in jobs) - min(job.submitted for job in jobs)) / _HOUR
    gpu_hours = sum(job.gpu_seconds for job in jobs) / _HOUR
    times = times or IsolatedTimes(applications, settings.num_nodes, settings.gpus_per_node)
    fairness = finish_time_fairness(jobs, applications, settings, times)
    decisions = np.array(outcome.decision_seconds or (0.0,)) * 1000.0
    return {
        "workload": outcome.workload,
        "policy": outcome.policy,
        "avg_jct_hours": float(np.mean(hours)),
        "p50_jct_hours": float(np.percentile(hours, 50)),
        "p99_jct_hours": float(np.percentile(hours, 99)),
        "makespan_hours": makespan_hours,
        "restarts_per_job": sum(job.restarts for job in jobs) / len(jobs),
        "gpu_hours": gpu_hours,
        "utilization": gpu_hours / (settings.num_gpus * makespan_hours),
        "worst_ftf": max(fairness),
        "unfair_fraction": sum(rho > 1.0 for rho in fairness) / len(jobs),
        "classes": _by_class(outcome, times, fairness),
        "decision_ms_mean": float(np.mean(decisions)),
        "decision_ms_max": float(np.max(decisions)),
        "cpu_seconds": outcome.cpu_seconds,
        "jobs": [
            {
                "name": job.name,
                "application": job.application,
                "submitted": job.submitted,
                "started": job.started,
                "finished": job.finished,
                "restarts": job.restarts,
                "gpu_seconds": job.gpu_seconds,
                "ftf": rho,
            }
            for job, rho in zip(jobs, fairness, strict=True)
        ],
    }


def _by_class(outcome: RunOutcome, times: IsolatedTimes, fairness: Sequence[float]) -> dict[str, dict[str, float]]:
    """For each class with jobs: their number, completion times, and the worst finish-time fairness."""
    members: dict[str, int] = {}
    for job in outcome.jobs:
        if job.application not in members:
            members[job.application] = application_class(job.application, lambda name: times.seconds(name, 1.0) / _HOUR)
    found: dict[str, dict[str, float]] = {}
    for number, name in enumerate(CLASSES):
        mine = [i for i, job in enumerate(outcome.jobs) if members[job.application] == number]
        if mine:
            hours = np.array([outcome.jobs[i].finished - outcome.jobs[i].submitted for i in mine]) / _HOUR
            found[name] = {
                "jobs": len(mine),
                "avg_jct_hours": float(np.mean(hours)),
                "p50_jct_hours": float(np.percentile(hours, 50)),
                "worst_ftf": max(fairness[i] for i in mine),
            }
    return found


def bounds(
    workloads: Sequence[Workload], applications: Mapping[str, Application], settings: SimulationSettings
) -> dict[str, float | None]:
    """Average completion time in hours that no schedule can beat, by workload; None where nothing was measured."""
    found: dict[str, float | None] = {}
    for workload in workloads:
        seconds = completion_bound(workload, applications, settings).seconds
        found[workload.name] = seconds / _HOUR if math.isfinite(seconds) else None
    return found


def jain_index(values: Sequence[float]) -> float:
    """Jain's index `(Σx)² / (n·Σx²)` of slow-downs: 1 if all are equal, 1/n if one job has all of it."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def configuration(
    workloads: Sequence[Workload],
    policies: Sequence[PolicyChoice],
    applications: Mapping[str, Application],
    settings: SimulationSettings,
    profiles: str = "built-in",
) -> dict[str, Any]:
    """Everything that a result depends on, without the number of processes, which changes nothing."""
    return {
        "workloads": [{"name": workload.name, "jobs": len(workload.jobs)} for workload in workloads],
        "policies": [{"name": policy.name, "options": _options(policy)} for policy in policies],
        "profiles": profiles,
        **asdict(settings),
        "applications": {name: _describe(applications[name]) for name in sorted(applications)},
    }


def _options(policy: PolicyChoice) -> dict[str, Any]:
    """Every option of a policy, defaults included; a policy has its options as attributes."""
    made = registry.create(policy.name, **policy.options)
    return {name: getattr(made, name) for name in sorted(registry.options(policy.name)) if hasattr(made, name)}


def _describe(application: Application) -> dict[str, Any]:
    return {
        **asdict(application.limits),
        "max_nodes": application.max_nodes,
        "epochs": len(application.progress),
        "fixed": None if application.fixed is None else asdict(application.fixed),
    }


def document(
    config: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    bounds_hours: Mapping[str, float | None] | None = None,
) -> dict[str, Any]:
    """The document of `--json`; `version` is that of Pollux."""
    made = {"version": __version__, "config": dict(config), "results": [dict(result) for result in results]}
    return made if bounds_hours is None else {**made, "bounds_hours": dict(bounds_hours)}


def to_json(document: Mapping[str, Any]) -> str:
    """The text of a results file."""
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _standstill(seconds: float | str) -> str:
    if isinstance(seconds, str):
        return "standstill by the model of state and bandwidth when a job's GPUs change"
    return f"{seconds:g} s standstill when a job's GPUs change"


def _disturbed(values: Mapping[str, float]) -> list[str]:
    usual = asdict(Disturbances())
    wrong = [f"{name} {value:g}" for name, value in values.items() if value != usual[name]]
    return [f"disturbed by {', '.join(wrong)}"] if wrong else []


def describe_world(config: Mapping[str, Any]) -> list[str]:
    """A description of the simulated cluster, in a few lines."""
    rounds = f"rounds of {config['interval_seconds']:g} s" if config["trigger"] == "rounds" else "events"
    cluster = [
        f"{config['num_nodes']} nodes × {config['gpus_per_node']} GPUs",
        f"decisions by {rounds}",
        _standstill(config["resize_seconds"]),
    ]
    if config["interference"]:
        cluster.append(f"distributed jobs that share a node lose {config['interference']:.0%} of their speed")
    cluster += _disturbed(config.get("disturbances") or {})
    fixed = [
        f"{name} ({held['num_gpus']} GPU{'s' * (held['num_gpus'] > 1)}, batch {held['batch_size']})"
        for name, application in config["applications"].items()
        if (held := application["fixed"])
    ]
    jobs = [
        f"adaptive jobs at most double their GPUs at a time, up to {config['max_gpus_per_job']}",
        f"fixed even then: {', '.join(fixed) or 'nothing'}",
    ]
    source = [f"applications: {config['profiles']}", f"seed {config['seed']}"]
    for policy in config["policies"]:
        if policy["options"]:
            options = ", ".join(f"{key} {_plain(value)}" for key, value in policy["options"].items())
            source.append(f"{policy['name']} with {options}")
    return ["; ".join(line) for line in (cluster, jobs, source)]


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return " ".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
