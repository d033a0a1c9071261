"""The published evaluation beside ours: every average that was published, on the same files.

    python benchmarks/reproduce.py [--quick] [--seed N] [--workers 2]

Needs the published measurements (POLLUX_OSDI21_DATA, by default ../shared/data/osdi21). The quick run takes one
workload and leaves the genetic search out, which alone needs ten minutes.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from measure import data_folder, finish

from pollux.policies import create
from pollux.sim.applications.application import Application
from pollux.sim.applications.profiles import load_profiles
from pollux.sim.results.metrics import measure
from pollux.sim.simulation.simulation import SimulationSettings, simulate
from pollux.sim.workloads.workload import read_workload

TUNED = ("workload-1", "workload-3", "workload-6")
INTERVALS = (30.0, 120.0, 240.0, 480.0)
SLOWDOWNS = (0.0, 0.25, 0.5)
POWERS = (1.0, -1.0, -10.0)


@dataclass(frozen=True)
class Run:
    """One simulation; the defaults are the published world."""

    workload: str
    policy: str
    interval: float = 60.0
    interference: float = 0.0
    avoid: bool = True
    fairness: float = -1.0
    seed: int = 1
    key: str = field(default="", compare=False)


@cache
def applications(folder: Path) -> dict[str, Application]:
    return dict(load_profiles(folder / "profiles"))


def execute(folder: Path, run: Run) -> dict[str, Any]:
    """The figures of one run, without its jobs."""
    options = {"fairness": run.fairness, "avoid_interference": run.avoid} if run.policy.startswith("pollux") else {}
    settings = SimulationSettings(interval_seconds=run.interval, interference=run.interference, seed=run.seed)
    workload = read_workload(folder / "workloads" / f"{run.workload}.csv")
    apps = applications(folder)
    result = measure(simulate(workload, create(run.policy, **options), apps, settings), apps, settings)
    del result["jobs"]
    return {
        **result, "interval_seconds": run.interval, "interference": run.interference,
        "avoid_interference": run.avoid, "fairness": run.fairness,
    }  # fmt: skip


def plan(quick: bool, seed: int) -> list[Run]:
    """Every run that a claim needs."""
    if quick:
        names, intervals = ("workload-3",), (240.0,)
    else:
        names, intervals = TUNED, INTERVALS
    runs = [Run(name, policy, seed=seed) for name in names for policy in ("pollux", "tiresias", "optimus-oracle")]
    runs += [Run(name, "pollux", interval=i, seed=seed) for name in names for i in intervals]
    runs += [Run(name, "pollux", fairness=p, seed=seed) for name in names for p in POWERS if p != -1.0]
    if not quick:
        load2, realistic = "workload-3-load2", "workload-6-realistic"
        runs += [Run(load2, policy, seed=seed) for policy in ("pollux", "tiresias", "optimus-oracle")]
        runs += [Run(realistic, policy, seed=seed) for policy in ("tiresias", "optimus-oracle")]
        runs += [Run(n, "pollux", avoid=False, interference=s, seed=seed) for n in names for s in SLOWDOWNS]
        runs += [Run(n, "pollux", interference=0.5, seed=seed) for n in names]
        runs += [Run(n, "pollux-genetic", seed=seed) for n in ("workload-3", "workload-6")]
    return runs


def published(folder: Path) -> dict[tuple[Any, ...], float]:
    """Published averages by (workload, policy, interval, interference, avoidance)."""
    rows = json.loads((folder / "published.json").read_text(encoding="utf-8"))["results"]
    return {
        (
            row["workload"], row["policy"], float(row.get("interval_seconds", 60)),
            float(row.get("interference_slowdown", 0)), row.get("avoid_interference", True),
        ): row["avg_jct_hours"]
        for row in rows
    }  # fmt: skip


def compare(row: dict[str, Any], reference: dict[tuple[Any, ...], float]) -> dict[str, Any]:
    """Put the published average beside ours."""
    policy = "pollux" if row["policy"] == "pollux-genetic" else row["policy"]
    place = (row["workload"], policy, row["interval_seconds"], row["interference"], row["avoid_interference"])
    value = reference.get(place) if row["fairness"] == -1.0 else None
    ratio = None if value is None else round(row["avg_jct_hours"] / value, 4)
    return {**row, "published_jct_hours": value, "ratio": ratio}


def claims(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the project claims, from the rows that are there."""

    def world(row: dict[str, Any]) -> bool:
        return row["interval_seconds"] == 60 and row["interference"] == 0 and row["avoid_interference"]

    def tuned_world(row: dict[str, Any]) -> bool:
        return world(row) and row["workload"] in TUNED

    def ratios(*, policy: str, keep: Any) -> list[float]:
        return [r["ratio"] for r in rows if r["policy"] == policy and r["ratio"] is not None and keep(r)]

    def plain(name: str, policy: str) -> dict[str, Any] | None:
        same = (r for r in rows if r["workload"] == name and r["policy"] == policy and world(r) and r["fairness"] == -1)
        return next(same, None)

    def lower(policy: str, figure: str) -> float | None:
        pairs = [(plain(n, "pollux"), plain(n, policy)) for n in TUNED]
        pairs = [(ours, theirs) for ours, theirs in pairs if ours and theirs]
        return round(1 - sum(o[figure] for o, _ in pairs) / sum(t[figure] for _, t in pairs), 4) if pairs else None

    tuned = ratios(policy="pollux", keep=tuned_world)
    baselines = [abs(x - 1) for p in ("tiresias", "optimus-oracle") for x in ratios(policy=p, keep=world)]
    found: dict[str, Any] = {
        "baselines_worst_error": max(baselines, default=None),
        "pollux_worst_ratio": max(tuned, default=None),
        "pollux_mean_ratio": round(fmean(tuned), 4) if tuned else None,
        "double_load_ratio": max(ratios(policy="pollux", keep=lambda r: "load2" in r["workload"]), default=None),
        "intervals_worst_ratio": max(ratios(policy="pollux", keep=lambda r: r["interval_seconds"] != 60), default=None),
        "interference_worst_ratio": max(
            ratios(policy="pollux", keep=lambda r: not r["avoid_interference"]), default=None
        ),
        "genetic_worst_error": max((abs(x - 1) for x in ratios(policy="pollux-genetic", keep=world)), default=None),
        "jct_below_tiresias": lower("tiresias", "avg_jct_hours"),
        "jct_below_optimus": lower("optimus-oracle", "avg_jct_hours"),
        "makespan_below_tiresias": lower("tiresias", "makespan_hours"),
        "makespan_below_optimus": lower("optimus-oracle", "makespan_hours"),
    }
    ours = plain("workload-6", "pollux")
    for policy in ("tiresias", "optimus-oracle"):
        theirs = plain("workload-6-realistic", policy)
        if ours and theirs:
            share = 1 - ours["avg_jct_hours"] / theirs["avg_jct_hours"]
            found[f"realistic_jct_below_{policy.removesuffix('-oracle')}"] = round(share, 4)
    found["fairness"] = [
        {
            "fairness": p,
            **{f: round(fmean(r[f] for r in mine), 4) for f in ("avg_jct_hours", "makespan_hours", "unfair_fraction")},
            "worst_ftf": round(max(r["worst_ftf"] for r in mine), 3),
            "worst_ftf_mean": round(fmean(r["worst_ftf"] for r in mine), 3),
        }
        for p in POWERS
        if (
            mine := [
                r
                for r in rows
                if r["policy"] == "pollux" and r["fairness"] == p and world(r) and r["workload"] in TUNED
            ]
        )
    ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute: one workload, no genetic search")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    folder = data_folder()
    if folder is None:
        print("the published measurements are absent; set POLLUX_OSDI21_DATA to their folder", flush=True)
        finish("reproduce", {"skipped": "no published measurements"}, True)
        return
    runs = plan(arguments.quick, arguments.seed)
    # The slow ones first, so that no process ends up alone with one of them.
    runs.sort(key=lambda run: (run.policy != "pollux-genetic", "load2" not in run.workload))
    reference, rows, began = published(folder), [], time.monotonic()
    with ProcessPoolExecutor(arguments.workers) as pool:
        for run, result in zip(runs, pool.map(execute, [folder] * len(runs), runs), strict=True):
            row = compare(result, reference)
            rows.append(row)
            beside = f"published {row['published_jct_hours']:.4f}, {row['ratio']:.4f}x" if row["ratio"] else ""
            print(
                f"[{time.monotonic() - began:5.0f} s] {run.workload:20s} {run.policy:15s} p={run.fairness:<5g} "
                f"every {run.interval:<4g} s, interference {run.interference:<4g} {'' if run.avoid else '(shared) '}"
                f"JCT {row['avg_jct_hours']:.4f} h  {beside}",
                flush=True,
            )
    finish("reproduce", {"claims": claims(rows), "rows": rows}, arguments.quick)


if __name__ == "__main__":
    main()
