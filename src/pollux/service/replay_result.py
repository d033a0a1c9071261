"""What a replay came to, as a page needs it: the numbers of every run, and of its jobs only what is plotted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["MOST_JOBS", "shortened"]

MOST_JOBS = 1000
"""Jobs of one run that are sent at most, evenly thinned in order of their completion time."""

_JOB = ("name", "submitted", "started", "finished", "restarts", "gpu_seconds", "ftf")
_CONFIG = ("num_nodes", "gpus_per_node", "trigger", "resize_seconds")


def shortened(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document of `pollux whatif --json` without what a page does not show; `num_jobs` says how many there were."""
    return {"runs": [_run(run) for run in document["runs"]]}


def _run(run: Mapping[str, Any]) -> dict[str, Any]:
    config = {name: run["config"][name] for name in _CONFIG if name in run["config"]}
    return {"nodes": run["nodes"], "config": config, "results": [_result(result) for result in run["results"]]}


def _result(result: Mapping[str, Any]) -> dict[str, Any]:
    jobs = sorted(result["jobs"], key=lambda job: float(job["finished"] - job["submitted"]))
    step = max(-(-len(jobs) // MOST_JOBS), 1)
    kept = [{name: job[name] for name in _JOB if name in job} for job in jobs[::step]]
    return {**{name: value for name, value in result.items() if name != "jobs"}, "num_jobs": len(jobs), "jobs": kept}
