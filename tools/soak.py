"""Preemptions and storms for a long time: `make soak`, `make soak MINUTES=60 EVENTS=500 SEED=7`.

Runs tests of `tests/faults` in turns, each turn with a seed of its own, until so many notices of preemption were given,
or the minutes are over. What is done is kept in `build/soak/state.json`: the next call goes on there, and begins anew
once all is done. Prints each seed, and ends with 1 where a turn failed.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "build" / "soak" / "state.json"
# Events of one turn, and the tests: notices of every kind on every backend, clients that go on while services die, and
# one service that lives long, whose memory and files are measured.
TURNS = (
    (50, ("tests/faults/test_preemptions.py",)),
    (10, ("tests/faults/test_storm.py", "tests/faults/test_service_kills.py", "tests/faults/test_store_kills.py")),
    (40, ("tests/faults/test_long_service.py",)),
)


def load(seed: int | None) -> dict[str, int]:
    """What was done so far; a new soak where there is none, or another seed is asked for."""
    try:
        found: dict[str, int] = json.loads(STATE.read_text())
    except (OSError, ValueError):
        found = {}
    if not found or (seed is not None and found["seed"] != seed):
        return {"seed": secrets.randbelow(10**6) if seed is None else seed, "turns": 0, "notices": 0}
    return found


def save(state: dict[str, int]) -> None:
    """Keep it for the next call, whole or not at all."""
    STATE.parent.mkdir(parents=True, exist_ok=True)
    beside = STATE.with_suffix(".new")
    beside.write_text(json.dumps(state) + "\n")
    beside.replace(STATE)


def run(events: int, seed: int, paths: tuple[str, ...]) -> int:
    """One turn; the exit status of pytest."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--force-reruns",
        "0",
        "--events",
        str(events),
        "--seed",
        str(seed),
    ]
    return subprocess.run([*command, *paths], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


def main() -> int:
    """Turn by turn, until enough is done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--events", type=int, default=500, help="notices of preemption in all")
    parser.add_argument("--minutes", type=float, help="begin no turn after so many minutes")
    parser.add_argument("--seed", type=int, help="the seed of the first turn; the next ones count up")
    given = parser.parse_args()
    state, began = load(given.seed), time.monotonic()
    print(f"soak: seed {state['seed']}, {state['notices']} of {given.events} notices done, turn {state['turns']}")
    while state["notices"] < given.events:
        if given.minutes is not None and time.monotonic() - began > given.minutes * 60.0:
            print(f"soak: {given.minutes:g} minutes are over at turn {state['turns']}; 'make soak' goes on there")
            return 0
        events, paths = TURNS[state["turns"] % len(TURNS)]
        seed = state["seed"] + state["turns"]
        print(f"soak: turn {state['turns']}, seed {seed}, {events} events: {' '.join(paths)}", flush=True)
        if run(events, seed, paths) != 0:
            print(f"soak: failed with seed {seed}; --seed {seed} --events {events} gives the same moments again")
            return 1
        state["notices"] += events if state["turns"] % len(TURNS) == 0 else 0
        state["turns"] += 1
        save(state)
    print(f"soak: all {given.events} notices in {state['turns']} turns, nothing done twice, nothing lost")
    STATE.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
