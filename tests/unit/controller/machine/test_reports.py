"""From a report to a model."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pollux.controller import model_from
from pollux.controller.codec.events import decode_value, encode_model
from pollux.controller.machine.reports import limited
from pollux.core import InvalidInput
from pollux.goodput import (
    BatchLimits,
    CorrectedThroughput,
    Efficiency,
    GoodputModel,
    PublishedThroughput,
    goodput_tables,
)
from pollux.testing import SaturatingGoodput, goodput_model
from pollux.wire.report import LARGEST_BATCH, LARGEST_NUMBER, LARGEST_SECONDS, ModelReport, PlaceCorrection

REPORT = ModelReport((0.01, 0.002, 0.1, 0.01, 0.05, 0.005, 2.0), "h100", 128, 4096, 256, 1.5, 3.0, True, 16)


def test_a_report_is_its_model():
    model = model_from(REPORT)
    assert model.throughput == PublishedThroughput(0.01, 0.002, 0.1, 0.01, 0.05, 0.005, 2.0)
    assert model.efficiency == Efficiency(128, 1.5, 3.0)
    assert model.limits == BatchLimits(128, 4096, 16, 256)


def test_each_gpu_type_keeps_what_was_measured_on_it():
    slow, fast = (0.1, 0.02, 0.1, 0.01, 0.05, 0.005, 2.0), REPORT.parameters
    first = model_from(replace(REPORT, gpu_type="Tesla T4", parameters=slow))
    assert first.goodput(1, 4, "T4") == first.goodput(1, 4, "NVIDIA H100 80GB HBM3")
    both = model_from(replace(REPORT, gpu_type="NVIDIA H100 80GB HBM3"), before=first)
    assert both.throughput_on("Tesla T4") == PublishedThroughput(*slow)
    assert both.throughput_on("NVIDIA H100 80GB HBM3") == PublishedThroughput(*fast)
    # By the shorter names of Ray and Slurm, too; and what nobody measured is like the newest.
    assert both.throughput_on("t4") == both.throughput_on("Tesla T4")
    assert both.throughput_on("H100") == both.throughput_on("A100") == PublishedThroughput(*fast)
    assert both.goodput(1, 4, "T4") < both.goodput(1, 4, "H100")
    assert decode_value(GoodputModel, encode_model(both)) == both


def test_what_measurements_correct_comes_with_the_model():
    places = (PlaceCorrection(1, 4, 0.25), PlaceCorrection(2, 8, -0.5))
    model, plain = model_from(replace(REPORT, places=places)), model_from(REPORT)
    assert model.throughput == CorrectedThroughput(plain.throughput, ((1, 4, 0.25), (2, 8, -0.5)))
    assert model.goodput(1, 4) == pytest.approx(plain.goodput(1, 4) * np.exp(-0.25))
    with pytest.raises(InvalidInput, match=r"a correction is 3\.0"):
        model_from(replace(REPORT, places=(PlaceCorrection(1, 4, 3.0),)))


def test_not_every_name_is_kept_for_ever():
    model = None
    for number in range(40):
        model = model_from(replace(REPORT, gpu_type=f"type {number}"), before=model)
    assert [*model.by_type] == [f"type {number}" for number in range(24, 40)]
    assert model_from(replace(REPORT, gpu_type="")).by_type == {}


@pytest.mark.parametrize(("learned", "most", "least"), [(None, 256, 16), (512, 256, 16), (64, 64, 16), (8, 8, 8)])
def test_what_memory_taught_bounds_the_local_batch(learned, most, least):
    limits = model_from(REPORT, learned).limits
    assert (limits.local_max, limits.local_min) == (most, least)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"parameters": (1.0, 2.0)}, "a model has 2 parameters; give 7"),
        ({"parameters": (0.01, float("nan"), 0.1, 0.01, 0.05, 0.005, 2.0)}, "beta_c is nan"),
        ({"grad_var": float("nan")}, "grad_var is nan"),
        ({"parameters": (1e10, 0.1, 0.1, 0.01, 0.05, 0.005, 2.0)}, r"αc 10000000000\.0; give at most 1e\+09 seconds"),
        ({"grad_sqr": 1e31}, r"grad_sqr 1e\+31; give at most 1e\+30"),
        ({"max_batch": 10**13}, r"max_batch 10000000000000; give at most 1e\+12 samples"),
        ({"max_batch": 64}, "maximum is 64, below initial 128"),
        ({"local_batch_max": 0}, "local_max is 0"),
    ],
)
def test_a_report_that_is_no_model_is_refused(wrong, said):
    with pytest.raises(InvalidInput, match=said):
        model_from(replace(REPORT, **wrong))


def test_only_our_own_models_can_be_bounded():
    other, ours = SaturatingGoodput(), goodput_model()
    assert limited(other, 1) is other
    assert limited(None, 1) is None
    assert limited(ours, None) is ours
    assert limited(ours, 7).limits.local_max == 7


SECONDS = st.floats(0.0, LARGEST_SECONDS)
BATCHES = st.one_of(st.integers(1, 10_000), st.integers(1, LARGEST_BATCH))
NORMS = st.floats(0.0, LARGEST_NUMBER)


@given(
    st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, st.floats(1.0, 10.0)),
    st.tuples(BATCHES, BATCHES, BATCHES, BATCHES).map(sorted),
    st.tuples(NORMS, NORMS),
    st.booleans(),
)
@example((1e9, 5e-324, 1e9, 1e9, 1e9, 1e9, 2.0), [1, 1, 1, LARGEST_BATCH], (1e30, 0.0), True)
@example((5e-324, 1e9, 0.0, 0.0, 0.0, 1e9, 10.0), [1, 2, 3, LARGEST_BATCH], (5e-324, 1e30), True)
@example((1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1.0), [LARGEST_BATCH] * 4, (0.0, 1e30), False)
@example((1e-15, 0.0, 1e9, 0.0, 1e9, 0.0, 1.0), [1, 1, LARGEST_BATCH, LARGEST_BATCH], (1e-300, 1e-300), True)
def test_whatever_is_taken_gives_numbers_that_are_finite(parameters, batches, norms, accumulation):
    """One by one and in tables, and without a warning; by the pages, stores and policies that come after."""
    least, initial, most, largest = batches
    report = ModelReport(parameters, "x", initial, max(most, initial), largest, *norms, accumulation, least)
    try:
        model = model_from(report)
    except InvalidInput:
        # Of a step that takes no time.
        assert max(parameters[:2]) < 1e-14
        return
    nodes, gpus = np.array([1, 1, 1, 2, 4]), np.array([1, 2, 8, 2, 64])
    alone = [model.goodput(int(n), int(k), "x") for n, k in zip(nodes, gpus, strict=True)]
    together = goodput_tables([model], nodes, gpus, "x")[0]
    for values in (alone, together):
        assert np.isfinite(values).all()
        assert (np.asarray(values) >= 0.0).all()
