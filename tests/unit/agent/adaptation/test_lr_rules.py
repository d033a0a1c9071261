"""Learning-rate rules: what each gives, and what is refused."""

import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pollux.agent.adaptation import lr_rules
from pollux.agent.adaptation.noise_scale import NoiseEstimate
from pollux.core.errors import InvalidInput, UnknownName


def estimate(known=(True, True), num_measured=100, high=120.0):
    return NoiseEstimate(
        initial_batch=64,
        noise_scale=96.0,
        low=80.0,
        high=high,
        grad_sqr=4.0,
        grad_var=6.0,
        group_sqr=(3.0, 1.0),
        group_var=(1.0, 5.0),
        group_known=known,
        num_measured=num_measured,
    )


def gain(scale, sqr, var):
    return (var + sqr) / (var / scale + sqr)


def test_names_are_sorted_and_can_be_created():
    assert lr_rules.names() == ("adascale", "legw", "linear", "none", "sqrt")
    assert [lr_rules.create(name).name for name in lr_rules.names()] == list(lr_rules.names())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adascale", (gain(4, 3.0, 1.0), gain(4, 1.0, 5.0))),
        ("sqrt", (2.0, 2.0)),
        ("legw", (2.0, 2.0)),
        ("linear", (4.0, 4.0)),
        ("none", (1.0, 1.0)),
    ],
)
def test_factors(name, expected):
    assert lr_rules.create(name).factors(4.0, estimate(), 0.0) == pytest.approx(expected)


@given(name=st.sampled_from(lr_rules.names()), progress=st.floats(0, 1e9), warmup=st.floats(0, 1e6))
def test_exactly_one_at_the_initial_batch(name, progress, warmup):
    assert lr_rules.create(name, warmup=warmup).factors(1.0, estimate(), progress) == (1.0, 1.0)


@given(
    name=st.sampled_from(lr_rules.names()),
    scale=st.floats(0.01, 1e4),
    progress=st.floats(0, 1e9),
    warmup=st.floats(0, 1e6),
)
def test_always_finite_and_above_zero(name, scale, progress, warmup):
    factors = lr_rules.create(name, warmup=warmup).factors(scale, estimate(), progress)
    assert all(math.isfinite(factor) and factor > 0.0 for factor in factors)


def test_adascale_falls_back_to_all_groups_and_then_to_the_lower_end():
    rule = lr_rules.create("adascale")
    own, shared = rule.factors(4.0, estimate(known=(True, False)), 0.0)
    assert own == pytest.approx(gain(4, 3.0, 1.0))
    assert shared == pytest.approx(gain(4, 64.0, 96.0))
    unknown = estimate(known=(False, False), high=math.inf)
    assert rule.factors(4.0, unknown, 0.0) == pytest.approx((gain(4, 64.0, 80.0),) * 2)
    few = estimate(num_measured=5)
    assert rule.factors(4.0, few, 0.0) == pytest.approx((gain(4, 64.0, 80.0),) * 2)


def test_legw_stretches_the_warm_up():
    rule = lr_rules.create("legw", warmup=1000.0)
    for progress in (0.0, 10.0, 1000.0, 1500.0, 3999.0, 4000.0, 9000.0):
        schedule = min(1.0, progress / 1000.0)
        wanted = 2.0 * min(1.0, progress / 4000.0)
        assert rule.factors(4.0, estimate(), progress)[0] * schedule == pytest.approx(wanted)
    assert rule.factors(4.0, estimate(), 0.0) == (0.5, 0.5)


def test_ones_own_rule_sees_scale_gain_and_group():
    seen = []

    def rule(scale, gain, group):
        seen.append((scale, gain, group))
        return 1.5 + group

    own = lr_rules.create(rule)
    assert own.name == "own"
    assert own.factors(4.0, estimate(), 0.0) == (1.5, 2.5)
    assert seen == [(4.0, pytest.approx(gain(4, 3.0, 1.0)), 0), (4.0, pytest.approx(gain(4, 1.0, 5.0)), 1)]
    assert own.factors(1.0, estimate(), 0.0) == (1.0, 1.0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, None, "fast"])
def test_a_factor_that_cannot_be_used_names_the_rule(value):
    with pytest.raises(InvalidInput, match=r"learning-rate rule 'own' gave .* for parameter group 0 at scale 4"):
        lr_rules.create(lambda scale, gain, group: value).factors(4.0, estimate(), 0.0)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_cannot_be(scale):
    with pytest.raises(InvalidInput, match="scale is"):
        lr_rules.create("sqrt").factors(scale, estimate(), 0.0)


def test_an_unknown_name_suggests_the_closest():
    with pytest.raises(UnknownName, match=r"unknown learning-rate rule 'adascal': did you mean 'adascale'\?"):
        lr_rules.create("adascal")


def test_neither_name_nor_function():
    with pytest.raises(InvalidInput, match="learning-rate rule is 3"):
        lr_rules.create(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("warmup", [-1.0, math.nan, math.inf])
def test_a_warm_up_that_cannot_be(warmup):
    with pytest.raises(InvalidInput, match="warmup is"):
        lr_rules.create("legw", warmup=warmup)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (torch.optim.SGD, "adascale"),
        (torch.optim.ASGD, "adascale"),
        (torch.optim.Adam, "sqrt"),
        (torch.optim.AdamW, "sqrt"),
        (torch.optim.NAdam, "sqrt"),
        (torch.optim.Adagrad, "sqrt"),
        (torch.optim.RMSprop, "sqrt"),
    ],
)
def test_default_by_optimiser(kind, expected):
    assert lr_rules.default_rule(kind([torch.nn.Parameter(torch.zeros(2))], lr=0.1)) == expected


def test_rates_are_scaled_for_one_step_and_put_back_even_after_an_error():
    groups = [{"lr": 0.5}, {"lr": 2.0}]
    with contextlib.suppress(ZeroDivisionError), lr_rules.scaled_rates(groups, (2.0, 3.0)):
        assert [group["lr"] for group in groups] == [1.0, 6.0]
        raise ZeroDivisionError
    assert [group["lr"] for group in groups] == [0.5, 2.0]


def test_factors_of_one_leave_what_an_optimiser_does_to_its_rates():
    groups = [{"lr": 0.5}]
    with lr_rules.scaled_rates(groups, (1.0,)):
        groups[0]["lr"] = 0.25
    assert groups == [{"lr": 0.25}]
