"""Resizes, kills, hangs, notices and new services at random moments, on real jobs of the local backend.

Events of this kind are short: there are five for every two that `POLLUX_FAULT_EVENTS` asks for, in two tests that may
run beside each other; `POLLUX_FAULT_SEED` sets which.
"""

import os
import random
import time

import pytest

from pollux.backends.local import LocalBackend
from pollux.testing.jobs import float64_job
from pollux.testing.jobs.random_changes import EventRun

EVENTS = int(os.environ.get("POLLUX_FAULT_EVENTS", "4")) * 5 // 2
SEED = int(os.environ.get("POLLUX_FAULT_SEED", "1"))
PARTS = 2 if EVENTS > 30 else 1
MOST_EPOCHS = 50


def one_run(folder, chance, left, tell):
    """One job from its start to its end, and what happens to it on the way: `left` events at most."""
    home = folder / "home"
    home.mkdir(parents=True)
    epochs = min((30 + 4 * left) // 3, MOST_EPOCHS)

    def make():
        return LocalBackend(home, slots=4, hang_seconds=10.0)

    run = EventRun(make, folder / "job", epochs, env=float64_job.SLOW, home=home)
    try:
        run.wait_for("warm backend", lambda: run.backend.is_warm)
        run.start(2)
        run.await_running()
        for number in range(left):
            began = time.monotonic()
            came = run.change_at_random(chance)
            if not came:
                break
            tell(f"{number} {came}, {time.monotonic() - began:.1f} s")
        return run.finish()
    finally:
        run.close()


@pytest.mark.parametrize("part", range(PARTS))
def test_random_events_lose_nothing_and_end_well(tmp_path, part):
    seed = SEED * 1000 + part
    chance, left, number = random.Random(seed), EVENTS // PARTS, 0
    outcomes: dict[str, int] = {}
    print(f"seed {seed}, {left} events", flush=True)
    while left > 0:
        number += 1
        verdict = one_run(tmp_path / str(number), chance, left, lambda text: print(text, flush=True))
        print(f"job {number}: {verdict}", flush=True)
        assert verdict.events > 0
        assert (verdict.samples_lost, verdict.samples_repeated) == (0, 0)
        assert verdict.largest_difference < 1e-11
        assert verdict.exact
        left -= verdict.events
        for outcome, count in verdict.outcomes.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    print(f"seed {seed}: {dict(sorted(outcomes.items()))}", flush=True)
