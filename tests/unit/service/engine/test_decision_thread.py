"""The policy's thread: decisions come first, and plans share answers."""

from __future__ import annotations

import os
import threading
import time

import pytest

from pollux import policies
from pollux.core import Decision, Node
from pollux.core.errors import Unreachable
from pollux.service import Engine, ServiceSettings
from pollux.store import MemoryStore, MemoryTelemetry
from pollux.testing.servers.service import FakeBackend, ManualClock, result_of
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.job import JobRequest


class Gated:
    """Answers like fifo, when it is let; remembers which jobs it was shown each time."""

    name = "gated"
    needs: frozenset[str] = frozenset()
    batch = "adaptive"

    def __init__(self):
        self.gate = threading.Semaphore(1000)
        self.asked = threading.Semaphore(0)
        self.shown = []
        self.real = policies.create("fifo")

    def hold(self):
        while self.gate.acquire(blocking=False):
            pass

    def allocate(self, snapshot):
        self.shown.append([job.id for job in snapshot.jobs])
        self.asked.release()
        assert self.gate.acquire(timeout=PATIENCE_SECONDS)
        return self.real.allocate(snapshot)


def request(name, gpus=1):
    return JobRequest(name, ("x",), gpus, gpus, workdir="/")


@pytest.fixture
def policy():
    return Gated()


@pytest.fixture
def clock():
    return ManualClock(100.0)


@pytest.fixture
def engine(policy, clock, tmp_path):
    backend = FakeBackend([Node("n", 4)], clock)
    engine = Engine(policy, backend, MemoryStore(), MemoryTelemetry(), ServiceSettings(home=tmp_path), clock)
    engine.start()
    engine.loop.wait_until_idle()
    yield engine
    for _ in range(1000):
        policy.gate.release()
    engine.stop("keep")


def busy_with_a_plan(engine, policy):
    """The thread works at a plan; whatever is asked now has to wait."""
    while policy.asked.acquire(blocking=False):
        pass
    policy.hold()
    first = engine.plan(request("probe"))
    assert policy.asked.acquire(timeout=PATIENCE_SECONDS)
    return first


def test_a_decision_overtakes_plans_that_wait(engine, policy, clock):
    first = busy_with_a_plan(engine, policy)
    drafts = [engine.plan(request(f"draft-{index}")) for index in range(5)]
    clock.set(200.0, engine)
    submitted = engine.submit(request("a"))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while engine.loop._deciding_on is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert engine.last_decision.delay_seconds == 0.0
    clock.set(203.0, engine)
    policy.gate.release()
    assert first.result(PATIENCE_SECONDS).starts_now
    assert policy.asked.acquire(timeout=PATIENCE_SECONDS)
    assert policy.shown[-1] == ["a"], "the decision, though five plans came before it"
    assert engine.last_decision.delay_seconds == 3.0, "it counts from when it was due to when it is thought about"
    policy.gate.release()
    status, plan = submitted.result(PATIENCE_SECONDS)
    assert plan.starts_now, "the decision is the plan"
    assert policy.shown.count(["a"]) == 1
    for _ in drafts:
        policy.gate.release()
    assert all(draft.result(PATIENCE_SECONDS).starts_now for draft in drafts)
    assert status.id == "a"


def test_plans_of_submitted_jobs_share_one_answer(engine, policy, clock):
    clock.set(200.0, engine)
    result_of(engine.submit(request("seed")))
    engine.loop.wait_until_idle()
    first = busy_with_a_plan(engine, policy)
    before = len(policy.shown)
    # No decision is due for two seconds: the plans are worked out by themselves.
    waiting = [engine.submit(request(f"j{index}")) for index in range(20)]
    engine.loop.read(lambda: None).result(PATIENCE_SECONDS)
    policy.gate.release()
    assert first.result(PATIENCE_SECONDS)
    policy.gate.release()
    plans = [future.result(PATIENCE_SECONDS)[1] for future in waiting]
    assert len(policy.shown) == before + 1
    assert [plan.starts_now for plan in plans] == [True] * 3 + [False] * 17
    assert sum(plan.gpus for plan in plans) == 3, "together no more than is there"


