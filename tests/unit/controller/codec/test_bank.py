"""The model bank survives a restart: saved with the state, and learned again from facts."""

import json

import pytest

from pollux.controller import (
    Controller,
    GenerationEnded,
    JobFinished,
    JobReported,
    JobRunning,
    JobSpec,
    JobSubmitted,
)
from pollux.core import JobLimits, Node
from pollux.core.errors import StoreFailed
from pollux.testing import cluster, goodput_model


@pytest.fixture
def taught(make_desk):
    """Two kinds were measured on several places and types; a job of one has ended, one of the other was not long."""
    nodes = cluster(4, 4)
    desk = make_desk(nodes, trigger="events")
    for name, kind in (("a", "train"), ("b", "tune"), ("c", "train")):
        desk(JobSubmitted(0, JobSpec(name, JobLimits(max_gpus=8), kind=kind)))
    desk.decide(1, a="n0:2", b="n1:1", c="n0:1")
    for name in "abc":
        desk(JobRunning(2, name, 1))
    desk(JobReported(10, "a", goodput_model(), 900.0, local_batch=64, progress=100.0))
    desk(JobReported(11, "b", goodput_model(noise_scale=9.0), 50.0, local_batch=32, progress=1.0))
    desk(JobReported(12, "c", goodput_model(compute_seconds=0.06), 800.0, local_batch=64, progress=5.0))
    desk(JobFinished(20, "a"))
    return desk


def saved(controller):
    return json.loads(json.dumps(controller.state(), allow_nan=False))


def test_what_was_learned_comes_back(taught):
    again = Controller.restored(saved(taught.controller), taught.controller.settings)
    bank = taught.controller.bank
    assert set(bank.kinds) == {"train", "tune"}
    assert bank.kinds["train"].totals == (1000.0,)
    assert again.bank == bank
    assert again.bank.priors == bank.priors
    assert saved(again) == saved(taught.controller)


def test_a_new_job_is_shown_the_same_prior_and_goes_on_learning_alike(taught):
    again = Controller.restored(saved(taught.controller), taught.controller.settings)
    more = [
        JobSubmitted(30, JobSpec("d", JobLimits(max_gpus=8), kind="train")),
        JobReported(31, "c", goodput_model(compute_seconds=0.09), 700.0, local_batch=64, progress=50.0),
    ]
    for event in more:
        assert again.apply(event) == taught(event)
    views = [next(job for job in c.snapshot(40).jobs if job.id == "d") for c in (again, taught.controller)]
    assert views[0].prior == views[1].prior
    assert views[0].prior.total == 1000.0


def test_the_log_alone_teaches_the_same(taught):
    again = taught.fresh()
    for event in taught.events:
        again(event)
    assert again.controller.bank == taught.controller.bank


def test_a_state_of_before_the_bank_is_read(taught):
    old = saved(taught.controller)
    del old["bank"]
    assert Controller.restored(old, taught.controller.settings).bank.kinds == {}


def test_damage_is_told(taught):
    state = saved(taught.controller)
    del state["bank"]["train"]["rows"][0][0]
    with pytest.raises(StoreFailed, match="damaged"):
        Controller.restored(state)


def test_a_saved_bank_is_what_it_was_when_saved_and_kinds_that_rest_are_not_written_anew(taught):
    before = taught.controller.state()
    text = json.dumps(before)
    taught(JobReported(30, "c", goodput_model(compute_seconds=0.2), 700.0, local_batch=64, progress=50.0))
    after = taught.controller.state()
    assert json.dumps(before) == text
    assert after["bank"]["train"] != before["bank"]["train"]
    assert after["bank"]["tune"] is before["bank"]["tune"]


def test_a_job_that_its_supervisor_saw_succeed_counts_as_well(taught):
    taught(GenerationEnded(25, "c", 1, "succeeded"))
    assert taught.controller.bank.kinds["train"].totals == (1000.0, 805.0)


def test_types_of_gpus_come_back(make_desk):
    from pollux.core import Cluster

    desk = make_desk(Cluster((Node("n0", 4, gpu_type="fast"), Node("n1", 4, gpu_type="slow"))), trigger="events")
    for name, place in (("a", "n0:2"), ("b", "n1:2")):
        desk(JobSubmitted(0, JobSpec(name, JobLimits(max_gpus=8), kind="train")))
        desk.decide(1, **{name: place})
        desk(JobRunning(2, name, 1))
        desk(JobReported(3, name, goodput_model(), 900.0, local_batch=64, progress=1.0))
    again = Controller.restored(saved(desk.controller))
    assert set(again.bank.kinds["train"].throughputs) == {"fast", "slow"}
    assert again.bank == desk.controller.bank
