"""How many nodes would be used: enough for everybody's most, one to find out their size, none without jobs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pollux import policies
from pollux.controller import JobState
from pollux.core import Cluster, JobLimits, Node, Placement
from pollux.service import Engine, ServiceSettings
from pollux.service.engine.autoscaling import desired_num_nodes, is_job_waiting
from pollux.store import MemoryStore, MemoryTelemetry
from pollux.testing.servers.service import FakeBackend, ManualClock, result_of
from pollux.wire.job import JobRequest


def job(most, state=JobState.QUEUED, waiting_for=()):
    limits = JobLimits(max_gpus=most)
    spec, nowhere = SimpleNamespace(limits=limits), Placement()
    return SimpleNamespace(spec=spec, state=state, waiting_for=waiting_for, placement=nowhere)


@pytest.mark.parametrize(
    ("most", "nodes", "wanted"),
    [((), 0, 0), ((), 3, 0), ((8,), 0, 1), ((1,), 1, 1), ((4, 4), 1, 2), ((4, 5), 1, 3), ((64,), 2, 16)],
)
def test_nodes_for_everybody(most, nodes, wanted):
    cluster = Cluster.uniform(nodes, 4) if nodes else Cluster(())
    assert desired_num_nodes([job(each) for each in most], cluster) == wanted


def test_jobs_that_may_not_run_want_no_nodes():
    jobs = [job(4, JobState.RUNNING), job(8, JobState.PAUSED), job(16, waiting_for=("first",))]
    assert desired_num_nodes(jobs, Cluster.uniform(3, 4)) == 1
    assert desired_num_nodes(jobs[1:], Cluster.uniform(3, 4)) == 0


def test_who_wants_gpus_and_has_none_waits():
    waits, runs = job(4), job(4, JobState.RUNNING)
    runs.placement = Placement.of({"n": 1})
    idle = [job(8, JobState.PAUSED), job(16, waiting_for=("first",))]
    assert is_job_waiting([runs, waits])
    assert not is_job_waiting([runs, *idle])


@pytest.mark.parametrize("desired", [0, 7])
def test_a_policy_that_says_how_many_is_heard(desired):
    assert desired_num_nodes([job(8)], Cluster.uniform(1, 4), desired) == desired


class Wishing:
    """Answers like fifo, and says how many nodes it would like."""

    name = "wishing"
    needs: frozenset[str] = frozenset()
    batch = "adaptive"

    def __init__(self):
        self.desired: int | None = None
        self.real = policies.create("fifo")

    def allocate(self, snapshot):
        return replace(self.real.allocate(snapshot), desired_nodes=self.desired)


def test_the_backend_hears_what_is_wanted_after_each_decision(tmp_path, monkeypatch):
    clock, policy = ManualClock(100.0), Wishing()
    backend = FakeBackend([Node("n", 4)], clock)
    wishes = []
    monkeypatch.setattr(backend, "desire", lambda nodes, awaited: wishes.append(nodes))
    engine = Engine(policy, backend, MemoryStore(), MemoryTelemetry(), ServiceSettings(home=tmp_path), clock)
    engine.start()

    def decide():
        clock.set(clock.time + 1000.0, engine)
        engine.loop.wait_until_idle()
        return wishes[-1]

    try:
        result_of(engine.submit(JobRequest("job", ("x",), 1, 9, workdir="/")))
        assert decide() == 3
        policy.desired = 6
        result_of(engine.submit(JobRequest("other", ("x",), 1, 1, workdir="/")))
        assert decide() == 6
        policy.desired = None
        result_of(engine.pause("job"))
        result_of(engine.pause("other"))
        assert decide() == 0
    finally:
        engine.stop("keep")
