"""The present batch and what it does to steps, learning rates and progress; when it may change at all."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pollux.agent.adaptation import lr_rules
from pollux.agent.adaptation.adaptation import Adaptation, BatchRange
from pollux.agent.adaptation.batch_tuner import BatchChange
from pollux.agent.adaptation.noise_scale import NoiseEstimate
from pollux.agent.adaptation.round_exchange import SummedNoise
from pollux.agent.adaptation.second_moments import SecondMoments
from pollux.agent.adaptation.step_profile import ProfileKey
from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.step.gradient_norms import GradientNormMeter
from pollux.agent.step.step_clock import StepClock
from pollux.goodput import BatchChoice, PublishedThroughput

CPU = torch.device("cpu")
FLAT = PublishedThroughput(0.01, 1e-6, 1e-8, 1e-8, 1e-8, 1e-8, 1.0)


class Steps:
    """Where steps would be taken."""

    def __init__(self, measures: bool, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD):
        model = nn.Linear(2, 1)
        groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
        self.optimizer = optimizer(groups, lr=0.1)  # type: ignore[call-arg]
        self.meter = GradientNormMeter(self.optimizer, CPU) if measures else None
        self.clock = StepClock(CPU, list(model.parameters()))
        self.sums = (0.0, 0)

    def losses(self):
        return self.sums

    def predicted_local_batch(self, local_batch):
        return None


def known(phi: float = 500.0, initial: int = 16) -> NoiseEstimate:
    var = phi / initial
    return NoiseEstimate(initial, phi, phi * 0.9, phi * 1.1, 1.0, var, (0.5, 0.5), (var, 0.0), (True, True), 200)


def short(reach: float) -> float:
    """Progress per sample of a step at four times the batch that moves so many steps at the initial one."""
    gain = 4 * 516 / 564
    part = reach / gain
    return gain * part * (2.0 - 0.5 * part) / 1.5 / 4.0


@pytest.fixture
def made():
    started = []

    def make(
        allowed: BatchRange,
        rule: str = "sqrt",
        measures: bool = True,
        num_replicas: int = 1,
        optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    ) -> Adaptation:
        replicas = ReplicaGroup(Environment(), CPU)
        replicas.num_replicas = num_replicas
        result = Adaptation(
            allowed, lr_rules.create(rule), Steps(measures, optimizer), replicas, "cpu", 1000.0, measures
        )
        started.append(result)
        return result

    yield make
    for one in started:
        one.close()


def ready(adaptation: Adaptation) -> Adaptation:
    """All that a change needs is known."""
    adaptation.model = FLAT
    adaptation.pace.rounds_since_change = 100
    adaptation.memory.note_run(16)
    adaptation.estimate = known  # type: ignore[method-assign]
    return adaptation


def test_exact_mode_never_changes(made):
    exact = made(BatchRange(16))
    ready(exact)
    assert not exact.adapts
    assert exact.next_change(0.0) is None
    assert exact.factors(16, 0.0) == (1.0, 1.0)
    assert exact.efficiency(64) == 1.0


def test_the_split_follows_user_and_memory(made):
    assert made(BatchRange(16, accumulation=1)).choice == BatchChoice(8, 1, 1)
    assert made(BatchRange(16, local_max=5)).choice == BatchChoice(4, 3, 1)
    assert made(BatchRange(16, local_max=5), num_replicas=2).choice == BatchChoice(4, 1, 2)


def test_a_measured_step_alone_is_taken_in_halves(made):
    one = made(BatchRange(16, 64))
    assert (one.shape(0).repeats, one.shape(0).measured) == (2, True)
    assert (one.shape(1).repeats, one.shape(1).measured) == (1, False)
    two = made(BatchRange(16, 64), num_replicas=2)
    assert (two.shape(0).repeats, two.shape(0).measured) == (1, True)
    accumulating = made(BatchRange(16, 64, accumulation=2))
    assert (accumulating.shape(0).repeats, accumulating.shape(0).measured) == (3, True)


def test_without_a_meter_or_a_second_sample_nothing_is_measured(made):
    assert not made(BatchRange(16, 64), measures=False).shape(0).measured
    assert not made(BatchRange(1, 64)).shape(0).measured


def test_factors_and_efficiency_at_a_larger_batch(made):
    one = made(BatchRange(16, 64))
    one.believed = known()
    assert one.factors(64, 0.0) == (2.0, 2.0)
    assert one.factors(16, 0.0) == one.factors(5, 0.0) == (1.0, 1.0)
    assert one.efficiency(64) == pytest.approx(2.0 / 4.0), "a step is worth no more than it moves"
    one._moments = SecondMoments("adam", [0.9, 0.9], steps=1000)
    assert one.efficiency(64) == pytest.approx(516 / 564), "denominators shrink with the noise"
    assert one.counted_efficiency(64) == pytest.approx(short(2.0)), "but they have not yet"
    assert one.efficiency(16) == one.efficiency(3) == 1.0
    still = made(BatchRange(16, 64), "none")
    still.believed = known()
    assert still.efficiency(64) == pytest.approx(1.0 / 4.0)
    linear = made(BatchRange(16, 64), "linear")
    linear.believed = known()
    assert linear.efficiency(64) == pytest.approx(516 / 564)
    grouped = made(BatchRange(16, 64), "adascale")
    grouped.believed = known()
    first, second = grouped.factors(64, 0.0)
    assert first > 3.5
    assert second == pytest.approx(1.0), "a group without noise gains nothing"


def test_a_change_is_made_where_all_is_known(made):
    change = ready(made(BatchRange(16, 64))).next_change(0.0)
    assert change is not None
    assert change.choice.total == 32


@pytest.mark.parametrize("case", ["no model", "frozen", "watching", "too soon", "unknown"])
def test_and_only_there(made, case):
    one = ready(made(BatchRange(16, 64)))
    if case == "no model":
        one.model = None
    elif case == "frozen":
        one.guard.freeze(0.0)
    elif case == "watching":
        one.guard.changed()
    elif case == "too soon":
        one.pace.rounds_since_change = 2
    else:
        del one.estimate
    assert one.next_change(10.0) is None


def test_the_ceiling_and_memory_bound_it(made):
    assert ready(made(BatchRange(16, 16))).next_change(0.0) is None
    small = ready(made(BatchRange(16, 64, local_max=16)))
    change = small.next_change(0.0)
    assert change is None or change.choice.local_batch <= 16
    burst = ready(made(BatchRange(16, 64)))
    burst.memory.note_out_of_memory(20)
    change = burst.next_change(0.0)
    assert change is None or change.choice.local_batch <= 19


def grow(adaptation: Adaptation, total: int) -> None:
    adaptation.change_batch(BatchChange(BatchChoice(total, 0, 1), 1.5, 1.0, 0.9, "as told"))


def test_taking_a_change_and_going_back(made):
    one = made(BatchRange(16, 64))
    grow(one, 32)
    assert (one.total, one.choice.local_batch, one.guard.is_watching) == (32, 32, True)
    assert one.shape(1).total == 32
    one.go_back(16, 50)
    assert (one.total, one.choice.total) == (16, 16)
    assert not one.is_round(50)


def test_a_size_is_on_trial_until_it_ran(made):
    one = made(BatchRange(16, 64))
    assert one.trial_from(16) == 1
    one.count_step(16, 16)
    assert one.trial_from(16) is None
    assert one.trial_from(17) == 16


def test_out_of_memory_goes_back_to_what_ran(made):
    one = made(BatchRange(16, 64))
    one.count_step(16, 16)
    grow(one, 32)
    assert one.shrink_batch(32) == 16
    assert (one.total, one.choice) == (16, BatchChoice(16, 0, 1))
    assert one.local_max == 31


def test_in_exact_mode_out_of_memory_accumulates(made):
    one = made(BatchRange(16))
    assert one.shrink_batch(16) == 8
    assert (one.total, one.choice) == (16, BatchChoice(8, 1, 1))
    assert one.shrink_batch(8) == 4
    assert one.choice == BatchChoice(4, 3, 1)


def test_a_round_reports_the_mean_loss(made):
    one = made(BatchRange(16, 64))
    one._engine.sums = (6.0, 4)
    report = one.round(10)
    assert report.loss == 1.5
    assert report.spike is None
    one._engine.sums = (0.0, 0)
    assert one.round(20).loss is None


def test_a_spike_is_reported_only_after_a_change(made):
    one = made(BatchRange(16, 64))
    step = 0

    def rounds(loss: float, count: int):
        nonlocal step
        reports = []
        for _ in range(count):
            step += 20
            one._engine.sums = (20.0 * loss, 20)
            one._samples = 320
            reports.append(one.round(step))
        return reports

    assert all(report.spike is None for report in [*rounds(1.0, 8), *rounds(100.0, 1), *rounds(1.0, 8)])
    grow(one, 32)
    assert rounds(1.0, 1)[0].spike is None
    assert rounds(50.0, 1)[0].spike is not None


def test_the_state_is_plain_and_goes_on(made):
    one = ready(made(BatchRange(16, 64)))
    one.believed = known()
    grow(one, 32)
    one.memory.note_out_of_memory(60)
    state = json.loads(json.dumps(one.state_dict()))
    other = made(BatchRange(16, 64), num_replicas=2)
    other.load_state_dict(state, 70)
    assert (other.total, other.choice) == (32, BatchChoice(16, 0, 2))
    assert other.believed == known()
    assert other.local_max == 59
    assert not other.guard.is_watching, "there is nothing to go back to any more"
    assert not other.is_round(70)


def test_a_lower_ceiling_than_before_holds(made):
    one = made(BatchRange(16, 64))
    grow(one, 64)
    other = made(BatchRange(16, 40))
    other.load_state_dict(one.state_dict(), 0)
    assert other.total == 40
    exact = made(BatchRange(16))
    exact.load_state_dict(one.state_dict(), 0)
    assert exact.total == 16


def test_an_estimate_without_an_upper_end_survives_json(made):
    one = made(BatchRange(16, 64))
    unbounded = NoiseEstimate(
        16, float("inf"), 40.0, float("inf"), -1.0, 2.0, (-1.0, 0.0), (2.0, 0.0), (False, False), 30
    )
    one.believed = unbounded
    other = made(BatchRange(16, 64))
    other.load_state_dict(json.loads(json.dumps(one.state_dict(), allow_nan=False)), 0)
    assert other.believed == unbounded


@pytest.mark.parametrize(("low", "measured", "after"), [(900.0, 50, 900.0), (300.0, 50, 500.0), (900.0, 5, 500.0)])
def test_what_is_believed_gives_way_to_at_least_so_much(made, low, measured, after):
    one = made(BatchRange(16, 64), "linear")
    one.believed = known(500.0)
    unknown = NoiseEstimate(
        16, float("inf"), low, float("inf"), -1.0, 2.0, (-1.0, 0.0), (2.0, 0.0), (False, False), measured
    )
    one.estimate = lambda: unknown
    one._add_noise(SummedNoise(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros(0), np.zeros(0)))
    assert one.believed.noise_scale == after
    assert one.efficiency(64) == pytest.approx((after + 16) / (after + 64))


def optimiser_steps(adaptation: Adaptation, count: int, total: int) -> list[float]:
    """Real steps of the optimiser and what each counts, per sample."""
    counted = []
    for _ in range(count):
        for group in adaptation._engine.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        adaptation._engine.optimizer.step()
        counted.append(adaptation.count_step(total, total))
    return counted


def test_a_step_counts_by_second_moments_as_they_are(made):
    one = made(BatchRange(16, 64), optimizer=torch.optim.Adam)
    assert set(optimiser_steps(one, 30, 16)) == {1.0}
    one.believed = known()
    for group in one._engine.optimizer.param_groups:
        group["betas"] = (0.9, 0.9)
    one._add_noise(SummedNoise(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros(0), np.zeros(0)))
    one.believed = known()
    assert one.efficiency(64) == pytest.approx(516 / 564)
    counted = optimiser_steps(one, 60, 64)
    assert counted == sorted(counted)
    gain = 4 * 516 / 564
    ratio = (0.9 * (1 - 0.999**30) + 0.1 / gain) / (0.9 * (1 - 0.999**30) + 0.1)
    assert counted[0] == pytest.approx(short(2.0 / ratio**0.5), rel=1e-6)
    assert counted[-1] == pytest.approx(516 / 564)
    assert one.counted_efficiency(64) == pytest.approx(counted[-1])


def test_plain_optimisers_have_no_second_moments_and_exact_mode_counts_all(made):
    one = made(BatchRange(16, 64), "linear")
    one.believed = known()
    assert optimiser_steps(one, 3, 64) == pytest.approx([516 / 564] * 3)
    exact = made(BatchRange(16), optimizer=torch.optim.Adam)
    exact.believed = known()
    assert optimiser_steps(exact, 3, 64) == [1.0] * 3
    assert exact.state_dict()["moments"] is None


def test_second_moments_are_saved_and_go_back_with_the_weights(made):
    one = made(BatchRange(16, 64), optimizer=torch.optim.Adam)
    one.believed = known()
    optimiser_steps(one, 20, 16)
    before = json.loads(json.dumps(one.state_dict()))
    optimiser_steps(one, 500, 64)
    changed = one.counted_efficiency(64)
    state = json.loads(json.dumps(one.state_dict()))
    other = made(BatchRange(16, 64), num_replicas=2, optimizer=torch.optim.Adam)
    other.load_state_dict(state, 520)
    assert other.counted_efficiency(64) == changed
    one.go_back(16, 20, before)
    assert one.counted_efficiency(64) == pytest.approx(short(2.0)) != changed
    assert optimiser_steps(one, 500, 64)[-1] == pytest.approx(changed, rel=1e-6)


def test_a_state_without_second_moments_is_taken(made):
    one = made(BatchRange(16, 64), optimizer=torch.optim.Adam)
    optimiser_steps(one, 30, 16)
    state = {key: value for key, value in one.state_dict().items() if key != "moments"}
    one.load_state_dict(state, 30)
    one.believed = known()
    first, *_, last = optimiser_steps(one, 4000, 64)
    assert first == pytest.approx(short(2.0)), "taken to be those of the initial batch"
    assert last > 0.9


def test_parts_are_counted_over_all_replicas(made, monkeypatch):
    one = made(BatchRange(16, 64), num_replicas=2)
    meter, optimizer = one._engine.meter, one._engine.optimizer
    monkeypatch.setattr(one._replicas, "gather", lambda numbers: np.array([numbers, numbers]))
    for weights in ((1.0,), (1.0, 0.0), (0.0,)):
        for weight in weights:
            meter.start_measuring(weight)
            sum(parameter.sum() for group in optimizer.param_groups for parameter in group["params"]).backward()
            meter.stop_measuring()
        meter.close_row(None, 16)
    one.round(10)
    assert one.tracker.num_measured == 2, "one part on each replica"
    assert one.tracker.num_dropped == 1, "no part at all says nothing"


def test_the_reported_model_is_corrected_by_what_was_measured(made):
    adaptation = made(BatchRange(16, 64, None, 0))
    assert adaptation.reported_model is None
    adaptation.model = FLAT
    key = ProfileKey(1, 1, 16.0, adaptation._gpu_type)
    for _ in range(8):
        adaptation.profile.add(key, compute_seconds=0.02, step_seconds=0.02, data_seconds=0.0, repeats=1)
    reported = adaptation.reported_model
    assert reported is not None
    assert reported.throughput.step_seconds(1.0, 1.0, 16.0) == pytest.approx(0.02)
    assert adaptation.goodput_model is not None
    assert adaptation.goodput_model.throughput is FLAT
