"""What the package ships: applications of every size, and a workload under which policies differ."""

from collections import Counter

import pytest

from pollux import policies
from pollux.sim.applications.isolated import recorded_runs
from pollux.sim.simulation.simulation import simulate
from pollux.sim.workloads.builtin import builtin_applications, builtin_workload
from pollux.sim.workloads.user_requests import Users
from pollux.sim.workloads.workload import check_applications


def fastest(name, num_gpus):
    return min(recorded_runs(builtin_applications()[name], num_gpus, 4).values())


def most_unfinished(jobs):
    changes = sorted([(job.submitted, 1) for job in jobs] + [(job.finished, -1) for job in jobs])
    unfinished = most = 0
    for _, change in changes:
        unfinished += change
        most = max(most, unfinished)
    return most


def test_names_are_those_of_the_applications():
    known = builtin_applications()
    assert len(known) == 6
    assert all(name == application.name for name, application in known.items())


def test_every_class_of_gpu_time_has_an_application():
    users = Users(builtin_applications(), 16, 4)
    hours = {name: users.least_gpu_hours(name) for name in users.applications}
    assert hours["recsys"] < hours["resnet-small"] < 1
    assert 1 < hours["bert-tune"] < hours["speech"] < 10
    assert 10 < hours["detector"] < 100 < hours["vit-large"] < 1000


def test_applications_scale_as_their_kind_does():
    assert fastest("recsys", 8) > fastest("recsys", 1), "a recommender is not worth a second node"
    assert fastest("vit-large", 64) < fastest("vit-large", 1) / 32, "a large model can use the whole cluster"
    for name in builtin_applications():
        assert fastest(name, 4) < fastest(name, 2) < fastest(name, 1)


@pytest.mark.parametrize("counts", [(1,), (7, 3), (8,) * 512, (1, 2, 3, 4, 5, 6, 7, 8)])
def test_any_placement_has_a_step_time(counts):
    for application in builtin_applications().values():
        step, sync = application.step_and_sync_seconds(counts, application.limits.local_min)
        assert 0 <= sync < step


def test_the_workload_is_always_the_same():
    assert builtin_workload() == builtin_workload()


def test_the_workload_is_many_small_jobs_and_a_few_large():
    workload, known = builtin_workload(), builtin_applications()
    check_applications(workload, known, num_gpus=64)
    mix = Counter(job.application for job in workload.jobs)
    assert workload.name == "built-in"
    assert set(mix) == set(known)
    assert 60 <= len(workload.jobs) <= 80
    assert mix["recsys"] + mix["resnet-small"] > len(workload.jobs) / 2
    assert mix["vit-large"] <= 2
    assert max(job.time for job in workload.jobs) < 4 * 3600


@pytest.mark.parametrize("policy", ["tiresias", "optimus-oracle"])
def test_the_workload_fills_the_cluster_and_ends_within_half_a_day(policy):
    outcome = simulate(builtin_workload(), policies.create(policy), builtin_applications())
    assert 10 <= most_unfinished(outcome.jobs) <= 30
    assert max(job.finished for job in outcome.jobs) < 12 * 3600
