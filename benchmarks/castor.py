"""`castor` beside `pollux`: completion times, fairness, ablations, noise and lies, each beside the lower bound.

    python benchmarks/castor.py [--quick] [--seed N] [--workers 2] [--only GROUP,...]
    python benchmarks/castor.py --draw      only draws docs/images/castor.svg from the results of the last full run

Uses the published workloads where the published measurements are present (POLLUX_OSDI21_DATA, by default
../shared/data/osdi21), and generated ones of the built-in applications elsewhere. Decisions are made on events.
The last line is one JSON object; `castor_over_pollux` and `worst_ftf` have the figures that claims are about.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from instances import CASES, make
from measure import RESULTS, data_folder, finish

from pollux.core import Snapshot
from pollux.goodput import CorrectedThroughput, GoodputModel, PublishedThroughput
from pollux.policies import create
from pollux.sim.applications.application import Application
from pollux.sim.applications.profiles import load_profiles
from pollux.sim.results.bound import completion_bound
from pollux.sim.results.fairness import IsolatedTimes, finish_time_fairness
from pollux.sim.results.metrics import jain_index
from pollux.sim.simulation.disturbances import Disturbances
from pollux.sim.simulation.simulation import RunOutcome, SimulationSettings, simulate
from pollux.sim.workloads.builtin import builtin_applications
from pollux.sim.workloads.generate import GenerateSettings, generate_workload
from pollux.sim.workloads.workload import Workload, read_workload

PUBLISHED = ("workload-1", "workload-3", "workload-6")
LOAD2 = "workload-3-load2"
NO_BANK = {"bank": False}
ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "no rank": {"rank": False},
    "no bank": NO_BANK,
    "factor by age": {"size_factor": False},
    "no doubt": {"doubt": False},
    "not steady": {"steady": False},
    "no fairness bound": {"fairness_bound": None},
    "step times as fitted": {"corrected": False},
    "idle GPUs left idle": {"fill_idle": False},
    "power 1": {"power": 1.0},
    "growth twofold": {"growth": 2},
}
NOISE = Disturbances(step_time=0.2, noise_scale=0.5, remaining_sigma=0.7, silent=0.1, start_spread=0.2, node_hours=48.0)
# Generated workloads that nothing was chosen by.
SEEDS = (11, 12, 13)
LIES = Disturbances(lying=0.02)
CREEPING = replace(LIES, lie_rise=0.5)


@dataclass(frozen=True)
class Run:
    """One simulation. `workload` is a file of the published ones, or JOBSxNODES[-seedN][-loadL] for a generated one."""

    group: str
    workload: str
    policy: str = "castor"
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    resize: float = 3.0
    trigger: str = "events"
    disturbances: Disturbances | None = None
    seed: int = 1


@cache
def applications(folder: Path | None) -> dict[str, Application]:
    """The measured applications, else the built-in ones."""
    return dict(builtin_applications() if folder is None else load_profiles(folder / "profiles"))


def problem(folder: Path | None, run: Run) -> tuple[Workload, SimulationSettings]:
    """The workload and the cluster of a run."""
    nodes, jobs, load, seed = 16, 160, 2.0 if "load2" in run.workload else 1.0, run.seed * 1000
    generated = re.fullmatch(r"(\d+)x(\d+)(?:-seed(\d+))?(?:-load(\d+))?", run.workload)
    if generated:
        jobs, nodes = int(generated[1]), int(generated[2])
        seed, load = int(generated[3] or seed), float(generated[4] or 1)
    else:
        seed += int("".join(filter(str.isdigit, run.workload.split("-load")[0])))
    settings = SimulationSettings(
        num_nodes=nodes,
        trigger=run.trigger,
        resize_seconds=run.resize,
        seed=run.seed,  # type: ignore[arg-type]
    )
    if folder is not None and not generated:
        return read_workload(folder / "workloads" / f"{run.workload}.csv"), settings
    made = GenerateSettings(num_jobs=jobs, load=load, seed=seed, nodes=nodes)
    trace = None if folder is None or not (folder / "philly.csv").exists() else folder / "philly.csv"
    return generate_workload(applications(folder), made, trace, run.workload), settings


def execute(folder: Path | None, run: Run) -> dict[str, Any]:
    """The figures of one run."""
    workload, settings = problem(folder, run)
    apps = applications(folder)
    policy = create(run.policy, **run.options)
    outcome = simulate(workload, policy, apps, settings, disturbances=run.disturbances)
    fairness = finish_time_fairness(outcome.jobs, apps, settings, IsolatedTimes(apps, settings.num_nodes))
    decisions = outcome.decision_seconds
    row = {
        "group": run.group, "workload": run.workload, "policy": run.policy, "label": run.label or run.policy,
        "resize_seconds": run.resize, "trigger": run.trigger, "seed": run.seed,
        "avg_jct_hours": average(outcome), "worst_ftf": max(fairness), "jain": jain_index(fairness),
        "decision_ms": 1e3 * sum(decisions) / max(len(decisions), 1), "decisions": len(decisions),
        "restarts_per_job": fmean(job.restarts for job in outcome.jobs),
        "bound_hours": completion_bound(workload, apps, settings).seconds / 3600,
    }  # fmt: skip
    if run.group == "lies":
        row["jobs"] = {job.name: job.finished - job.submitted for job in outcome.jobs}
    return row


def average(outcome: RunOutcome) -> float:
    """Average completion time in hours."""
    return fmean(job.finished - job.submitted for job in outcome.jobs) / 3600


def plan(quick: bool, seed: int) -> list[Run]:
    """Every run that a claim needs."""
    names = PUBLISHED[:1] if quick else PUBLISHED
    runs = []
    for name in names:
        for resize in (3.0,) if quick else (3.0, 30.0):
            runs.append(Run("load1", name, "pollux", resize=resize, seed=seed))
            runs.append(Run("load1", name, options=NO_BANK, label="castor without bank", resize=resize, seed=seed))
            runs.append(Run("load1", name, resize=resize, seed=seed))
    if quick:
        return runs + troubled(names[0], seed)
    rounds: dict[str, Any] = {"resize": 30.0, "trigger": "rounds", "label": "published", "seed": seed}
    runs += [Run("load1", name, "pollux", **rounds) for name in names] + [Run("load2", LOAD2, "pollux", **rounds)]
    runs += [Run("load2", LOAD2, "pollux", seed=seed), Run("load2", LOAD2, seed=seed)]
    runs += [Run("load2", LOAD2, options=NO_BANK, label="castor without bank", seed=seed)]
    for label, options in ABLATIONS.items():
        runs += [Run("ablations", name, options=options, label=label, seed=seed) for name in (*PUBLISHED, LOAD2)]
    for size in ("1280x64", "1280x128"):
        runs += [Run("large", size, "pollux", seed=seed), Run("large", size, seed=seed)]
    for name in (f"160x16-seed{number}-load{load}" for number in SEEDS for load in (1, 2, 3)):
        runs += [Run("seeds", name, "pollux", seed=seed), Run("seeds", name, seed=seed)]
    for name in PUBLISHED:
        runs += [Run("noise", name, policy, disturbances=NOISE, seed=seed) for policy in ("castor", "pollux")]
        runs += [Run("lies", name, disturbances=LIES, label="lying", seed=seed), Run("lies", name, seed=seed)]
        runs += [Run("lies", name, disturbances=CREEPING, label="creeping", seed=seed)]
        runs += troubled(name, seed)
    return runs


def troubled(name: str, seed: int) -> list[Run]:
    """What an ingredient against troubles is worth where there are some."""
    return [
        Run("troubled", name, options={"doubt": False}, label="no doubt, lies", disturbances=LIES, seed=seed),
        Run("troubled", name, options={"steady": False}, label="not steady, noise", disturbances=NOISE, seed=seed),
    ]


SIZES = ((16, 4, 40), (32, 8, 160), (128, 8, 640), (512, 8, 2500), (2048, 8, 5000))


def speed(quick: bool, seed: int) -> dict[str, float]:
    """CPU time of a decision of `castor` over one of `pollux`, on the snapshots of the allocation benchmark."""
    found = {}
    for nodes, gpus, jobs in SIZES[:2] if quick else SIZES:
        for case in CASES:
            snapshot = measured(make(create("pollux"), case, nodes, gpus, jobs, seed))
            calls = [partial(create(name).allocate, snapshot) for name in ("castor", "pollux")]
            ours, theirs = least_cpu_ms(calls, 20 if jobs < 1000 else 7)
            found[f"{nodes * gpus}/{jobs}/{case}"] = round(ours / theirs, 3)
            print(f"{nodes * gpus} GPUs, {jobs} jobs, {case}: {ours:.1f} ms against {theirs:.1f} ms", flush=True)
    return found


def measured(snapshot: Snapshot) -> Snapshot:
    """The same with models that measurements at six places correct, as of jobs of fifty kinds that have run before.

    Corrections are below 1 %: both policies are to solve the same problem, and what they cost does not depend on size.
    """
    base = ((1, 1, 0.005), (1, 2, -0.004), (1, 4, 0.008), (2, 8, -0.009), (4, 16, 0.007), (8, 32, -0.002))
    kinds = [tuple((nodes, gpus, value + 1e-5 * kind) for nodes, gpus, value in base) for kind in range(50)]
    jobs = []
    for i, job in enumerate(snapshot.jobs):
        model = job.goodput
        if isinstance(model, GoodputModel) and isinstance(model.throughput, PublishedThroughput):
            model = replace(model, throughput=CorrectedThroughput(model.throughput, kinds[i % len(kinds)]))
        jobs.append(replace(job, goodput=model))
    return replace(snapshot, jobs=tuple(jobs))


def least_cpu_ms(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Least CPU time of each call; they take turns, so that what else the machine does disturbs all of them alike."""
    least = [math.inf] * len(calls)
    for _ in range(repeats):
        for i, call in enumerate(calls):
            began = time.process_time()
            call()
            least[i] = min(least[i], 1e3 * (time.process_time() - began))
    return least


