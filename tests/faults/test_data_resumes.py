"""Jobs stopped, killed -9 and resumed at random, at 1 to 4 replicas: no sample lost or repeated, no state damaged.

`POLLUX_FAULT_EVENTS` sets the number of events (stops and kills), `POLLUX_FAULT_SEED` the seed.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from pollux.testing.jobs.replica_server import load_module

FAULTS = load_module(str(Path(__file__).parents[2] / "benchmarks" / "agent_faults.py"))
EVENTS = int(os.environ.get("POLLUX_FAULT_EVENTS", "6"))
SEED = int(os.environ.get("POLLUX_FAULT_SEED", "20211"))


def test_stops_and_kills_lose_and_repeat_no_sample(replica_server):
    print(f"seed {SEED}, {EVENTS} events")
    tally = FAULTS.campaign(replica_server, SEED, EVENTS)
    assert tally.problems == []
    assert (tally.lost, tally.repeated, tally.failures) == (0, 0, 0)
    assert tally.stops + tally.kills == EVENTS


def test_kills_at_random_moments_of_training(replica_server):
    kills = max(EVENTS // 2, 1)
    print(f"seed {SEED + 1}, {kills} kills")
    tally = FAULTS.campaign(replica_server, SEED + 1, kills, kills_only=True)
    assert tally.problems == []
    assert (tally.lost, tally.repeated, tally.failures) == (0, 0, 0)
    assert tally.kills == kills


def history(tmp_path, replica_server, runs) -> Any:
    """A job of two passes' worth of one batch each, whose runs left these steps."""
    plan = FAULTS.Plan("map", 4, 2, 0, 0)
    tally = FAULTS.Tally()
    told = FAULTS.History(replica_server, plan, None, tally, tmp_path)
    told._runs = runs
    return told


def steps(first: int, end: int, ids=None) -> dict[int, list[dict[str, object]]]:
    taken = ids or {}
    return {
        step: [
            {"pass": step // 2, "ids": taken.get(step, [2 * (step % 2), 2 * (step % 2) + 1]), "loss": 1.0, "at": 0.0}
        ]
        for step in range(first, end)
    }


def killed(slow_write=0.0, skipped=0) -> Any:
    """A run on two replicas with a step each 10 ms, killed just before its second checkpoint is whole.

    The first, of step 20, is whole at step 25; the next is due 15 steps later and takes 5 steps to be agreed on.
    """
    begun = 40 + 15 * skipped
    steps: dict[int, list[dict[str, Any]]] = {}
    for step in range(begun + 6):
        late = slow_write if step == begun + 5 else 0.0
        busy = 20 < step < 25 or step > begun
        entry = {"step": step, "at": 100.0 + 0.01 * step + late, "busy": busy, "saved": 20 if step >= 25 else -1}
        steps[step] = [{**entry, "replica": 0}, {**entry, "replica": 1, "busy": False}]
    return FAULTS.Run(0, steps, 0.0)


@pytest.mark.parametrize(
    ("before", "begin", "failures"),
    [
        (killed(), 20, 0),
        (killed(slow_write=60.0), 20, 0),
        (killed(skipped=1), 20, 0),
        (killed(skipped=5), 20, 1),
        (killed(), 19, 1),
    ],
    ids=["usual", "slow disk", "within the allowance", "five were skipped", "older than was reported"],
)
def test_the_tally_sees_checkpoints_that_were_not_written(tmp_path, before, begin, failures):
    told = history(tmp_path, None, [before])
    told._judge_begin(FAULTS.Run(begin, {}, 0.0), "so it was")
    assert told._tally.failures == failures, told._tally.problems


def test_the_tally_sees_what_is_lost_and_repeated(tmp_path, monkeypatch):
    """Eight steps in four passes; the second run begins at step 3 although the first had come to step 5."""
    monkeypatch.setattr(FAULTS.History, "_check_ledger", lambda self, ledger: None)
    reference = dict.fromkeys(range(8), 1.0)

    def judged(second, **changes) -> tuple[int, int, int]:
        runs = [FAULTS.Run(0, steps(0, 5), 0.0), FAULTS.Run(3, second, 0.0)]
        told = history(tmp_path, None, runs)
        told._check({**reference, **changes.get("losses", {})}, [])
        return told._tally.lost, told._tally.repeated, told._tally.failures

    assert judged(steps(3, 8)) == (0, 0, 0)
    assert judged(steps(3, 8, ids={5: [2]})) == (1, 0, 0)
    assert judged(steps(3, 8, ids={5: [2, 2]})) == (1, 1, 0)
    assert judged(steps(3, 8, ids={4: [0, 1, 1]})) == (0, 1, 0)
    assert judged(steps(3, 7)) == (2, 0, 1)
    assert judged(steps(3, 8), losses={4: 1.0 + 1e-9}) == (0, 0, 1)
