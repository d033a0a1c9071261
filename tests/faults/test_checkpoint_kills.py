"""Kill -9 while checkpoints are written: whatever the moment, a whole state is found, none older than was reported.

Half of the kills come after a random time, half at a random file operation of the writer. `POLLUX_FAULT_EVENTS` sets
their number, `POLLUX_FAULT_SEED` the seed. Run as a script, this file plays the writers: it imports torch once and
forks a process for each kill and for each look at what is left.
"""

import json
import os
import random
import select
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tests.support.forking import fork, read_all

from pollux.agent.checkpoint.checkpointer import Checkpointer
from pollux.agent.checkpoint.reader import load
from pollux.agent.checkpoint.state import State
from pollux.testing.waiting import PATIENCE_SECONDS

EVENTS = int(os.environ.get("POLLUX_FAULT_EVENTS", "10"))
SEED = int(os.environ.get("POLLUX_FAULT_SEED", "20211"))
KEEP = 2
REPOSITORY = Path(__file__).resolve().parents[2]
FILE_OPERATIONS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree"}


def test_kills_at_random_moments(tmp_path):
    print(f"seed {SEED}, {EVENTS} events")
    result = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "c"), str(SEED), str(EVENTS)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS + 5 * EVENTS,
    )
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(events) == EVENTS
    assert [event for event in events if event["problems"]] == []
    assert events[-1]["found"] > 0, "something was saved"
    assert sum(event["killed"] for event in events) >= 0.9 * EVENTS, "most writers were killed, not done"
    left = {path.name for path in (tmp_path / "c").iterdir()} - {".lock"}
    assert len([name for name in left if name.startswith("step-")]) <= KEEP + 1
    last = Checkpointer(tmp_path / "c", keep=KEEP)
    last.save(10**6, State(tensors_of(10**6), {}, {}), {}, wait=True)
    left = {path.name for path in (tmp_path / "c").iterdir()} - {".lock"}
    assert len(left) == KEEP, "what the dead left is gone after the next save"
    last.close()


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    tensors = {f"model.{index}": torch.full((50_000,), float(step + index)) for index in range(8)}
    return {**tensors, "optimizer.step": torch.tensor(float(step))}


def write_until_killed(path: Path, report: int, operations: int | None) -> None:
    """Save one step after the other, and say which are on disk; die at the given file operation, if any."""
    checkpointer = Checkpointer(path, keep=KEEP)
    newest = checkpointer.latest()
    first = 1 if newest is None else newest.manifest.step + 1
    os.write(report, b"ready\n")
    if operations is not None:
        die_at(operations, path)
    for step in range(first, first + 1000):
        checkpointer.save(step, State(tensors_of(step), {"user": {"step": step}}, {"step": step}), {})
        # A save is reported when the next one has waited for it.
        saved = checkpointer.last_saved
        if saved is not None:
            os.write(report, f"{saved.manifest.step}\n".encode())


def die_at(operations: int, path: Path) -> None:
    left = [operations]

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FILE_OPERATIONS and arguments and str(arguments[0]).startswith(str(path)):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def look(path: Path, report: int) -> None:
    """Say which step is found and what is wrong with it."""
    problems: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpointer = Checkpointer(path, keep=KEEP)
        saved = checkpointer.latest()
    problems += [str(warning.message) for warning in caught]
    if saved is not None:
        loaded = load(saved)
        wrong = [
            name
            for name, tensor in tensors_of(saved.manifest.step).items()
            if not torch.equal(loaded.tensors[name], tensor)
        ]
        problems += [f"{name} is not that of step {saved.manifest.step}" for name in wrong]
        if not (loaded.objects["user"] == loaded.values == {"step": saved.manifest.step}):
            problems.append(f"objects {loaded.objects} and values {loaded.values} at step {saved.manifest.step}")
    found = 0 if saved is None else saved.manifest.step
    os.write(report, (json.dumps({"found": found, "problems": problems}) + "\n").encode())


def event(path: Path, generator: random.Random) -> dict[str, Any]:
    """One writer's life and what it leaves."""
    operations = generator.randrange(1, 80) if generator.random() < 0.5 else None
    seconds = generator.uniform(0.0, 0.4) if operations is None else 20.0
    child, reading = fork(write_until_killed, path, operations)
    began = os.read(reading, 6)
    watched = os.pidfd_open(child)
    select.select([watched], [], [], seconds)
    os.close(watched)
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    reported = max((int(line) for line in read_all(reading).splitlines()), default=0)
    looker, reading = fork(look, path)
    seen = json.loads(read_all(reading) or '{"found": 0, "problems": ["the look at it failed"]}')
    os.waitpid(looker, 0)
    if seen["found"] < reported:
        seen["problems"].append(f"step {reported} was reported as saved, {seen['found']} is the newest found")
    if began != b"ready\n":
        seen["problems"].append("the writer did not start")
    moment = {"operations": operations, "seconds": seconds, "reported": reported}
    return {**moment, **seen, "killed": status == -signal.SIGKILL}


if __name__ == "__main__":
    draw = random.Random(int(sys.argv[2]))
    newest_found = 0
    for _ in range(int(sys.argv[3])):
        what = event(Path(sys.argv[1]), draw)
        if what["found"] < newest_found:
            what["problems"].append(f"step {newest_found} was there before, {what['found']} is the newest now")
        newest_found = max(newest_found, what["found"])
        print(json.dumps(what), flush=True)
