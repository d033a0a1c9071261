"""A fit corrected by what it leaves of its measurements: at the places measured, nearby, and in tables."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pollux.controller.codec.events import decode_value, encode_model
from pollux.core import InvalidInput
from pollux.goodput import (
    CorrectedThroughput,
    GoodputModel,
    Observation,
    PublishedThroughput,
    batch_tables,
    best_batch,
    corrected,
    goodput_tables,
)
from pollux.goodput.corrected import MOST_PLACES
from pollux.testing import goodput_model

BASE = PublishedThroughput(0.1, 0.01, 0.05, 0.002, 0.02, 0.001, 1.6)


def row(nodes, gpus, batch, ratio, weight=1.0):
    seconds = BASE.step_seconds(float(nodes), float(gpus), float(batch))
    return Observation(nodes, gpus, batch, BASE.compute_seconds(float(batch)), ratio * seconds, weight)


def test_a_fit_that_leaves_nothing_stays_as_it_is():
    assert corrected(BASE, [row(1, 4, 32, 1.0), row(2, 8, 32, 1.0)]) is BASE
    assert corrected(BASE, []) is BASE


def test_a_measured_place_takes_what_was_measured_there():
    model = corrected(BASE, [row(1, 4, 32, 1.3), row(2, 8, 32, 1.0)])
    assert model.step_seconds(1.0, 4.0, 32.0) == pytest.approx(1.3 * BASE.step_seconds(1.0, 4.0, 32.0))
    assert model.step_seconds(2.0, 8.0, 32.0) == pytest.approx(BASE.step_seconds(2.0, 8.0, 32.0))


def test_batches_of_a_place_are_averaged_by_weight():
    model = corrected(BASE, [row(1, 4, 32, 1.2, 3.0), row(1, 4, 64, 1.0, 1.0)])
    assert math.log(model.factor(1, 4)) == pytest.approx(0.75 * math.log(1.2))


def test_a_place_nearby_takes_part_of_it_and_one_on_several_nodes_less():
    model = corrected(BASE, [row(1, 4, 32, 1.3)])
    near, far, across = model.factor(1, 2), model.factor(1, 1), model.factor(2, 4)
    assert 1.3 > near > far > 1.0
    assert 1.0 < across < math.exp(math.log(1.3) / 1.5)


def test_the_best_batch_is_that_of_the_fit():
    plain = goodput_model()
    rows = [row(1, 4, 32, 1.3), row(2, 8, 16, 0.8)]
    model = replace(plain, throughput=CorrectedThroughput(plain.throughput, corrected(BASE, rows).places))
    for nodes, gpus in ((1, 1), (1, 4), (2, 8), (4, 16)):
        choice, goodput = model.best_batch(nodes, gpus)
        expected, before = best_batch(plain.throughput, plain.efficiency, plain.limits, nodes, gpus)
        assert choice == expected
        assert goodput == pytest.approx(before / model.throughput.factor(nodes, gpus))
        assert goodput == pytest.approx(model.goodput_at(choice, nodes))


def test_tables_agree_with_single_placements_and_leave_other_models_alone():
    plain = goodput_model()
    one = replace(plain, throughput=CorrectedThroughput(plain.throughput, ((1, 4, 0.3), (2, 8, -0.2))))
    two = replace(plain, throughput=CorrectedThroughput(plain.throughput, ((1, 1, -0.1),)))
    nodes, gpus = np.array([1, 1, 1, 2, 3, 16]), np.array([1, 2, 4, 8, 12, 64])
    table = goodput_tables([one, plain, two], nodes, gpus)
    for i, model in enumerate((one, plain, two)):
        for s in range(len(gpus)):
            expected = model.goodput(int(nodes[s]), int(gpus[s]))
            assert table[i, s] == pytest.approx(expected, rel=1e-9), (i, s)
    assert batch_tables([one, plain, two], nodes, gpus).goodput == pytest.approx(table)
    as_fitted = goodput_tables([one, plain, two], nodes, gpus, corrected=False)
    assert (as_fitted == as_fitted[1]).all()
    assert one.as_fitted == plain
    assert plain.as_fitted is plain


def test_arrays_agree_with_numbers():
    model = CorrectedThroughput(BASE, ((1, 4, 0.3), (2, 8, -0.2)))
    nodes, gpus = np.array([[1], [2]]), np.array([[4, 8, 16]])
    seconds = model.step_seconds(*np.broadcast_arrays(nodes, gpus, np.full((2, 3), 32.0)))
    for i in range(2):
        for k in range(3):
            expected = model.step_seconds(float(nodes[i, 0]), float(gpus[0, k]), 32.0)
            assert seconds[i, k] == pytest.approx(expected)


def test_it_is_written_and_read():
    model = replace(goodput_model(), throughput=CorrectedThroughput(BASE, ((1, 4, 0.25), (2, 8, -0.5))))
    assert decode_value(GoodputModel, encode_model(model)) == model


def test_what_no_measurement_can_be_is_refused_or_cut():
    with pytest.raises(InvalidInput, match="2 nodes and 1 GPUs"):
        CorrectedThroughput(BASE, ((2, 1, 0.1),))
    with pytest.raises(InvalidInput, match="names a place twice"):
        CorrectedThroughput(BASE, ((1, 1, 0.1), (1, 1, 0.2)))
    with pytest.raises(InvalidInput, match="a correction is nan"):
        CorrectedThroughput(BASE, ((1, 1, math.nan),))
    with pytest.raises(InvalidInput, match=f"give at most {MOST_PLACES}"):
        CorrectedThroughput(BASE, tuple((1, gpus, 0.1) for gpus in range(1, MOST_PLACES + 2)))
    many = [row(1, gpus, 32, 1.2) for gpus in range(1, MOST_PLACES + 20)]
    assert len(corrected(BASE, many).places) == MOST_PLACES
    assert corrected(BASE, [row(1, 4, 32, 1e9)]).places == ((1, 4, 1.0),)
