"""Nodes killed under training jobs on a real Slurm and a real Ray: how long until the rest trains on, and what is lost.

    python benchmarks/node_kills.py [--quick] [--kills N] [--only slurm|ray]

Runs the tests that do it (`tests/integration/slurm`, `tests/integration/ray`) with so many kills on each engine,
several under one job, and reads what they recorded. Each also checks that every pass had every sample once, that losses
or parameters are those of one process, and that the engine itself had not yet seen the death. Needs what
`make test-slurm` and `make test-ray` need.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import finish

ROOT = Path(__file__).resolve().parents[1]
# What `--events` of the tests stands for: a tenth of it are kills of Ray's nodes, five under a job.
EVENTS = {"slurm": 1, "ray": 10}
TESTS = {
    "slurm": ("tests/integration/slurm/test_service.py", "outlives"),
    "ray": ("tests/integration/ray/test_training.py", "nodes_are_killed"),
}


def killed(engine: str, kills: int) -> dict[str, Any]:
    """What the engine's test recorded of so many kills; the script ends where it failed."""
    path, name = TESTS[engine]
    words = [sys.executable, "-m", "pytest", "-s", "-m", engine, path, "-k", name, "--force-reruns", "0"]
    words += ["--events", str(EVENTS[engine] * kills)]
    if engine == "ray":
        words = [str(ROOT / "tools" / "ray" / "inside.sh"), *words]
    with tempfile.TemporaryDirectory(prefix="pollux-kills-") as folder:
        environ = {**os.environ, "POLLUX_RECORD": folder, "OMP_NUM_THREADS": "1", "CI": "true"}
        done = subprocess.run(words, cwd=ROOT, env=environ, stdout=sys.stderr, check=False)
        record = Path(folder) / f"node_kills_{engine}.json"
        if done.returncode or not record.exists():
            raise SystemExit(f"{engine}: the test failed with exit code {done.returncode}; what it said is above")
        found: dict[str, Any] = json.loads(record.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three kills on each engine")
    parser.add_argument("--kills", type=int, default=10, help="kills on each engine, by fives")
    parser.add_argument("--only", choices=tuple(TESTS), help="one engine; nothing is kept")
    parser.add_argument("--seed", type=int, default=0, help="unused: nothing here is drawn")
    arguments = parser.parse_args()
    if arguments.kills < 5 or arguments.kills % 5:
        parser.error(f"--kills is {arguments.kills}: give 5, 10, 15, ..., since five are made under each of Ray's jobs")
    figures: dict[str, Any] = {}
    for engine in (arguments.only,) if arguments.only else tuple(TESTS):
        found = killed(engine, 3 if arguments.quick else arguments.kills)
        seconds = found["seconds_to_resume"]
        print(f"{engine}: {found['kills']} kills, trains on after {min(seconds)} to {max(seconds)} s", flush=True)
        figures |= {
            f"{engine}_kills": found["kills"],
            f"{engine}_seconds_to_resume": seconds,
            f"{engine}_samples_lost": found["samples_lost"],
            f"{engine}_samples_repeated": found["samples_repeated"],
        }
    if not arguments.only:
        figures["kills"] = figures["slurm_kills"] + figures["ray_kills"]
        figures["samples_lost_or_repeated"] = sum(
            figures[f"{engine}_samples_{kind}"] for engine in TESTS for kind in ("lost", "repeated")
        )
    finish("node_kills", figures, arguments.quick or arguments.only is not None)


if __name__ == "__main__":
    main()
