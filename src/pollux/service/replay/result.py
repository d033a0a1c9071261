"""The result of a replay, as a page needs it: the numbers of every run, and of its jobs only what is plotted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["MOST_JOBS", "shorten", "shortened"]

MOST_JOBS = 1000
"""The most jobs of one run that are sent, evenly thinned in order of their completion time."""

_MOST_LEFT = 200
_JOB = ("name", "submitted", "started", "finished", "restarts", "gpu_seconds", "ftf")
_CONFIG = ("num_nodes", "gpus_per_node", "trigger", "resize_seconds")


def shorten(whole: str, short: str) -> None:
    """Read the document of one file, and write what a page needs of it to another."""
    document = json.loads(Path(whole).read_bytes())
    Path(short).write_text(json.dumps(shortened(document), separators=(",", ":"), allow_nan=False), encoding="utf-8")


def shortened(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document of `pollux whatif --json` with what a page shows only; `num_jobs` says how many there were."""
    return {
        "runs": [_run(run) for run in document["runs"]],
        "left_out": list(document.get("left_out", ()))[:_MOST_LEFT],
    }


def _run(run: Mapping[str, Any]) -> dict[str, Any]:
    config = {name: run["config"][name] for name in _CONFIG if name in run["config"]}
    return {
        "nodes": run["nodes"], "config": config, "results": [_result(result) for result in run["results"]],
        "left_out": list(run.get("left_out", ()))[:_MOST_LEFT],
    }  # fmt: skip


def _result(result: Mapping[str, Any]) -> dict[str, Any]:
    jobs = sorted(result["jobs"], key=lambda job: float(job["finished"] - job["submitted"]))
    step = max(-(-len(jobs) // MOST_JOBS), 1)
    kept = [{name: job[name] for name in _JOB if name in job} for job in jobs[::step]]
    return {**{name: value for name, value in result.items() if name != "jobs"}, "num_jobs": len(jobs), "jobs": kept}
