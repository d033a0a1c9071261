"""The model of second moments against an optimiser's own, where gradients are drawn with a known gain."""

import json

import pytest
import torch

from pollux.agent.adaptation.second_moments import SecondMoments

SQR, VAR = 1.0, 15.0  # of one coordinate at the initial batch


def gain(scale: float) -> float:
    return (VAR + SQR) / (VAR / scale + SQR)


def simulated(optimizer_class, kind: str, scales: list[int], seed: int, size: int = 20_000, **options: object) -> float:
    """Mean second moment of many coordinates after steps at these batches."""
    generator = torch.Generator().manual_seed(seed)
    parameter = torch.nn.Parameter(torch.zeros(size))
    optimizer = optimizer_class([parameter], lr=1e-3, **options)
    for scale in scales:
        noise = torch.randn(size, generator=generator) * (VAR / scale) ** 0.5
        parameter.grad = SQR**0.5 + noise
        optimizer.step()
    key = {"adam": "exp_avg_sq", "rmsprop": "square_avg", "adagrad": "sum"}[kind]
    return float(optimizer.state[parameter][key].mean())


@pytest.mark.parametrize(
    ("optimizer", "kind", "options"),
    [
        (torch.optim.Adam, "adam", {"betas": (0.9, 0.98)}),
        (torch.optim.AdamW, "adam", {"betas": (0.9, 0.9)}),
        (torch.optim.RMSprop, "rmsprop", {"alpha": 0.95}),
    ],
)
def test_they_follow_as_the_optimisers_own_do(optimizer, kind, options):
    scales = [1] * 30 + [4] * 10 + [16] * 25 + [2] * 5
    parameter = torch.nn.Parameter(torch.zeros(1))
    one = SecondMoments.of(optimizer([parameter], lr=1e-3, **options), kind)
    assert one is not None
    for step, scale in enumerate(scales, start=1):
        (ratio,) = one.add_step(gain(scale))
        if step in (30, 31, 40, 50, 65, 70):
            same = simulated(optimizer, kind, scales[:step], seed=0, **options)
            at_first = simulated(optimizer, kind, [1] * step, seed=1, **options)
            assert ratio == pytest.approx(same / at_first, rel=0.03)
    assert ratio != pytest.approx(1 / gain(2), rel=0.05), "still on its way"


def test_a_batch_that_never_changes_changes_nothing():
    for kind in ("adam", "amsgrad", "adagrad", "rmsprop"):
        one = SecondMoments(kind, [0.9, 0.999])
        assert one.ratios == (1.0, 1.0)
        for _ in range(50):
            assert one.add_step(1.0) == pytest.approx((1.0, 1.0))
            one.credit(1.0)


def test_groups_follow_at_their_own_pace():
    one = SecondMoments("adam", [0.5, 0.99], steps=1000)
    for _ in range(10):
        fast, slow = one.add_step(4.0)
    assert fast == pytest.approx(0.25, abs=0.01)
    assert slow == pytest.approx(1 - 0.75 * (1 - 0.99**10), rel=1e-4)
    assert one.final_ratios(4.0) == (0.25, 0.25)


def test_a_start_at_a_larger_batch_is_there_at_once():
    one = SecondMoments("adam", [0.999])
    assert one.add_step(5.0) == pytest.approx((0.2,))


def test_amsgrad_never_shrinks():
    one = SecondMoments("amsgrad", [0.9], steps=1000)
    for _ in range(100):
        (ratio,) = one.add_step(8.0)
    assert ratio == pytest.approx(1.0)
    assert one.final_ratios(8.0) == pytest.approx((1.0,))


def test_adagrad_is_set_against_a_sum_at_the_same_progress():
    one = SecondMoments("adagrad", [0.0], steps=100)
    (first,) = one.add_step(4.0)
    assert first == pytest.approx((100 + 0.25) / 101)
    one.credit(3.0)
    assert one.ratios == pytest.approx(((100 + 0.25) / 103,))
    for _ in range(40_000):
        one.add_step(4.0)
        one.credit(4.0)
    assert one.ratios[0] == pytest.approx(1 / 16, rel=0.02)
    assert one.final_ratios(2.0) == one.ratios, "it does not let go"


def test_what_has_no_second_moments_has_no_model():
    parameter = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([parameter], lr=0.1)
    assert SecondMoments.of(sgd, "plain") is None
    assert SecondMoments.of(torch.optim.Adam([parameter]), "cold") is None


def test_an_optimiser_that_was_used_before_is_warm():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], betas=(0.9, 0.9))
    for _ in range(200):
        parameter.grad = torch.ones(1)
        optimizer.step()
    one = SecondMoments.of(optimizer, "adam")
    assert one is not None
    assert one.add_step(4.0) == pytest.approx((0.925,), rel=1e-6)


def test_groups_may_be_added():
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([first], betas=(0.9, 0.9))
    one = SecondMoments("adam", [0.9], steps=1000)
    optimizer.add_param_group({"params": [second], "betas": (0.9, 0.5)})
    one.match_groups(optimizer)
    old, new = one.add_step(4.0)
    assert (old, new) == pytest.approx((0.925, 0.25))


def test_a_decay_that_cannot_be_read_is_the_usual_one():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter])
    optimizer.param_groups[0]["betas"] = (0.9, torch.zeros((), device="meta"))
    one = SecondMoments.of(optimizer, "adam")
    assert one is not None
    assert one.state_dict()["decays"] == [0.999]


def test_state_goes_through_json_and_goes_on():
    one = SecondMoments("amsgrad", [0.9, 0.5], steps=7)
    one.add_step(3.0)
    other = SecondMoments.restored(json.loads(json.dumps(one.state_dict())))
    assert other is not None
    assert other.add_step(2.0) == one.add_step(2.0)
    assert other.state_dict() == one.state_dict()
    assert SecondMoments.restored(None) is None