def explore(seed: int, text: str) -> list[Run]:
    """Runs of `castor` with other options, given as a JSON list of objects."""
    chosen = json.loads(text)
    names = (*PUBLISHED, LOAD2)
    return [
        Run("explore", name, options=options, label=json.dumps(options), seed=seed)
        for options in chosen
        for name in names
    ]


def reference(folder: Path | None, rows: list[dict[str, Any]]) -> dict[str, float]:
    """What completion times are compared with: the published averages, else `pollux` in published rounds or as run."""
    found: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: (row["label"] != "published", row["resize_seconds"])):
        if row["policy"] == "pollux" and row["group"] not in ("noise", "troubled"):
            found.setdefault(row["workload"], row["avg_jct_hours"])
    if folder is not None:
        for row in json.loads((folder / "published.json").read_text(encoding="utf-8"))["results"]:
            if set(row) == {"workload", "policy", "avg_jct_hours"} and row["policy"] == "pollux":
                found[row["workload"]] = row["avg_jct_hours"]
    return found


def summary(folder: Path | None, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios to the reference and worst fairness, by group, label and resize cost."""
    base = reference(folder, rows)
    ratios: dict[str, list[float]] = {}
    worst: dict[str, float] = {}
    bounds: dict[str, float] = {}
    for row in rows:
        row["ratio"] = row["avg_jct_hours"] / base[row["workload"]] if row["workload"] in base else None
        key = f"{row['group']}/{row['label']}/{row['resize_seconds']:g}s"
        if row["group"] in ("ablations", "explore"):
            key += "/load2" if row["workload"] == LOAD2 else ""
        if row["group"] == "large":
            key += f"/{row['workload']}"
        if row["group"] == "seeds":
            key += f"/load{row['workload'][-1]}"
        if row["ratio"] is not None:
            ratios.setdefault(key, []).append(row["ratio"])
            bounds[row["workload"]] = round(row["bound_hours"] / base[row["workload"]], 4)
        worst[key] = max(worst.get(key, 0.0), row["worst_ftf"])
    result: dict[str, Any] = {
        "castor_over_pollux": {key: round(fmean(values), 4) for key, values in ratios.items()},
        "each": {key: [round(value, 4) for value in values] for key, values in ratios.items() if len(values) > 1},
        "worst_ftf": {key: round(value, 3) for key, value in worst.items()},
        "bound_over_pollux": bounds,
    }
    result["lies"] = lies(rows)
    return result


def lies(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Completion times of liars over their own when honest: the least and the mean."""
    from pollux.sim.simulation.disturbances import JobDisturbance

    found: list[float] = []
    mine = [row for row in rows if row["group"] == "lies"]
    honest = {(row["workload"], row["seed"]): row["jobs"] for row in mine if row["label"] not in ("lying", "creeping")}
    for row in mine:
        known = honest.get((row["workload"], row["seed"]), {})
        if row["label"] in ("lying", "creeping"):
            liars = [name for name in known if JobDisturbance(LIES, row["seed"], name).lies]
            found += [row["jobs"][name] / known[name] for name in liars]
    for row in mine:
        del row["jobs"]
    return {"least": round(min(found), 4), "mean": round(fmean(found), 4), "jobs": len(found)} if found else {}


# What the figure shows: words, the policies' runs in the results, and the workloads whose bounds are beside them.
SITUATIONS = (
    ("3 s a resize", "load1/{}/3s", PUBLISHED),
    ("30 s a resize", "load1/{}/30s", PUBLISHED),
    ("twice the jobs, 3 s", "load2/{}/3s", (LOAD2,)),
    ("noise, failures, 3 s", "noise/{}/3s", PUBLISHED),
    ("a job in 50 lies, 3 s", "lies/{}/3s", PUBLISHED),
)
LINES = (("pollux", "#D55E00"), ("castor without bank", "#56B4E9"), ("castor", "#0072B2"), ("lying", "#0072B2"))


def draw(found: Mapping[str, Any]) -> None:
    """docs/images/castor.svg: completion times, the worst-off job and what each ingredient is worth."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "castor"
    figure = Figure(figsize=(11.0, 7.2), layout="constrained")
    (times, fairness), (load1, load2) = figure.subplots(2, 2)
    ratios, worst, bounds = found["castor_over_pollux"], found["worst_ftf"], found["bound_over_pollux"]
    bars(times, ratios, "average completion time over published Pollux (shorter is better)")
    for y, (_, _, workloads) in enumerate(SITUATIONS):
        bound = fmean(bounds[name] for name in workloads)
        times.plot([bound] * 2, [y - 0.4, y + 0.4], color="#009E73", label="" if y else "no schedule can beat this")
    bars(fairness, worst, "the worst-off job: its time over that on its fair share")
    for axes, text, suffix, base in (
        (load1, "load 1, 3 s", "", "load1/castor/3s"),
        (load2, "twice the jobs, 3 s", "/load2", "load2/castor/3s"),
    ):
        named = [(label, f"ablations/{label}/3s{suffix}") for label in ABLATIONS]
        chosen = [(label, 100.0 * (ratios[key] / ratios[base] - 1.0)) for label, key in named if key in ratios]
        colours = ["#0072B2" if value >= 0 else "#D55E00" for _, value in chosen]
        axes.barh([label for label, _ in chosen], [value for _, value in chosen], color=colours)
        axes.invert_yaxis()
        axes.set_title(f"% longer without an ingredient of castor, or with another ({text})", fontsize=9)
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    for axes in figure.axes:
        axes.tick_params(labelsize=8)
    figure.savefig(RESULTS.parents[1] / "docs" / "images" / "castor.svg", metadata={"Date": None})


def bars(axes: Any, values: Mapping[str, float], title: str) -> None:
    """One group of bars for each situation, one bar for each policy that was run in it."""
    height, drawn = 0.26, set()
    for y, (_, key, _) in enumerate(SITUATIONS):
        present = [(label, colour) for label, colour in LINES if key.format(label) in values]
        if any(label == "lying" for label, _ in present):
            present = [(label, colour) for label, colour in present if label == "lying"]
        for i, (label, colour) in enumerate(present):
            known = "castor" if label == "lying" else label
            at = y + (i - (len(present) - 1) / 2) * height
            axes.barh(at, values[key.format(label)], height, color=colour, label="" if known in drawn else known)
            drawn.add(known)
    axes.set_yticks(range(len(SITUATIONS)), [words for words, _, _ in SITUATIONS])
    axes.axvline(1.0, color="#7F7F7F", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute: one workload, no ablations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--only",
        default="",
        help="groups to run, with commas: load1,load2,ablations,large,seeds,noise,lies,troubled,speed",
    )
    parser.add_argument("--explore", default="", help="JSON list of options of castor to try instead")
    parser.add_argument(
        "--draw", action="store_true", help="only draw the figure, from the results of the last full run"
    )
    arguments = parser.parse_args()
    if arguments.draw:
        draw(json.loads((RESULTS / "castor.json").read_text(encoding="utf-8")))
        return
    folder = data_folder()
    if folder is None:
        print("the published measurements are absent: generated workloads are used instead", flush=True)
    only = set(filter(None, arguments.only.split(",")))
    if arguments.explore:
        runs = explore(arguments.seed, arguments.explore)
    else:
        runs = [run for run in plan(arguments.quick, arguments.seed) if not only or run.group in only]
    runs.sort(key=lambda run: (run.group != "large", "load2" not in run.workload))
    rows, began = [], time.monotonic()
    with ProcessPoolExecutor(arguments.workers) as pool:
        waiting = [pool.submit(execute, folder, run) for run in runs]
        for done in as_completed(waiting):
            row = done.result()
            rows.append(row)
            print(
                f"[{time.monotonic() - began:5.0f} s] {row['group']:10s} {row['workload']:18s} {row['label']:40s} "
                f"{row['resize_seconds']:g} s: {row['avg_jct_hours']:.4f} h, bound {row['bound_hours']:.4f} h, "
                f"worst FTF {row['worst_ftf']:.2f}, Jain {row['jain']:.3f}, {row['decision_ms']:.1f} ms",
                flush=True,
            )
    rows.sort(
        key=lambda row: [(r.group, r.workload, r.label or r.policy) for r in runs].index(
            (row["group"], row["workload"], row["label"])
        )
    )
    found = summary(folder, rows)
    if not arguments.explore and (not only or "speed" in only):
        found["decision_time_over_pollux"] = speed(arguments.quick, arguments.seed)
    partial = arguments.quick or bool(only) or bool(arguments.explore)
    if not partial:
        draw(found)
    finish("castor", {**found, "rows": rows}, partial)


if __name__ == "__main__":
    main()
