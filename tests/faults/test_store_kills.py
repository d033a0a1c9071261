"""Kill -9 while facts are appended: all that was acknowledged is there, batches are whole, snapshots fit the log.

Half of the kills come after a random time, half inside a random call into SQLite. `POLLUX_FAULT_EVENTS` sets their
number, `POLLUX_FAULT_SEED` the seed. Run as a script, this file plays the writers: it imports the package once and
forks a process for each kill and for each look at what is left.
"""

import contextlib
import json
import os
import random
import select
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.forking import fork, read_all

from pollux.controller import Event, JobPaused
from pollux.store import SavedState, TelemetryRow, open_store, open_telemetry
from pollux.store.sqlite import SqliteStore
from pollux.testing.waiting import PATIENCE_SECONDS

EVENTS = int(os.environ.get("POLLUX_FAULT_EVENTS", "12"))
SEED = int(os.environ.get("POLLUX_FAULT_SEED", "20214"))
REPOSITORY = Path(__file__).resolve().parents[2]


def test_kills_at_random_moments(tmp_path):
    print(f"seed {SEED}, {EVENTS} events")
    result = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(SEED), str(EVENTS)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS + 5 * EVENTS,
    )
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(events) == EVENTS
    assert [event for event in events if event["problems"]] == []
    assert events[-1]["found"] > 0, "something was written"
    assert any(event["snapshots"] for event in events), "some logs had snapshots"
    others = [event for event in events if event["exit"] != -signal.SIGKILL]
    assert len(others) <= 0.1 * EVENTS, f"most writers were killed, not done: {others}\n{result.stderr}"


def batch_of(first: int) -> list[Event]:
    """The batch that begins at a revision; its length and facts follow from that number alone."""
    length = 1 + first % 7
    return [JobPaused(float(first + index), f"{first}/{length}") for index in range(length)]


def folded(state: dict[str, Any], revision: int, event: Event) -> dict[str, Any]:
    """A state that depends on every fact and on their order."""
    assert isinstance(event, JobPaused)
    mixed = (state["sum"] * 31 + hash((revision, event.at))) % 1_000_000_007
    return {"sum": mixed, "count": state["count"] + 1}


EMPTY: dict[str, Any] = {"sum": 0, "count": 0}


def write_until_killed(folder: Path, report: int, calls: int | None) -> None:
    """Append batch after batch and say which revision was acknowledged; now and then save, trim and measure."""
    store = open_store(folder / "store.sqlite")
    telemetry = open_telemetry(folder / "telemetry.sqlite")
    saved = store.load()
    state = EMPTY if saved is None else dict(saved.state)
    for revision, event in store.read(0 if saved is None else saved.revision):
        state = folded(state, revision, event)
    os.write(report, b"ready\n")
    if calls is not None:
        die_at(calls, store)
    for _ in range(2000):
        first = store.revision + 1
        batch = batch_of(first)
        last = store.append(batch)
        os.write(report, f"{last}\n".encode())
        for revision, event in enumerate(batch, start=first):
            state = folded(state, revision, event)
        if first % 5 == 0:
            telemetry.record([TelemetryRow("job", float(last), "report", {"revision": last, "text": "x" * 500})])
            os.write(report, f"measured {last}\n".encode())
        if first % 11 == 0:
            store.save(SavedState(last, state))
        if first % 23 == 0:
            store.trim(last - 200.0)


def die_at(calls: int, store: Any) -> None:
    """End this process inside SQLite, when its virtual machine has been at work for so many ticks."""
    left = [calls]

    def count() -> int:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    store._database._writer.set_progress_handler(count, 1)


