"""Decision time and quality of `pollux` on synthetic clusters, beside `pollux-genetic` where that can run.

    python benchmarks/allocate.py [--quick] [--seed N]
    python benchmarks/allocate.py --instance FILE

`decision_ms` is process CPU time on one core, median of at least 20, from a snapshot that holds only model parameters
to a checked plan. `quality` is fitness over the bound of `bound.py`. docs/benchmarks.md describes the instance file.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bound import Judge
from instances import CASES, SEARCH_ROUNDS, history, make
from measure import cpu_ms, finish

from pollux.core import Cluster, Decision, InvalidInput, JobLimits, JobView, Node, Placement, Snapshot, check, plan
from pollux.goodput import BatchLimits, Efficiency, GoodputModel, PublishedThroughput
from pollux.policies import create

REPEATS = 20
# (nodes, GPUs per node, jobs, seeds, whether the genetic search is run beside it)
SIZES = [
    (16, 4, 12, 5, True), (16, 4, 40, 5, True), (8, 8, 25, 5, True), (32, 4, 80, 2, True), (32, 8, 160, 1, True),
    (128, 8, 640, 2, False), (512, 8, 2500, 1, False), (2048, 8, 5000, 1, False),
]  # fmt: skip
QUICK = [
    (16, 4, 40, 1, True), (32, 4, 80, 1, True),
    (128, 8, 640, 1, False), (512, 8, 2500, 1, False), (2048, 8, 5000, 1, False),
]  # fmt: skip


def decide(policy: Any, snapshot: Snapshot) -> Decision:
    """From a snapshot to a checked plan, as the controller does it."""
    decision: Decision = policy.allocate(snapshot)
    violations = check(snapshot, decision)
    if violations:
        raise SystemExit(f"illegal decision: {violations[0]}")
    plan(snapshot, decision)
    return decision


def measure(snapshot: Snapshot, case: str, seed: int, genetic: bool) -> dict[str, Any]:
    """One row of the table."""
    policy = create("pollux")
    decision = decide(policy, snapshot)
    judge = Judge(snapshot)
    row: dict[str, Any] = {
        "gpus": snapshot.cluster.num_gpus, "gpus_per_node": judge.largest, "jobs": len(snapshot.jobs),
        "case": case, "seed": seed,
        "decision_ms": round(cpu_ms(lambda: decide(policy, snapshot), REPEATS), 3),
        "quality": round(judge.quality(decision), 4),
        "genetic_quality": None, "genetic_ms": None,
        "idle_usable_gpus": judge.idle_usable_gpus(decision),
    }  # fmt: skip
    if genetic:
        began = time.process_time()
        row["genetic_quality"] = round(judge.quality(search(snapshot)), 4)
        row["genetic_ms"] = round((time.process_time() - began) * 1e3 / SEARCH_ROUNDS, 1)
    print(
        f"{row['gpus']:6d} GPUs {row['jobs']:5d} jobs {case:10s} {row['decision_ms']:8.2f} ms  "
        f"quality {row['quality']:.4f}  genetic {row['genetic_quality'] or '-'}  idle {row['idle_usable_gpus']}",
        flush=True,
    )
    return row


def search(snapshot: Snapshot) -> Decision:
    """The published search at its full budget, several rounds on from its own last population."""
    policy, memory = create("pollux-genetic"), None
    for _ in range(SEARCH_ROUNDS):
        decision = decide(policy, replace(snapshot, memory=memory))
        memory = decision.memory
    return decision


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the claims are about."""
    qualities = [row["quality"] for row in rows]
    pairs = [(r["quality"], r["genetic_quality"], r["gpus"]) for r in rows if r["genetic_quality"] is not None]
    small = [(ours, theirs) for ours, theirs, gpus in pairs if gpus <= 64]
    large = [ours - theirs for ours, theirs, gpus in pairs if gpus >= 128]
    worst: dict[str, float] = {}
    for row in rows:
        key = f"{row['gpus']}/{row['jobs']}"
        worst[key] = max(worst.get(key, 0.0), row["decision_ms"])
    return {
        "quality_min": min(qualities),
        "quality_mean": round(sum(qualities) / len(qualities), 4),
        "vs_genetic_up_to_64": round(sum(o for o, _ in small) / sum(t for _, t in small), 4) if small else None,
        "vs_genetic_snapshots": len(small),
        "least_lead_from_128": round(min(large), 4) if large else None,
        "idle_usable_gpus_max": max(row["idle_usable_gpus"] for row in rows),
        "decision_ms_max": worst,
    }


# Instances from files

PARAMETERS = ("alpha_c", "beta_c", "alpha_n", "beta_n", "alpha_r", "beta_r", "gamma")


