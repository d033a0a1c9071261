"""A storm of 20 clients while the service restarts, its disk is full at times and the wall clock jumps.

`POLLUX_FAULT_EVENTS` sets the number of disturbances, `POLLUX_FAULT_SEED` the seed. Real threads, a real store on disk,
and a backend whose replicas start by themselves and end as the test says. In the end every job that was acknowledged
has ended as it should, and the state is what the log says.
"""

import os
import random
import threading
import time
from collections import Counter

import pytest

from pollux import policies
from pollux.controller import Controller, ControllerSettings, JobState
from pollux.core import Cluster, Node
from pollux.core.errors import PolluxError, StoreFailed
from pollux.service import Engine, ServiceSettings, Tokens
from pollux.service.settings.clock import SystemClock
from pollux.store import MemoryTelemetry
from pollux.store.sqlite import SqliteStore
from pollux.testing.servers.service import FakeBackend, result_of, sample_report
from pollux.testing.waiting import PATIENCE_SECONDS, OutOfTime
from pollux.wire.job import JobRequest

EVENTS = int(os.environ.get("POLLUX_FAULT_EVENTS", "12"))
SEED = int(os.environ.get("POLLUX_FAULT_SEED", "20218"))
CLIENTS = 20
OUTCOMES = ("succeeded", "succeeded", "crashed", "lost", "stopped", "out-of-memory")


class FullDisk(SqliteStore):
    """A store whose disk takes nothing while `full`."""

    full = False

    def append(self, events):
        if self.full and events:
            raise StoreFailed("no space left on device")
        return super().append(events)

    def save(self, saved):
        if self.full:
            raise StoreFailed("no space left on device")
        super().save(saved)


class Storm:
    """The service, everything around it, and what its clients were told."""

    def __init__(self, home):
        self.home = home
        self.offset = 0.0
        self.backend = FakeBackend([Node(f"n{number}", 4, "cpu") for number in range(4)], by_itself=True)
        self.acknowledged = {}
        self.cancelled = set()
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.refusals: Counter[str] = Counter()
        self.engine = self.new_engine()

    def new_engine(self):
        self.store = FullDisk(self.home / "facts.db")
        clock = SystemClock(wall=lambda: time.time() + self.offset)
        settings = ServiceSettings(home=self.home, policy="fifo", url="http://127.0.0.1:1", min_gap_seconds=0.05)
        engine = Engine(
            policies.create("fifo"), self.backend, self.store, MemoryTelemetry(), settings, clock, Tokens.random()
        )
        engine.start()
        return engine

    def client(self, number):
        """Submit, change and end jobs, whatever the service says to it."""
        chance, count = random.Random(f"{SEED} {number}"), 0
        while not self.over.is_set():
            count += 1
            name = f"c{number}-{count}"
            if not self.ask(lambda name=name: self.submit(name)):
                self.over.wait(0.02)
                continue
            for _ in range(chance.randint(0, 2)):
                what = chance.choice(("pause", "resume", "resize", "report", "end"))
                self.ask(lambda what=what, name=name: self.change(what, name, chance))
            if chance.random() < 0.2 and self.ask(lambda name=name: result_of(self.engine.cancel(name))):
                self.cancelled.add(name)

    def ask(self, action):
        """Whether it was done; a refusal with an error of ours is an answer, anything else is a defect."""
        try:
            action()
        except PolluxError as error:
            with self.lock:
                self.refusals[type(error).__name__] += 1
            return False
        return True

    def submit(self, name):
        request = JobRequest(name, ("x",), min_gpus=1, max_gpus=2, workdir=str(self.home), retries=100)
        status, _ = result_of(self.engine.submit(request, key=name))
        assert status.id == name
        with self.lock:
            self.acknowledged[name] = True

    def change(self, what, name, chance):
        if what == "end":
            self.end(name, chance.choice(OUTCOMES))
        elif what == "report":
            generation = self.engine.job(name).generation
            result_of(self.engine.report(name, sample_report(generation, progress=chance.random() * 100.0)))
        elif what == "resize":
            result_of(self.engine.resize(name, 1, chance.randint(1, 4)))
        else:
            result_of(getattr(self.engine, what)(name))

    def end(self, name, outcome):
        entry = next((each for each in self.backend.running() if each.job_id == name), None)
        if entry is not None and entry.state == "running":
            self.backend.ended(name, outcome)

    def disturb(self, chance):
        """A restart, a window in which the disk is full, or a jump of the wall clock."""
        what = chance.choice(("restart", "full", "jump", "jump back"))
        if what == "restart":
            self.engine.stop("keep")
            self.engine = self.new_engine()
        elif what == "full":
            self.store.full = True
            self.over.wait(chance.random() * 0.4)
            self.store.full = False
        else:
            self.offset += chance.choice((1.0, 3600.0, 8_640_000.0)) * (1.0 if what == "jump" else -1.0)
        self.over.wait(0.1)

    def finish(self):
        """Let every job that is left end."""
        self.over.set()
        self.store.full = False
        done = threading.Event()
        for _ in range(int(PATIENCE_SECONDS / 0.05)):
            left = [status for status in self.engine.jobs() if status.state not in ("succeeded", "failed", "cancelled")]
            if not left:
                return
            for status in left:
                if status.state == "paused":
                    self.ask(lambda name=status.id: result_of(self.engine.resume(name)))
                self.end(status.id, "succeeded")
            done.wait(0.05)
        raise OutOfTime(f"{len(left)} jobs are left, of them {left[:3]}")


def lives_of(controller):
    return {
        job_id: (str(record.state), record.generation, record.crashes, record.placement)
        for job_id, record in controller.jobs.items()
    }


def files_open():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def storm(tmp_path):
    made = Storm(tmp_path)
    yield made
    made.over.set()
    made.engine.stop("keep")


def test_every_job_is_accounted_for_and_the_state_is_what_the_log_says(storm):
    chance = random.Random(SEED)
    threads = [threading.Thread(target=storm.client, args=(number,)) for number in range(CLIENTS)]
    before, restarts = files_open(), threading.active_count()
    for thread in threads:
        thread.start()
    for _ in range(EVENTS):
        storm.disturb(chance)
    storm.over.set()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    storm.finish()
    states = {status.id: status.state for status in storm.engine.jobs()}
    assert set(storm.acknowledged) <= set(states), "an acknowledged job is gone"
    assert len(storm.acknowledged) > CLIENTS
    wrong = {name: states[name] for name in storm.cancelled if states[name] != JobState.CANCELLED}
    assert not wrong, wrong
    assert all(states[name] in ("succeeded", "cancelled") for name in storm.acknowledged)
    folded = Controller(Cluster(()), ControllerSettings(trigger="events", min_gap_seconds=0.05))
    for _, event in storm.store.read(0):
        folded.apply(event)
    assert lives_of(folded) == lives_of(storm.engine.pipeline.controller)
    assert not [each for each in storm.backend.running() if each.state == "running"]
    assert files_open() <= before + 8
    assert threading.active_count() <= restarts + 4
