"""Finish-time fairness: isolated times by hand, contention by hand, and what profiles cannot answer."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from pollux.core import InvalidInput
from pollux.goodput import BatchLimits
from pollux.sim.applications.application import FixedConfiguration, Terms
from pollux.sim.applications.profiles import load_profiles
from pollux.sim.results.fairness import IsolatedTimes, average_contention, finish_time_fairness
from pollux.sim.simulation.simulation import JobOutcome, SimulationSettings

LIMITS = BatchLimits(initial=8, maximum=32, local_min=4, local_max=32)


@dataclass
class Plain:
    """Steps take one second on any number of GPUs of one node, and `far` seconds on several."""

    limits: BatchLimits = LIMITS
    fixed: FixedConfiguration | None = None
    max_nodes: int = 2
    batch_sizes: tuple[int, ...] = (8, 16, 32)
    progress: tuple[float, ...] = (60.0, 100.0)
    far: float = 1.0
    unknown: tuple[int, ...] = ()
    name: str = "plain"
    state_bytes: float | None = None
    terms: Terms | None = None

    def step_and_sync_seconds(self, counts, local_batch):
        if sum(counts) in self.unknown:
            raise InvalidInput("not measured")
        return (1.0, 0.0) if len(counts) == 1 else (self.far, 0.0)

    def gradient_statistics(self, total_batch, epoch):
        # Epoch 0 is all signal: a larger batch gains nothing. Epoch 1 is nearly all noise: it gains in full.
        return (1.0, 0.0) if epoch == 0 else (0.0, 1.0)

    def iterations(self, total_batch, epoch):
        return 0.0


def times(gpus_per_node=4, num_nodes=2, **changes):
    return IsolatedTimes({"plain": Plain(**changes)}, num_nodes, gpus_per_node)


def job(name, submitted, finished, application="plain"):
    return JobOutcome(name, application, submitted, submitted, finished, 0, 0.0)


def test_gains_are_counted_epoch_by_epoch():
    # On 2 GPUs at batch 32: 60 steps without gain, then 40 progress at a gain of 4.
    assert times().seconds("plain", 2) == pytest.approx(60 + 40 / 4, rel=1e-4)


def test_one_gpu_accumulates_to_exceed_the_initial_batch():
    # Batch 8 takes 100 steps of 1 s; larger ones take two passes a step: 2 * (60 + 40 / 4) = 140 s.
    assert times().seconds("plain", 1) == pytest.approx(100, rel=1e-4)


def test_linear_between_whole_gpus():
    known = times()
    assert known.seconds("plain", 1.25) == pytest.approx(
        0.75 * known.seconds("plain", 1) + 0.25 * known.seconds("plain", 2)
    )


def test_below_one_gpu_in_proportion():
    known = times()
    assert known.seconds("plain", 0.25) == pytest.approx(4 * known.seconds("plain", 1))


def test_more_gpus_never_hurt():
    known = times(far=50.0)
    assert known.seconds("plain", 8) == known.seconds("plain", 4)


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 8),
        ({"max_nodes": 1}, 4),
        ({"batch_sizes": (8, 16)}, 4),
        ({"limits": BatchLimits(8, 16, 8, 32)}, 2),
    ],
)
def test_share_is_capped_at_what_the_job_can_use(changes, most):
    # Steps get shorter with every GPU, so that any further one would show.
    class Faster(Plain):
        def step_and_sync_seconds(self, counts, local_batch):
            return 1.0 / sum(counts), 0.0

    known = IsolatedTimes({"plain": Faster(**changes)}, 2, 4)
    assert known.seconds("plain", most) < known.seconds("plain", most - 1)
    assert known.seconds("plain", 1000.0) == known.seconds("plain", most)


def test_what_the_profile_cannot_answer_does_not_count():
    known = times(unknown=(3, 4))
    assert known.seconds("plain", 4) == known.seconds("plain", 2)


def test_fewest_gpus_that_can_be_answered_count_below_it():
    known = times(unknown=(1,))
    assert known.seconds("plain", 1) == pytest.approx(2 * known.seconds("plain", 2))


def test_nothing_answerable_is_refused():
    with pytest.raises(InvalidInput, match=r"application 'plain'.*1 to 8 packed GPUs.*measure"):
        times(unknown=tuple(range(1, 65))).seconds("plain", 3)


def test_fixed_configuration_is_kept():
    known = times(fixed=FixedConfiguration(num_gpus=2, batch_size=8))
    assert known.seconds("plain", 8) == pytest.approx(100, rel=1e-4)
    assert known.seconds("plain", 1) == pytest.approx(200, rel=1e-4)


def test_fixed_configuration_is_cut_to_the_cluster():
    known = times(1, 1, fixed=FixedConfiguration(num_gpus=2, batch_size=8))
    assert known.seconds("plain", 1) == pytest.approx(100, rel=1e-4)


@pytest.mark.parametrize("share", [0.0, -1.0, math.nan, math.inf])
def test_impossible_share_is_refused(share):
    with pytest.raises(InvalidInput, match="share"):
        times().seconds("plain", share)


def test_average_contention_by_hand():
    # a alone for 100 s, with b for 100 s, with b and c for 100 s; b then ends alone.
    jobs = [job("a", 0, 300), job("b", 100, 400), job("c", 200, 300)]
    assert average_contention(jobs) == pytest.approx([(1 + 2 + 3) / 3, (2 + 3 + 1) / 3, 3.0])


def test_average_contention_agrees_with_counting():
    random = np.random.default_rng(1)
    jobs = [job(str(i), s, s + d) for i, (s, d) in enumerate(random.uniform(1, 100, (40, 2)))]
    counted = [
        sum(max(0.0, min(a.finished, b.finished) - max(a.submitted, b.submitted)) for b in jobs)
        / (a.finished - a.submitted)
        for a in jobs
    ]
    assert average_contention(jobs) == pytest.approx(counted)


def test_rho_is_time_over_isolated_time():
    settings = SimulationSettings(num_nodes=2, gpus_per_node=4)
    jobs = [job("a", 0, 200), job("b", 0, 200)]
    known = times()
    expected = 200 / known.seconds("plain", 4.0)
    assert finish_time_fairness(jobs, {"plain": Plain()}, settings) == pytest.approx([expected, expected])


def test_alone_in_the_cluster_is_compared_with_the_whole_of_it():
    settings = SimulationSettings(num_nodes=2, gpus_per_node=4)
    alone = times().seconds("plain", 8)
    assert finish_time_fairness([job("a", 50, 50 + alone)], {"plain": Plain()}, settings) == [pytest.approx(1.0)]


def test_published_applications_take_plausible_times(osdi21_data):
    known = IsolatedTimes(load_profiles(osdi21_data / "profiles"))
    names = ("cifar10", "bert", "deepspeech2", "imagenet")
    hours = {name: known.seconds(name, 1) / 3600 for name in names}
    assert hours["cifar10"] < hours["bert"] < hours["deepspeech2"] < hours["imagenet"]
    assert 1 < hours["cifar10"] < 2
    assert 100 < hours["imagenet"] < 200
    for name in hours:
        falling = [known.seconds(name, share) for share in np.linspace(0.5, 16, 40)]
        assert falling == sorted(falling, reverse=True)
