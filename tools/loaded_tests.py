#!/usr/bin/env python3
"""Runs `make test` while other work loads every core and the disk, and appends one line about it to a file that lasts.

    python tools/loaded_tests.py                   # one run; the line goes to benchmarks/results/loaded_tests.jsonl
    python tools/loaded_tests.py --runs 3 --target test-slurm

A race is a defect: it shows under load first, as a failure or as a test that passed only when it was tried again. The
exit code is 1 where there was either. The other work ends with this process, whatever ends it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from measure import hardware  # noqa: E402  benchmarks/ is no package

RESULTS = REPOSITORY / "benchmarks" / "results" / "loaded_tests.jsonl"
# Busy in Python and in the kernel; both look for their parent, so that none is left over.
_COMPUTES = "import os\nwhile os.getppid() == {parent}:\n    sum(number * number for number in range(200_000))\n"
_WRITES = (
    "import os, tempfile, time\n"
    "with tempfile.NamedTemporaryFile() as file:\n"
    "    while os.getppid() == {parent}:\n"
    "        file.seek(0)\n        file.write(os.urandom(1 << 20))\n        os.fsync(file.fileno())\n"
    "        time.sleep(0.02)\n"
)


def start_load(cores: int) -> list[subprocess.Popen[bytes]]:
    """One process that computes for each core, and one that writes to the disk."""
    sources = [_COMPUTES] * cores + [_WRITES]
    return [subprocess.Popen([sys.executable, "-c", each.format(parent=os.getpid())]) for each in sources]


def run(target: str, cores: int, log: Path) -> dict[str, Any]:
    """One run of a Make target under load: what each of its pytest runs recorded, added up."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        load = start_load(cores)
        began = time.time()
        try:
            with log.open("ab") as output:
                ended = subprocess.run(
                    ["make", target],
                    cwd=REPOSITORY,
                    env={**os.environ, "POLLUX_TEST_RECORD": str(record)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
        finally:
            for process in load:
                process.kill()
                process.wait()
        lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": _commit(),
        "target": target,
        "busy_processes": cores,
        "exit": ended.returncode,
        "seconds": round(time.time() - began),
        "parts": len(lines),
        "passed": sum(line["passed"] for line in lines),
        "skipped": sum(line["skipped"] for line in lines),
        "failed": [name for line in lines for name in line["failed"] + line["error"]],
        "rerun": [name for line in lines for name in line["rerun"]],
        "hardware": hardware(),
    }


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    """Run as asked; 1 where a run failed, or a test was tried again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="test", help="the Make target (default: test)")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument(
        "--load", type=int, default=len(os.sched_getaffinity(0)), help="busy processes (default: cores)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.runs < 1 or given.load < 0:
        parser.error("--runs is at least 1, --load at least 0")
    log = REPOSITORY / "build" / "loaded_tests.log"
    log.parent.mkdir(exist_ok=True)
    clean = True
    for _ in range(given.runs):
        line = run(given.target, given.load, log)
        clean = clean and line["exit"] == 0 and not line["failed"] and not line["rerun"]
        with given.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
    if not clean:
        print(f"a run failed, or a test was tried again; the output is in {log}", file=sys.stderr)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
