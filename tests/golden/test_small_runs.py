"""Every job's life in a small run, against stored tables.

A difference means that somebody decided or timed otherwise than before. If that is intended, record anew and look
at the difference before it is committed:

    POLLUX_RERECORD=1 .venv/bin/pytest tests/golden/test_small_runs.py
"""

import os
from pathlib import Path
from typing import Any

import pytest

from pollux.goodput import BatchLimits
from pollux.policies import create
from pollux.sim.simulation.simulation import RunOutcome, SimulationSettings, simulate
from pollux.sim.workloads.workload import Workload, WorkloadJob
from pollux.testing import FakeApplication

TABLES = Path(__file__).resolve().parent / "tables"

APPLICATIONS = {
    "short": FakeApplication("short", progress=(300.0, 600.0), compute_seconds=0.8, seconds_per_sample=0.02),
    "long": FakeApplication(
        "long",
        limits=BatchLimits(20, 320, 5, 40),
        progress=(2500.0, 5000.0, 7500.0),
        compute_seconds=0.3,
        seconds_per_sample=0.03,
        sync_seconds=0.2,
        grad_sqr=0.05,
    ),
}

WORKLOAD = Workload(
    "small",
    tuple(
        WorkloadJob(f"{application}-{index}", time, application, num_gpus, batch_size)
        for index, (time, application, num_gpus, batch_size) in enumerate(
            [
                (0, "long", 4, 80),
                (10, "short", 1, 10),
                (65, "long", 8, 160),
                (130, "short", 2, 20),
                (135, "short", 4, 40),
                (140, "short", 3, 40),
                (600, "long", 2, 40),
                (610, "short", 8, 80),
                (900, "short", 1, 20),
                (2400, "long", 4, 160),
                (2410, "long", 6, 160),
                (2500, "short", 2, 20),
            ]
        )
    ),
)


def table(outcome: RunOutcome) -> str:
    rows = ["name,submitted,started,finished,restarts,gpu_seconds"]
    rows += [
        f"{job.name},{job.submitted:g},{job.started:.3f},{job.finished:.3f},{job.restarts},{job.gpu_seconds:.3f}"
        for job in outcome.jobs
    ]
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize("trigger", ["rounds", "events"])
@pytest.mark.parametrize("policy", ["fifo", "srtf", "las", "tiresias", "optimus-oracle"])
def test_run_is_as_recorded(policy, trigger):
    settings = SimulationSettings(2, 4, trigger)
    # Queues and quanta of a size that so small a run reaches.
    options: dict[str, dict[str, Any]] = {
        "tiresias": {"thresholds_gpu_seconds": (3600.0,)},
        "las": {"quantum_gpu_seconds": 1800.0},
    }
    found = table(simulate(WORKLOAD, create(policy, **options.get(policy, {})), APPLICATIONS, settings))
    path = TABLES / f"{policy}-{trigger}.csv"
    if os.environ.get("POLLUX_RERECORD") == "1":
        TABLES.mkdir(exist_ok=True)
        path.write_text(found)
    assert found == path.read_text()
