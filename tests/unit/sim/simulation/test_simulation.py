"""The published world on cases small enough for paper and pencil; and the world of events beside it.

A fake job at its initial batch takes 200 s on one GPU; every change costs 30 s.
"""

import math
from dataclasses import replace

import pytest

from pollux.core import BatchMode, Decision, InvalidInput, JobView
from pollux.policies import create
from pollux.sim.simulation.simulation import SimulationSettings, simulate
from pollux.sim.workloads.workload import Workload, WorkloadJob
from pollux.testing import FakeApplication, place

SMALL = SimulationSettings(num_nodes=1, gpus_per_node=1)
EVENTS = replace(SMALL, trigger="events")


class Scripted:
    """A policy that says by heart who is where, by the number of the round."""

    name = "scripted"
    needs: frozenset[str] = frozenset()
    batch: BatchMode = "fixed"

    def __init__(self, *rounds: dict[str, str]) -> None:
        self.rounds = rounds
        self.asked_at: list[float] = []

    def allocate(self, snapshot):
        self.asked_at.append(snapshot.now)
        wanted = self.rounds[min(len(self.asked_at), len(self.rounds)) - 1]
        here = {job.id for job in snapshot.jobs}
        return Decision({job_id: place(text) for job_id, text in wanted.items() if job_id in here})


def requests(*times: float, **fields) -> Workload:
    common = {"application": "fake", "num_gpus": 1, "batch_size": 10, **fields}
    return Workload("w", tuple(WorkloadJob(f"j{i}", time, **common) for i, time in enumerate(times)))


def run(workload, policy=None, settings=SMALL, application=None, **options):
    applications = {"fake": application or FakeApplication()}
    return simulate(workload, policy or create("fifo"), applications, settings, **options)


def lives(outcome):
    return [(job.started, job.finished) for job in outcome.jobs]


# Rounds


def test_an_arrival_waits_for_the_tick_and_then_stands_still():
    assert lives(run(requests(61.0))) == [(120.0, 120.0 + 30 + 200)]


def test_an_arrival_at_the_tick_is_in_time():
    assert lives(run(requests(60.0))) == [(60.0, 290.0)]


def test_gpus_of_a_finished_job_are_free_at_the_next_tick():
    assert lives(run(requests(0.0, 0.0))) == [(60.0, 290.0), (300.0, 530.0)]


def test_the_first_start_costs_the_standstill_but_is_no_restart():
    (job,) = run(requests(0.0)).jobs
    assert (job.restarts, job.gpu_seconds) == (0, 230.0)


def test_gpu_time_ends_with_the_job_not_with_the_round():
    (job,) = run(requests(0.0), settings=replace(SMALL, interval_seconds=100.0)).jobs
    assert (job.started, job.finished, job.gpu_seconds) == (100.0, 330.0, 230.0)


def test_a_move_costs_thirty_seconds_and_counts():
    two = replace(SMALL, num_nodes=2)
    outcome = run(requests(0.0), Scripted({"j0": "node-0:1"}, {"j0": "node-1:1"}), two)
    (job,) = outcome.jobs
    assert (job.started, job.finished, job.restarts) == (60.0, 60.0 + 30 + 200 + 30, 1)


def test_a_second_change_restarts_the_standstill():
    """With rounds of 20 s: two moves in a row, and nothing was trained before the third placement."""
    settings = replace(SMALL, num_nodes=2, interval_seconds=20.0)
    policy = Scripted({"j0": "node-0:1"}, {"j0": "node-1:1"}, {"j0": "node-0:1"})
    (job,) = run(requests(0.0), policy, settings).jobs
    assert (job.started, job.finished, job.restarts) == (20.0, 60.0 + 30 + 200, 2)


def test_a_preempted_job_keeps_what_it_has_done():
    policy = Scripted({"j0": "node-0:1"}, {}, {"j0": "node-0:1"})
    (job,) = run(requests(0.0), policy).jobs
    assert job.finished == 180.0 + 30 + (200 - 30)
    assert job.gpu_seconds == 60 + 200


def test_ends_of_epochs_are_whole_seconds():
    application = FakeApplication(progress=(10.4, 20.8))
    (job,) = run(requests(0.0), application=application).jobs
    assert job.finished == 60 + 30 + 10 + 10


