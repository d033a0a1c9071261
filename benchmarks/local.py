"""Average completion time of real training jobs on CPU slots: `pollux` against `fifo` with the users' fixed sizes.

    python benchmarks/local.py [--quick] [--seed N] [--repeats N]

The jobs of `examples/demo` (a long one first, short ones after) in a service of their own each time. A labelled wait
stands for a GPU's computing; gradients, communication, checkpoints and resizes are real. The order of the two policies
alternates between repeats. `eta` says how good the predicted intervals were, of services that had learned nothing yet.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import finish

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "demo"))

from cluster import WORKLOAD, Service, Watched, run

SLOTS = 4


def one_run(policy: str, seed: int, quick: bool) -> tuple[dict[str, Watched], dict[str, Any]]:
    """The whole workload under one policy, in a folder that is gone afterwards; and how good the ETAs were."""
    jobs = tuple(
        replace(job, seed=job.seed + 100 * seed, epochs=max(job.epochs // (2 if quick else 1), 1)) for job in WORKLOAD
    )
    with tempfile.TemporaryDirectory(prefix="pollux-local-") as folder, Service(Path(folder), policy, SLOTS) as service:
        return run(service, jobs), service.get("/v1/eta")


def mean_completion(jobs: dict[str, Watched]) -> float:
    return statistics.mean(job.completion_seconds for job in jobs.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat of half the length")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    means: dict[str, list[float]] = {"pollux": [], "fifo": []}
    failed, accuracies = [], {"pollux": [], "fifo": []}
    etas: dict[str, list[dict[str, Any]]] = {"pollux": [], "fifo": []}
    for repeat in range(1 if arguments.quick else arguments.repeats):
        order = ("pollux", "fifo") if repeat % 2 == 0 else ("fifo", "pollux")
        for policy in order:
            jobs, eta = one_run(policy, arguments.seed + repeat, arguments.quick)
            etas[policy].append(eta)
            means[policy].append(mean_completion(jobs))
            accuracies[policy] += [job.accuracy for job in jobs.values() if job.accuracy is not None]
            failed += [f"{policy}/{name}" for name, job in jobs.items() if job.state != "succeeded"]
            print(
                f"repeat {repeat + 1}, {policy}: {means[policy][-1]:.1f} s on average; "
                + ", ".join(f"{name} {job.completion_seconds:.0f} s ({job.accuracy})" for name, job in jobs.items()),
                flush=True,
            )
    ratios = [ours / theirs for ours, theirs in zip(means["pollux"], means["fifo"], strict=True)]
    finish(
        "local",
        {
            "completion_ratio": round(statistics.mean(ratios), 3),
            "completion_ratios": [round(ratio, 3) for ratio in ratios],
            "mean_completion_seconds": {
                policy: [round(value, 1) for value in values] for policy, values in means.items()
            },
            "mean_accuracy": {
                policy: round(statistics.mean(values), 4) for policy, values in accuracies.items() if values
            },
            "eta": etas,
            "failed": failed,
            "slots": SLOTS,
            "seed": arguments.seed,
            "quick": arguments.quick,
        },
        quick=arguments.quick,
    )


if __name__ == "__main__":
    main()
