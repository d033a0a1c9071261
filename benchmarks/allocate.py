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
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bound import Judge
from instance_file import read_instance
from instances import CASES, SEARCH_ROUNDS, history, make
from measure import cpu_ms, finish

from pollux.core import Decision, InvalidInput, Snapshot, check, plan
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