def test_the_policy_is_asked_every_round_whether_anything_happened_or_not():
    policy = Scripted({"j0": "node-0:1"})
    run(requests(130.0), policy)
    assert policy.asked_at == [60.0 * i for i in range(1, 8)]


def test_the_round_can_have_another_length():
    assert lives(run(requests(61.0), settings=replace(SMALL, interval_seconds=45.0))) == [(90.0, 320.0)]


def test_moving_can_be_free():
    assert lives(run(requests(0.0), settings=replace(SMALL, resize_seconds=0.0))) == [(60.0, 260.0)]


# Interference


def sharing(j1: str, interference: float):
    settings = replace(SMALL, num_nodes=3, gpus_per_node=4, interference=interference)
    policy = Scripted({"j0": "node-0:1 node-1:1", "j1": j1})
    # Two GPUs at a batch of 20: progress of two a second.
    return run(requests(0.0, 0.0, num_gpus=2, batch_size=20), policy, settings)


def test_distributed_jobs_on_one_node_slow_each_other_down():
    apart = sharing("node-2:2", 0.5)
    assert lives(apart) == [(60.0, 190.0), (60.0, 190.0)]
    together = sharing("node-1:1 node-2:1", 0.5)
    assert lives(together) == [(60.0, 290.0), (60.0, 290.0)]
    assert lives(sharing("node-1:1 node-2:1", 0.0)) == lives(apart)


def test_a_job_on_one_node_neither_suffers_nor_disturbs():
    assert lives(sharing("node-1:2", 0.5)) == [(60.0, 190.0), (60.0, 190.0)]


def test_interference_ends_when_one_of_them_does():
    settings = replace(SMALL, num_nodes=3, gpus_per_node=4, interference=0.5)
    policy = Scripted({"j0": "node-0:1 node-1:1", "j1": "node-1:1 node-2:1"})
    early, late = run(requests(0.0, 60.0, num_gpus=2, batch_size=20), policy, settings).jobs
    assert early.finished == late.finished == 290.0
    policy = Scripted({"j0": "node-0:1 node-1:1"}, {"j0": "node-0:1 node-1:1", "j1": "node-1:1 node-2:1"})
    early, late = run(requests(0.0, 0.0, num_gpus=2, batch_size=20), policy, settings).jobs
    # Alone until 120, together until the first ends; noticed at the tick after that.
    assert early.finished == 120 + (200 - 2 * 30)
    assert late.finished == 300 + (200 - 1 * (300 - 150)) / 2


def test_with_events_interference_begins_and_ends_on_the_second():
    settings = replace(SMALL, num_nodes=3, gpus_per_node=4, interference=0.5, trigger="events")
    policy = Scripted({"j0": "node-0:1 node-1:1", "j1": "node-1:1 node-2:1"})
    early, late = run(requests(0.0, 100.0, num_gpus=2, batch_size=20), policy, settings).jobs
    # The first is alone from 30 to 100, at two steps a second; then both make one.
    assert early.finished == pytest.approx(100 + (200 - 2 * 70))
    assert late.finished == pytest.approx(160 + (200 - 1 * 30) / 2)


# Events


def test_with_events_arrivals_and_completions_are_decided_at_once():
    assert lives(run(requests(61.0, 100.0), settings=EVENTS)) == [(61.0, 291.0), (291.0, 521.0)]


def test_with_events_decisions_are_two_seconds_apart():
    outcome = run(requests(10.0, 11.0), settings=replace(EVENTS, gpus_per_node=2))
    assert [job.started for job in outcome.jobs] == [10.0, 12.0]


def test_with_events_the_policy_is_asked_only_when_something_happened():
    policy = Scripted({"j0": "node-0:1"})
    run(requests(130.0), policy, EVENTS)
    assert policy.asked_at == [130.0, 360.0], "it came, it went"


def test_with_events_epochs_end_when_they_end():
    application = FakeApplication(progress=(10.4, 20.8))
    (job,) = run(requests(0.0), settings=EVENTS, application=application).jobs
    assert job.finished == pytest.approx(30 + 20.8)