def read_instance(path: Path) -> tuple[Snapshot, float]:
    """A snapshot from a JSON file; every complaint names the file, the entry and the field."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: cannot be read as JSON ({error}); see docs/benchmarks.md for the format") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"{path}: must be an object with 'nodes' and 'jobs'; see docs/benchmarks.md")
    nodes = [_node(path, i, entry) for i, entry in enumerate(_list(path, data, "nodes"))]
    now = max([float(entry.get("age", 0.0)) for entry in _list(path, data, "jobs")], default=0.0)
    views, running = [], {}
    for i, entry in enumerate(data["jobs"]):
        view, placement = _job(path, i, entry, now, nodes)
        views.append(view)
        if placement:
            running[view.id] = placement
    return Snapshot(1, now, Cluster.of(nodes), tuple(views), running), float(data.get("fairness", -1.0))


def _list(path: Path, data: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(data.get(key), list) or not data[key]:
        raise InvalidInput(f"{path}: field '{key}' is {data.get(key)!r}; give a list with at least one entry")
    entries: list[Any] = data[key]
    return entries


def _node(path: Path, i: int, entry: Any) -> Node:
    entry = {"gpus": entry} if isinstance(entry, int) else entry
    where = f"{path}: nodes[{i}]"
    return Node(
        str(entry.get("id", f"node-{i}")),
        int(_number(where, entry, "gpus", whole=True)),
        isolated_network=bool(entry.get("isolated_network", False)),
    )


def _job(path: Path, i: int, entry: Any, now: float, nodes: list[Node]) -> tuple[JobView, Placement | None]:
    where = f"{path}: jobs[{i}]"
    if not isinstance(entry, dict):
        raise InvalidInput(f"{where} is {entry!r}; give an object")
    parameters = entry.get("parameters")
    if isinstance(parameters, dict):
        parameters = [_number(f"{where}.parameters", parameters, name) for name in PARAMETERS]
    if not isinstance(parameters, list) or len(parameters) != len(PARAMETERS):
        raise InvalidInput(f"{where}.parameters is {parameters!r}; give the seven numbers {', '.join(PARAMETERS)}")
    batch = entry.get("batch")
    if not isinstance(batch, dict):
        raise InvalidInput(f"{where}.batch is {batch!r}; give {{initial, maximum, local_min, local_max}}")
    limits = BatchLimits(
        *(
            int(_number(f"{where}.batch", batch, k, whole=True))
            for k in ("initial", "maximum", "local_min", "local_max")
        )
    )
    noise = _number(where, entry, "noise_scale")
    model = GoodputModel(
        PublishedThroughput(*(float(p) for p in parameters)),
        Efficiency(limits.initial, 1.0, noise / limits.initial),
        limits,
    )
    most = min(int(_number(where, entry, "max_gpus", whole=True, default=64)), model.max_gpus)
    placement = None
    if entry.get("placement"):
        known = {node.id for node in nodes}
        unknown = next((node for node in entry["placement"] if node not in known), None)
        if unknown is not None:
            raise InvalidInput(f"{where}.placement names node '{unknown}', which is not among the nodes")
        placement = Placement.of({str(node): int(count) for node, count in entry["placement"].items()})
    view = JobView(
        str(entry.get("id", f"job-{i}")),
        now - _number(where, entry, "age", default=0.0),
        JobLimits(int(_number(where, entry, "min_gpus", whole=True, default=1)), most),
        weight=float(entry.get("weight", 1.0)),
        num_restarts=int(_number(where, entry, "restarts", whole=True, default=0)),
        largest_gpus=int(_number(where, entry, "largest_gpus", whole=True, default=most)),
        resize_cost_seconds=_number(where, entry, "resize_seconds", default=30.0),
        goodput=model,
    )
    return view, placement


def _number(
    where: str, entry: dict[str, Any], field: str, *, whole: bool = False, default: float | None = None
) -> float:
    value = entry.get(field, default)
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not good or (whole and value != int(value)):
        kind = "a whole number" if whole else "a finite number"
        raise InvalidInput(f"{where}.{field} is {value!r}; give {kind}, 0 or more")
    return float(value)


def run_instance(path: Path) -> dict[str, Any]:
    """Allocation, quality and time of one instance."""
    snapshot, fairness = read_instance(path)
    policy = create("pollux", fairness=fairness)
    held = check(snapshot, Decision(snapshot.running))
    if held:
        raise InvalidInput(f"{path}: the current placements are illegal: {held[0]}")
    decision = decide(policy, snapshot)
    judge = Judge(snapshot, fairness)
    return {
        "allocation": {job.id: dict(decision.allocation[job.id].shares) if job.id in decision.allocation else {}
                       for job in snapshot.jobs},
        "quality": judge.quality(decision),
        "fitness": judge.fitness(decision),
        "bound": judge.bound(),
        "idle_usable_gpus": judge.idle_usable_gpus(decision),
        "decision_ms": cpu_ms(lambda: decide(policy, snapshot), REPEATS),
        "gpus": snapshot.cluster.num_gpus,
        "jobs": len(snapshot.jobs),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--instance", type=Path, help="solve one instance from a JSON file")
    arguments = parser.parse_args()
    if arguments.instance:
        try:
            print(json.dumps(run_instance(arguments.instance)))
        except InvalidInput as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(error.exit_code) from None
        return
    rows = []
    for i, snapshot in enumerate(history(create("pollux"), 4 if arguments.quick else 20)):
        rows.append(measure(replace(snapshot, memory=None), "history", i, True))
    for nodes, gpus, jobs, seeds, genetic in QUICK if arguments.quick else SIZES:
        for case in CASES:
            for seed in range(arguments.seed, arguments.seed + seeds):
                snapshot = make(create("pollux"), case, nodes, gpus, jobs, seed)
                rows.append(measure(snapshot, case, seed, genetic))
    finish("allocate", {"sizes": rows, "summary": summary(rows)}, arguments.quick)


if __name__ == "__main__":
    main()
