"""The policy in a process of its own decides the same, and is replaced where it is lost."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from pollux import policies
from pollux.controller import (
    Controller,
    ControllerSettings,
    JobCancelled,
    JobSpec,
    JobSubmitted,
    NodeAdded,
    QueueChanged,
)
from pollux.core import Cluster, JobLimits, Node, Prior, Queue
from pollux.core.errors import Unreachable
from pollux.service.deciding.changes import KeptMemory, SnapshotReader, SnapshotWriter, memory_of
from pollux.service.deciding.decision_process import DecisionProcess, PolicyFailed, ProcessLost, Watch
from pollux.service.deciding.process_policy import ProcessPolicy
from pollux.testing.builders import cluster, goodput_model, job, snapshot
from pollux.testing.driver import FakeDriver, FakeWork
from pollux.testing.waiting import wait_until

STRANGE = '''
import os, pathlib, signal, time
from dataclasses import dataclass
from pollux.core import Decision

@dataclass
class Strange:
    """Does what the file says, once for each line, then decides nothing."""
    todo: str
    name = "strange"
    needs = frozenset()
    batch = "adaptive"

    def allocate(self, snapshot):
        file = pathlib.Path(self.todo)
        first, _, rest = file.read_text().partition("\\n")
        file.write_text(rest)
        if first == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if first == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        if first == "wrong":
            raise ValueError("no idea")
        return Decision({}, memory=(os.getpid(), snapshot.memory))
'''


def story(seed: int = 0):
    """Jobs that come, go and are cancelled, on nodes and in queues that change."""
    draw = random.Random(seed)
    events = [NodeAdded(0.0, Node(f"n{i}", 4)) for i in range(3)]
    work = {}
    for index in range(30):
        name, at = f"job-{index}", draw.uniform(1.0, 3000.0)
        limits = JobLimits(draw.choice([1, 1, 2]), draw.choice([2, 4, 8]))
        events.append(
            JobSubmitted(at, JobSpec(name, limits, queue=draw.choice(["", "a"]), kind=draw.choice(["x", "y"])))
        )
        model = goodput_model(compute_seconds=draw.uniform(0.02, 0.1), noise_scale=draw.uniform(100, 5000))
        work[name] = FakeWork(draw.uniform(200.0, 4000.0), goodput=model)
        if draw.random() < 0.1:
            events.append(JobCancelled(at + 1.0, name))
    return [*events, QueueChanged(700.0, Queue("a", 3.0, 4)), NodeAdded(900.0, Node("n3", 8))], work


class Both:
    """Asks a policy here and in its process, and compares."""

    def __init__(self, policy, process):
        self.policy, self.process = policy, process
        self.name, self.needs, self.batch = policy.name, policy.needs, policy.batch
        self.decisions = 0

    def allocate(self, seen):
        here = self.policy.allocate(memory_of(seen))
        there = self.process.allocate(seen)
        assert there == here
        assert list(there.allocation) == list(here.allocation)
        assert list(there.reasons) == list(here.reasons)
        assert pickle.dumps(memory_of(replace(seen, memory=there.memory)).memory) == pickle.dumps(here.memory)
        self.decisions += 1
        return there


@contextlib.contextmanager
def ended(policy):
    """With its process ready."""
    try:
        yield policy
    finally:
        policy.end()


def in_process(policy, **options):
    found = ProcessPolicy(policy, 0.0, **options)
    wait_until("the decision process is ready", lambda: found._ready_process() is not None)
    return found


@pytest.mark.parametrize("name", ["pollux", "castor", "tiresias"])
def test_it_decides_as_in_the_service(name):
    events, work = story()
    with ended(in_process(policies.create(name))) as process:
        both = Both(policies.create(name), process)
        controller = Controller(Cluster(()), ControllerSettings(trigger="events"))
        FakeDriver(controller, both, events, work, think_seconds=1.0).run(20_000.0)
        assert both.decisions > 30


def same(seen, read):
    """Snapshots compare without goodput, prior and memory."""
    assert read == seen
    assert list(read.running) == list(seen.running)
    assert [view.goodput for view in read.jobs] == [view.goodput for view in seen.jobs]
    assert [view.prior for view in read.jobs] == [view.prior for view in seen.jobs]
    assert read.memory == seen.memory


def test_snapshots_arrive_whole_whatever_changes():
    seen, writer, reader = [], SnapshotWriter(), SnapshotReader()

    class Watched:
        name, batch = "fifo", "adaptive"
        needs: frozenset[str] = frozenset()
        policy = policies.create("pollux")

        def allocate(self, one):
            same(one, reader.read(writer.write(one)))
            seen.append(one)
            return self.policy.allocate(one)

    events, work = story(1)
    FakeDriver(Controller(Cluster(()), ControllerSettings(trigger="events")), Watched(), events, work).run(20_000.0)
    draw = random.Random(2)
    priors = [None, *(Prior(goodput_model(noise_scale=float(n)), n, n, 0.0) for n in range(1, 6))]
    for _ in range(200):  # any order: plans are asked for with older snapshots, too
        one = draw.choice(seen)
        odd = dict(draw.sample(list(one.running.items()), len(one.running)))
        jobs = draw.sample(one.jobs, draw.randint(0, len(one.jobs)))
        one = replace(one, running=odd, jobs=tuple(replace(view, prior=draw.choice(priors)) for view in jobs))
        same(one, reader.read(writer.write(one)))


def test_what_does_not_change_is_not_written_again():
    jobs = [job(f"job-{index}", goodput=goodput_model()) for index in range(500)]
    writer = SnapshotWriter()
    one = snapshot(cluster(4, 4), jobs)
    first = writer.write(one)
    assert len(writer.write(replace(one, revision=2, now=700.0))) < len(first) / 100


def test_memory_that_the_process_has_is_not_written_again():
    writer = SnapshotWriter()
    kept = KeptMemory(7, pickle.dumps("x" * 10_000))
    one = snapshot(memory=kept)
    assert len(writer.write(one, 6)) > 10_000 > len(writer.write(one, 7))
    assert memory_of(one).memory == "x" * 10_000


@pytest.fixture
def strange(tmp_path, monkeypatch):
    (tmp_path / "strange_policies.py").write_text(STRANGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    strange_policies = importlib.import_module("strange_policies")

    def make(*todo):
        (tmp_path / "todo").write_text("".join(f"{line}\n" for line in todo))
        return strange_policies.Strange(str(tmp_path / "todo"))

    yield make
    del sys.modules["strange_policies"]


def pid_of(decision):
    return pickle.loads(decision.memory.written)[0]


def test_a_process_that_dies_is_replaced_and_asked_the_same(strange, caplog):
    with ended(in_process(strange("", "die"))) as policy:
        first = pid_of(policy.allocate(snapshot()))
        second = pid_of(policy.allocate(snapshot(memory="kept")))
        assert first != second == policy.pid
        assert f"the decision process ({first}) is lost: it ended with code -9" in caplog.text
        assert pid_of(policy.allocate(snapshot())) == second


def test_two_deaths_leave_everything_as_it_is_and_the_next_decision_is_made(strange):
    with ended(in_process(strange("die", "die"))) as policy:
        with pytest.raises(ProcessLost):
            policy.allocate(snapshot())
        assert pid_of(policy.allocate(snapshot())) != os.getpid()


def test_one_that_was_killed_between_decisions_is_replaced(strange):
    with ended(in_process(strange())) as policy:
        os.kill(policy.pid, signal.SIGKILL)
        assert pid_of(policy.allocate(snapshot())) != os.getpid()


def test_a_policy_that_fails_keeps_its_process(strange):
    with ended(in_process(strange("wrong"))) as policy:
        with pytest.raises(PolicyFailed, match="ValueError: no idea"):
            policy.allocate(snapshot())
        before = policy.pid
        assert pid_of(policy.allocate(snapshot())) == before


def test_a_process_that_hangs_is_ended(strange, caplog, monkeypatch):
    monkeypatch.setattr("pollux.service.deciding.decision_process._LOOK_SECONDS", 0.01)
    with ended(in_process(strange("hang"))) as policy:
        first = policy.pid
        policy._process._watch._idle_seconds = 0.5  # the next process has a minute again
        assert pid_of(policy.allocate(snapshot())) == policy.pid != first
    assert f"the decision process ({first}) is lost: it has used no processor time" in caplog.text


def test_without_a_process_it_decides_here(strange, caplog):
    def refuse(written):
        raise PermissionError(1, "no processes here")

    now = [0.0]
    policy = ProcessPolicy(strange(), 0.0, refuse, lambda: now[0])
    for _ in range(3):
        assert policy.allocate(snapshot()).memory == (os.getpid(), None)
    assert caplog.text.count("no process for decisions could be started") == 1
    now[0] = 301.0
    policy.allocate(snapshot())
    assert caplog.text.count("no process for decisions could be started") == 2


def test_one_that_never_gets_ready_is_done_without(strange, caplog):
    command = (sys.executable, "-c", "")
    policy = ProcessPolicy(strange(), 0.0, lambda written: DecisionProcess(written, command))
    wait_until(
        "it is done without", lambda: policy.allocate(snapshot()).memory[0] == os.getpid() and policy.pid is None
    )
    assert "are made in the service" in caplog.text


def test_memory_goes_over_to_decisions_made_here(strange):
    with ended(in_process(strange())) as policy:
        kept = policy.allocate(snapshot(memory="a")).memory
        here = ProcessPolicy(strange())
        assert here.allocate(snapshot(memory=kept)).memory == (os.getpid(), (policy.pid, "a"))


def test_a_policy_that_cannot_travel_decides_here(caplog):
    class Local:
        name, batch = "local", "adaptive"
        needs: frozenset[str] = frozenset()

        def allocate(self, seen):
            return policies.create("fifo").allocate(seen)

    policy = ProcessPolicy(Local(), 0.0)
    assert policy.allocate(snapshot()).allocation == {}
    assert policy.pid is None
    assert "cannot be given to a process of its own" in caplog.text


def test_quick_decisions_need_no_process():
    policy = ProcessPolicy(policies.create("fifo"), long_seconds=1000.0)
    policy.allocate(snapshot())
    assert policy.pid is None


def test_a_decision_that_took_long_starts_one(monkeypatch):
    times = iter([0.0, 0.02, 1.0, 1.0])
    monkeypatch.setattr("pollux.service.deciding.process_policy.time.thread_time", lambda: next(times))
    started: list[bytes] = []

    def start(written):
        started.append(written)
        raise OSError

    policy = ProcessPolicy(policies.create("fifo"), start=start)
    policy.allocate(snapshot())
    assert not started
    policy.allocate(snapshot())
    assert len(started) == 1


def test_closing_ends_a_decision_that_is_being_made(strange):
    policy = in_process(strange())
    policy.close()
    with pytest.raises((Unreachable, ProcessLost)):
        policy.allocate(snapshot())
    policy.end()
    assert policy.pid is None


def test_it_ends_with_the_service_however_that_ends(tmp_path):
    program = """