# Adaptive jobs


def test_adaptive_jobs_report_models_and_may_choose_their_batch():
    seen: list[JobView] = []

    class Watching(Scripted):
        batch = "adaptive"

        def allocate(self, snapshot):
            seen.extend(snapshot.jobs)
            return super().allocate(snapshot)

    application = FakeApplication(
        progress=(400.0, 800.0), seconds_per_sample=0.01, sync_seconds=0.1, grad_sqr=0.001, grad_var=1.0
    )
    settings = replace(SMALL, gpus_per_node=4)
    (job,) = run(requests(0.0), Watching({"j0": "node-0:4"}), settings, application).jobs
    assert seen[0].goodput is None
    assert seen[0].oracle is None
    assert seen[-1].goodput is not None
    assert seen[-1].remaining is not None
    assert seen[-1].remaining < 800 * 10
    assert max(total for _, _, total, _ in job.samples) > 20, "it never grew beyond the smallest batch for four"


def test_fixed_jobs_have_an_oracle_and_no_model():
    seen: list[JobView] = []

    class Watching(Scripted):
        def allocate(self, snapshot):
            seen.extend(snapshot.jobs)
            return super().allocate(snapshot)

    run(requests(0.0), Watching({"j0": "node-0:1"}))
    assert all(job.goodput is None and job.oracle is not None for job in seen)


# Runs that cannot go on


def test_a_run_that_gets_nowhere_is_ended():
    moving = Scripted(*[{"j0": f"node-{i % 2}:1"} for i in range(1000)])
    settings = replace(SMALL, num_nodes=2, max_hours=5.0, resize_seconds=60.0)
    with pytest.raises(InvalidInput, match=r"workload 'w' under 'scripted': job 'j0' is not done after 5"):
        run(requests(0.0), moving, settings)


def test_jobs_that_wait_for_ever_are_told():
    with pytest.raises(InvalidInput, match="leaves 1 jobs of workload 'w' waiting for ever"):
        run(requests(0.0), Scripted({}), EVENTS)


def test_a_policy_that_needs_what_no_simulator_has_is_refused():
    policy = Scripted({})
    policy.needs = frozenset({"prophecy"})
    with pytest.raises(InvalidInput, match="'scripted' needs prophecy"):
        run(requests(0.0), policy)


def test_a_workload_that_cannot_run_is_refused():
    with pytest.raises(InvalidInput, match="the cluster has 1 GPUs"):
        run(requests(0.0, num_gpus=2))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_nodes": 0}, "nodes is 0"),
        ({"gpus_per_node": 0}, "gpus-per-node is 0"),
        ({"resize_seconds": -1.0}, "resize-seconds is -1"),
        ({"resize_seconds": math.nan}, "resize-seconds is nan"),
        ({"interference": 1.0}, "interference is 1"),
    ],
)
def test_impossible_worlds_are_refused(fields, said):
    with pytest.raises(InvalidInput, match=said):
        SimulationSettings(**fields)


# What comes out


def test_the_outcome_tells_of_every_job_and_of_the_run():
    calls = []
    outcome = run(requests(0.0, 5.0), progress=lambda done, total: calls.append((done, total)))
    assert (outcome.workload, outcome.policy) == ("w", "fifo")
    assert [(job.name, job.application, job.submitted) for job in outcome.jobs] == [
        ("j0", "fake", 0.0),
        ("j1", "fake", 5.0),
    ]
    assert calls == [(1, 2), (2, 2)]
    assert len(outcome.decision_seconds) == 9, "rounds at 60 to 540"


@pytest.mark.parametrize("settings", [SMALL, EVENTS], ids=["rounds", "events"])
@pytest.mark.parametrize("policy", ["fifo", "las", "tiresias", "srtf", "optimus-oracle"])
def test_the_same_run_twice_is_the_same(settings, policy):
    settings = replace(settings, num_nodes=2, gpus_per_node=4)
    workload = requests(0.0, 30.0, 70.0, 200.0, 201.0, num_gpus=3, batch_size=40)
    first, second = (run(workload, create(policy), settings) for _ in range(2))
    assert first.jobs == second.jobs
