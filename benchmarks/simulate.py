"""CPU time of the simulator: one 160-job workload under `pollux`.

    python benchmarks/simulate.py [--quick] [--seed N]

Uses the published workload 6 where the published measurements are present, else a generated workload of 160
built-in jobs. The published simulator took 961 CPU seconds for the same workload and policy.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
from collections.abc import Mapping

from measure import data_folder, finish

from pollux.policies import create
from pollux.sim.applications.application import Application
from pollux.sim.applications.profiles import load_profiles
from pollux.sim.simulation.simulation import SimulationSettings, simulate
from pollux.sim.workloads.builtin import builtin_applications
from pollux.sim.workloads.generate import GenerateSettings, generate_workload
from pollux.sim.workloads.workload import Workload, read_workload

PUBLISHED_CPU_SECONDS = 961.0


def problem(seed: int) -> tuple[Workload, Mapping[str, Application]]:
    """The workload to run and the applications in it."""
    data = data_folder()
    if data is not None:
        return read_workload(data / "workloads" / "workload-6.csv"), load_profiles(data / "profiles")
    print("published measurements are absent: a generated workload is used instead", flush=True)
    applications = builtin_applications()
    return generate_workload(applications, GenerateSettings(seed=seed)), applications


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run instead of three")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    seconds, jobs, decisions = [], 0, 0
    for repeat in range(1 if arguments.quick else 3):
        workload, applications = problem(arguments.seed)
        outcome = simulate(workload, create("pollux"), applications, SimulationSettings(seed=arguments.seed))
        seconds.append(outcome.cpu_seconds)
        jobs, decisions = len(outcome.jobs), len(outcome.decision_seconds)
        print(
            f"run {repeat + 1}: {workload.name}, {jobs} jobs, {decisions} decisions, {seconds[-1]:.2f} CPU s",
            flush=True,
        )
    result = {
        "cpu_seconds": round(statistics.median(seconds), 2),
        "workload": workload.name,
        "jobs": jobs,
        "decisions": decisions,
        "published_cpu_seconds": PUBLISHED_CPU_SECONDS,
    }
    finish("simulate", result, arguments.quick)


if __name__ == "__main__":
    main()
