"""Real training jobs on CPU slots: `castor` against `pollux`, and against `fifo` with the users' fixed sizes.

    python benchmarks/local.py [--quick] [--seed N] [--repeats 20] [--runs FILE]

A workload that does not change (`local_train.py`: a long job first, short ones after), in a service of its own each
time, which knows nothing of earlier jobs. A labelled wait stands for a GPU's computing; gradients, communication,
checkpoints and resizes are real. A repeat is one run under each policy, in turns, with one seed. Each run is appended
to FILE with its commit; a call that is made again does what is missing. `eta` says how good predicted intervals were.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import RESULTS, finish, today

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples" / "demo"))

from cluster import Request, Service, Watched, run  # noqa: E402  the demonstration is no package

SLOTS = 4
POLICIES = ("castor", "pollux", "fifo")
TRAIN = HERE / "local_train.py"
WORKLOAD = (
    Request("long", 0.0, 8, 2, seed=1, script=TRAIN),
    Request("short-a", 6.0, 2, 2, seed=2, script=TRAIN),
    Request("short-b", 12.0, 2, 2, seed=3, script=TRAIN),
    Request("short-c", 18.0, 2, 2, seed=4, script=TRAIN),
    Request("short-d", 24.0, 2, 2, seed=5, script=TRAIN),
)
# Student's t for a two-sided 95 % interval, by degrees of freedom.
T_95 = (12.71, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.2, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.1, 2.09)


def one_run(policy: str, seed: int, quick: bool) -> dict[str, Any]:
    """The whole workload under one policy, in a folder that is gone afterwards."""
    workload = tuple(
        replace(job, seed=job.seed + 100 * seed, epochs=max(job.epochs // (2 if quick else 1), 1)) for job in WORKLOAD
    )
    seen: dict[str, Watched] = {}
    with tempfile.TemporaryDirectory(prefix="pollux-local-") as folder, Service(Path(folder), policy, SLOTS) as service:
        run(service, workload, seen)
        eta = service.get("/v1/eta")
    return {
        "policy": policy,
        "seed": seed,
        "commit": commit(),
        "date": today(),
        "mean_completion_seconds": round(statistics.mean(job.completion_seconds for job in seen.values()), 2),
        "completion_seconds": {name: round(job.completion_seconds, 1) for name, job in seen.items()},
        "accuracy": {name: job.accuracy for name, job in seen.items()},
        "failed": [name for name, job in seen.items() if job.state != "succeeded"],
        "eta": eta,
    }


def commit() -> str:
    """The commit that is checked out, with a plus where files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()


def compare(runs: dict[tuple[str, int], dict[str, Any]], ours: str, theirs: str) -> dict[str, Any]:
    """Ratios of the average completion times, paired by seed, with the 95 % interval of their mean."""
    seeds = sorted(seed for policy, seed in runs if policy == ours and (theirs, seed) in runs)
    ratios = [
        runs[ours, seed]["mean_completion_seconds"] / runs[theirs, seed]["mean_completion_seconds"] for seed in seeds
    ]
    mean = statistics.mean(ratios)
    interval = None
    if len(ratios) > 1:
        t = T_95[len(ratios) - 2] if len(ratios) - 2 < len(T_95) else 2.09
        half = t * statistics.stdev(ratios) / len(ratios) ** 0.5
        interval = [round(mean - half, 3), round(mean + half, 3)]
    return {
        "mean": round(mean, 3),
        "interval": interval,
        "largest": round(max(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def known(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The runs that a file holds, by policy and seed; a last line that was not written whole is left out."""
    if not path.exists():
        return {}
    *whole, last = path.read_text(encoding="utf-8").split("\n")
    lines = [json.loads(line) for line in whole if line]
    if last:
        print(f"{path}: the last line was not written whole; its run is made again", flush=True)
        path.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")
    return {(line["policy"], line["seed"]): line for line in lines}


def summary(runs: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    """What all runs say, policy by policy."""
    by_policy = {policy: [run for (name, _), run in sorted(runs.items()) if name == policy] for policy in POLICIES}
    against_pollux, against_fifo = compare(runs, "castor", "pollux"), compare(runs, "castor", "fifo")
    return {
        "castor_over_fifo_mean": against_fifo["mean"],
        "castor_over_pollux_upper": against_pollux["interval"] and against_pollux["interval"][1],
        "castor_over_pollux_largest": against_pollux["largest"],
        "castor_over_pollux": against_pollux,
        "castor_over_fifo": against_fifo,
        "pollux_over_fifo": compare(runs, "pollux", "fifo"),
        "mean_completion_seconds": {
            policy: round(statistics.mean(run["mean_completion_seconds"] for run in those), 1)
            for policy, those in by_policy.items()
        },
        "mean_accuracy": {
            policy: round(statistics.mean(value for run in those for value in run["accuracy"].values() if value), 4)
            for policy, those in by_policy.items()
        },
        "eta": {policy: [run["eta"] for run in those] for policy, those in by_policy.items()},
        "failed": [f"{run['policy']}/{run['seed']}/{name}" for run in runs.values() for name in run["failed"]],
        "commits": sorted({run["commit"] for run in runs.values()}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat of half the length")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--runs", type=Path, default=RESULTS / "local_runs.jsonl", help="where runs are kept")
    arguments = parser.parse_args()
    runs = {} if arguments.quick else known(arguments.runs)
    seeds = range(arguments.seed, arguments.seed + (1 if arguments.quick else arguments.repeats))
    for repeat, seed in enumerate(seeds):
        turn = repeat % len(POLICIES)
        for policy in POLICIES[turn:] + POLICIES[:turn]:
            if (policy, seed) in runs:
                continue
            done = runs[policy, seed] = one_run(policy, seed, arguments.quick)
            if not arguments.quick:
                with arguments.runs.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done) + "\n")
            print(f"seed {seed}, {policy}: {done['mean_completion_seconds']} s on average", done["completion_seconds"])
            sys.stdout.flush()
    wanted = {key: run for key, run in runs.items() if key[1] in seeds}
    result = {**summary(wanted), "slots": SLOTS, "seed": arguments.seed, "repeats": len(seeds)}
    finish("local", result, quick=arguments.quick)


if __name__ == "__main__":
    main()