def test_a_job_that_is_gone_meanwhile_still_gets_a_plan(engine, policy, clock):
    clock.set(200.0, engine)
    result_of(engine.submit(request("seed")))
    engine.loop.wait_until_idle()
    first = busy_with_a_plan(engine, policy)
    gone = engine.submit(request("gone"))
    engine.cancel("gone").result(PATIENCE_SECONDS)
    stays = engine.submit(request("stays"))
    engine.loop.read(lambda: None).result(PATIENCE_SECONDS)
    for _ in range(4):
        policy.gate.release()
    assert first.result(PATIENCE_SECONDS)
    assert gone.result(PATIENCE_SECONDS)[0].id == "gone"
    assert stays.result(PATIENCE_SECONDS)[1].starts_now


def test_plans_that_wait_at_the_end_are_refused(engine, policy):
    first = busy_with_a_plan(engine, policy)
    late = engine.plan(request("late"))
    engine.loop.read(lambda: None).result(PATIENCE_SECONDS)
    ending = threading.Thread(target=engine.stop, args=("keep",))
    ending.start()
    with pytest.raises(Unreachable, match="stopping"):
        late.result(PATIENCE_SECONDS)
    policy.gate.release()
    assert first.result(PATIENCE_SECONDS)
    ending.join(PATIENCE_SECONDS)
    with pytest.raises(Unreachable):
        result_of(engine.plan(request("later")))


def test_a_policy_that_fails_still_leaves_a_plan(engine, policy, caplog):
    policy.real = None
    status, plan = result_of(engine.submit(request("a")))
    assert (status.id, plan.starts_now) == ("a", False)
    assert "failed" in caplog.text


class Random:
    """Gives the only GPU to whoever came last: each answer differs from the one before."""

    name = "random"
    needs: frozenset[str] = frozenset()
    batch = "adaptive"

    def allocate(self, snapshot):
        taken = policies.create("fifo").allocate(snapshot).allocation
        if not snapshot.jobs or snapshot.running:
            return Decision(dict(snapshot.running))
        place = next(iter(taken.values()))
        return Decision({snapshot.jobs[-1].id: place})


def test_nobody_is_promised_what_an_earlier_job_may_get(tmp_path):
    clock = ManualClock(5.0)
    backend = FakeBackend([Node("n", 1)], clock)
    engine = Engine(Random(), backend, MemoryStore(), MemoryTelemetry(), ServiceSettings(home=tmp_path), clock)
    engine.start()
    engine.loop.wait_until_idle()
    # The first decision, on no job at all, was just made: the next is due in two seconds.
    assert result_of(engine.submit(request("a")))[1].starts_now
    _, plan = result_of(engine.submit(request("b")))
    assert (plan.starts_now, plan.gpus, plan.behind) == (False, 0, ("a",))
    assert "behind a" in plan.text
    engine.stop("keep")


def test_an_engine_whose_policy_has_a_process_ends_with_it(tmp_path):
    clock, settings = ManualClock(5.0), ServiceSettings(home=tmp_path, long_decision_seconds=0.0)
    backend = FakeBackend([Node("n", 4)], clock)
    engine = Engine(policies.create("pollux"), backend, MemoryStore(), MemoryTelemetry(), settings, clock)
    policy = engine.loop._decisions._policy
    engine.start()
    for name in "ab":
        result_of(engine.submit(request(name)))
        clock.set(clock.time + 3.0, engine)
        engine.loop.wait_until_idle()
    assert [launch.job_id for launch in backend.launches] == ["a", "b"]
    pid = policy.pid
    assert pid is not None
    engine.stop("keep")
    assert policy.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
