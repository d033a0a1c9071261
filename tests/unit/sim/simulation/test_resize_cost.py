"""How long simulated jobs stand still."""

import math
from dataclasses import replace

import pytest

from pollux.core import InvalidInput, Policy
from pollux.goodput import BatchLimits, PublishedThroughput
from pollux.sim import SimulationSettings, simulate
from pollux.sim.applications.modelled import ModelledApplication, NoiseSchedule
from pollux.sim.results.metrics import configuration, describe_world
from pollux.sim.simulation.resize_cost import AUTO, DEFAULT_STATE_BYTES, PauseModel, Pauses
from pollux.sim.workloads.builtin import builtin_applications
from pollux.sim.workloads.workload import Workload, WorkloadJob
from pollux.testing import place

MODEL = PauseModel()
APPLICATION = ModelledApplication(
    name="small",
    throughput=PublishedThroughput(0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0),
    noise=NoiseSchedule(start=100, end=100),
    limits=BatchLimits(initial=64, maximum=64, local_min=1, local_max=64),
    epochs=1,
    steps_per_epoch=2_000,
    state_bytes=5e9,
)


def test_the_model_is_a_constant_and_bytes_over_bandwidth():
    assert MODEL.live(5e9) == pytest.approx(0.3 + 2.0)
    assert MODEL.restart(5e9) == pytest.approx(30.0 + 10.0)
    assert MODEL.first() == 30.0


def test_a_number_of_seconds_is_for_all():
    pauses = Pauses(12.0)
    assert pauses.change(APPLICATION) == pauses.start(APPLICATION, True) == pauses.start(APPLICATION, False) == 12.0


def test_auto_tells_changes_from_starts():
    pauses = Pauses(AUTO)
    assert pauses.expected(APPLICATION) == pauses.change(APPLICATION) == MODEL.live(5e9)
    assert pauses.start(APPLICATION, is_first=True) == MODEL.first()
    assert pauses.start(APPLICATION, is_first=False) == MODEL.restart(5e9)
    assert pauses.change(replace(APPLICATION, state_bytes=None)) == MODEL.live(DEFAULT_STATE_BYTES)


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_state_is_a_number_of_bytes(wrong):
    with pytest.raises(InvalidInput, match="state_bytes"):
        replace(APPLICATION, state_bytes=wrong)


def test_built_in_applications_have_states_of_their_own():
    pauses = Pauses(AUTO)
    costs = {name: pauses.change(each) for name, each in builtin_applications().items()}
    assert len(set(costs.values())) == len(costs)
    assert costs["resnet-small"] < costs["bert-tune"] < costs["vit-large"]


class Scripted(Policy):
    """One GPU, then two, then none for a while."""

    name, batch, needs = "scripted", "fixed", frozenset()
    steps = ("n0:1", "n0:2", "", "n0:2")

    def allocate(self, snapshot):
        from pollux.core import Decision

        number = min(int(snapshot.now // 60) - 1, len(self.steps) - 1)
        placement = place(self.steps[number].replace("n0", snapshot.cluster.nodes[0].id))
        return Decision({job.id: placement for job in snapshot.jobs if placement})


def standstill(seconds):
    workload = Workload("w", (WorkloadJob("a", 0.0, "small", 1, 64),))
    settings = SimulationSettings(num_nodes=1, gpus_per_node=2, resize_seconds=seconds)
    run = simulate(workload, Scripted(), {"small": APPLICATION}, settings)
    # Steps take as long on any number of GPUs here.
    return run.jobs[0].finished - 60.0 - 60.0 - 0.1 * 2_000


def test_a_run_pays_for_each_kind():
    # Ends of epochs are rounded to seconds.
    assert standstill(0.0) == 0.0
    assert standstill(7.0) == pytest.approx(21.0)
    assert standstill(AUTO) == pytest.approx(MODEL.first() + MODEL.live(5e9) + MODEL.restart(5e9), abs=1.0)


def test_the_world_says_how():
    settings = SimulationSettings(resize_seconds=AUTO)
    workload = Workload("w", (WorkloadJob("a", 0.0, "small", 1, 64),))
    config = configuration([workload], [], {"small": APPLICATION}, settings)
    assert any("model of state" in line for line in describe_world(config))


def test_anything_else_is_refused():
    with pytest.raises(InvalidInput, match="or 'auto'"):
        SimulationSettings(resize_seconds=-1.0)