def look(folder: Path, report: int, acknowledged: int, measured: int) -> None:
    """Say what is found and what is wrong with it."""
    with contextlib.closing(open_store(folder / "store.sqlite")) as store:
        problems = problems_of(store, acknowledged)
        saved = store.load()
        found = {"found": store.revision, "snapshots": 0 if saved is None else saved.revision}
    with contextlib.closing(open_telemetry(folder / "telemetry.sqlite")) as telemetry:
        newest = telemetry.latest("report").get("job")
        if measured and (newest is None or newest.at < measured):
            problems.append(f"the measurement of {measured} was acknowledged, the newest is {newest}")
    for name in ("store.sqlite", "telemetry.sqlite"):
        with contextlib.closing(sqlite3.connect(folder / name)) as connection:
            verdict = connection.execute("PRAGMA integrity_check").fetchone()[0]
            if verdict != "ok":
                problems.append(f"{name}: {verdict}")
    os.write(report, (json.dumps({**found, "problems": problems}) + "\n").encode())


def problems_of(store: Any, acknowledged: int) -> list[str]:
    assert isinstance(store, SqliteStore)
    problems = []
    if store.revision < acknowledged:
        problems.append(f"revision {acknowledged} was acknowledged, the log ends at {store.revision}")
    log = dict(store.read())
    if list(log) != list(range(min(log, default=1), store.revision + 1)):
        problems.append(f"the log has holes between {min(log)} and {store.revision}")
    first = 1
    states = {0: EMPTY}
    while first <= store.revision:
        for revision, event in enumerate(batch_of(first), start=first):
            states[revision] = folded(states[revision - 1], revision, event)
            if revision in log and log[revision] != event:
                problems.append(f"fact {revision} is {log[revision]}, {event} was written")
            if revision > store.revision:
                problems.append(f"the batch from {first} on is torn at {store.revision}")
        first += len(batch_of(first))
    saved = store.load()
    base, state = (0, EMPTY) if saved is None else (saved.revision, dict(saved.state))
    for revision, event in store.read(base):
        state = folded(state, revision, event)
    if state != states[store.revision]:
        problems.append(f"snapshot of {base} and the rest give {state}, the whole log {states[store.revision]}")
    return problems


def event(folder: Path, generator: random.Random) -> dict[str, Any]:
    """One writer's life and what it leaves."""
    calls = generator.randrange(1, 20_000) if generator.random() < 0.5 else None
    seconds = generator.uniform(0.0, 0.6) if calls is None else 20.0
    child, reading = fork(write_until_killed, folder, calls)
    began = os.read(reading, 6)
    watched = os.pidfd_open(child)
    ended = bytearray()
    until = time.monotonic() + seconds
    # Read while waiting: a pipe that is full would stop the writer.
    while select.select([watched, reading], [], [], max(until - time.monotonic(), 0.0))[0] == [reading]:
        ended += os.read(reading, 65536)
        if time.monotonic() > until:
            break
    os.close(watched)
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    lines = (ended.decode() + read_all(reading)).splitlines()
    acknowledged = max((int(line) for line in lines if line.isdigit()), default=0)
    measured = max((int(line.split()[1]) for line in lines if line.startswith("measured ")), default=0)
    looker, reading = fork(look, folder, acknowledged, measured)
    seen = json.loads(read_all(reading) or '{"found": 0, "snapshots": 0, "problems": ["the look at it failed"]}')
    os.waitpid(looker, 0)
    if began != b"ready\n":
        seen["problems"].append("the writer did not start")
    return {"calls": calls, "acknowledged": acknowledged, **seen, "exit": status}


if __name__ == "__main__":
    draw = random.Random(int(sys.argv[2]))
    newest_found = 0
    for number in range(int(sys.argv[3])):
        # Several kills hit one log; a new one now and then keeps the looks at it short.
        if number % 20 == 0:
            newest_found = 0
        what = event(Path(sys.argv[1]) / f"home-{number // 20}", draw)
        if what["found"] < newest_found:
            what["problems"].append(f"revision {newest_found} was there before, {what['found']} is the last now")
        newest_found = max(newest_found, what["found"])
        print(json.dumps(what), flush=True)