import os, sys, time
from pollux import policies
from pollux.service.deciding.process_policy import ProcessPolicy
policy = ProcessPolicy(policies.create("fifo"), 0.0)
while policy._ready_process() is None:
    time.sleep(0.05)
print(policy.pid, flush=True)
time.sleep(1000)
"""
    service = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pid = int(service.stdout.readline())
    service.kill()
    service.wait()
    service.stdout.close()
    wait_until("it has ended", lambda: not is_there(pid))


def is_there(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


class TestWatch:
    """What counts as a hang, by a clock and processor times of the test."""

    def watched(self, used):
        self.now, self.used = 0.0, used
        return Watch(lambda: self.used, lambda: self.now, 60.0, 900.0)

    def test_one_that_computes_may_take_long(self):
        watch = self.watched(0.0)
        for _ in range(100):
            self.now, self.used = self.now + 50.0, self.used + 1.0
            watch.look()

    def test_one_without_processor_time_hangs(self):
        watch = self.watched(5.0)
        self.now = 59.0
        watch.look()
        self.now = 61.0
        with pytest.raises(ProcessLost, match="no processor time for 61 s"):
            watch.look()

    def test_one_that_computes_for_ever_hangs(self):
        watch = self.watched(5.0)
        self.used, self.now = 906.0, 910.0
        with pytest.raises(ProcessLost, match="computed for 901 s"):
            watch.look()

    def test_where_nobody_counts_processor_time_all_time_counts(self):
        watch = self.watched(None)
        self.now = 899.0
        watch.look()
        self.now = 901.0
        with pytest.raises(ProcessLost, match="computed for 901 s"):
            watch.look()


@pytest.fixture(autouse=True)
def all_levels(caplog):
    caplog.set_level(logging.DEBUG, "pollux.service")
