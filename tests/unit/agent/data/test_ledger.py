"""The ledger: order does not matter, everything else does."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pollux.agent.data.ledger import SampleLedger, hash_indices


def indices(*values: int):
    return np.array(values, dtype=np.int64)


def test_order_does_not_matter_but_every_sample_does():
    assert SampleLedger.of(indices(3, 1, 2)) == SampleLedger.of(indices(1, 2, 3))
    for other in (indices(1, 2), indices(1, 2, 4), indices(1, 2, 3, 3), indices(0, 2, 4), indices(1, 1, 4)):
        assert SampleLedger.of(other) != SampleLedger.of(indices(1, 2, 3))


@given(st.lists(st.lists(st.integers(0, 2**62), max_size=5), max_size=150), st.integers(0, 5))
def test_parts_added_in_any_grouping_give_the_same(parts, replicas):
    whole = SampleLedger.of(np.array([index for part in parts for index in part], dtype=np.int64))
    grouped = SampleLedger()
    for part in parts:
        grouped.add(np.array(part, dtype=np.int64))
    assert grouped == whole


@pytest.mark.parametrize("size", [0, 1, 7, 2**20 + 3])
def test_a_range_is_what_its_indices_are(size):
    assert SampleLedger.of_range(size) == SampleLedger.of(np.arange(size))
    assert SampleLedger.of_range(size).count == size


def test_the_hash_is_stable_across_versions_since_checkpoints_hold_it():
    assert hash_indices(indices(0)) == 0xE220A8397B1DCDAF
    assert SampleLedger.of_range(1000).digest == sum(hash_indices(indices(index)) for index in range(1000)) % 2**64


def test_replicas_merge_through_an_int64_sum_that_wraps():
    replicas = [SampleLedger() for _ in range(3)]
    for first in range(0, 300, 30):
        for number, ledger in enumerate(replicas):
            ledger.add(np.arange(first + number * 10, first + number * 10 + 10))
        if first % 60 == 0:
            summed = torch.tensor([ledger.local_part() for ledger in replicas], dtype=torch.int64).sum(0)
            for ledger in replicas:
                ledger.absorb(*summed.tolist())
                assert ledger.local_part() == (0, 0)
    for ledger in replicas:
        assert ledger.count == 270 + 10
    count, digest = (sum(column) for column in zip(*(ledger.local_part() for ledger in replicas), strict=True))
    replicas[0].absorb(count, digest)
    assert replicas[0] == SampleLedger.of_range(300)


def test_samples_committed_while_the_sum_travels_stay_local():
    ledger = SampleLedger.of_range(10)
    part = ledger.local_part()
    ledger.add(np.arange(10, 15))
    ledger.absorb(*part)
    assert (ledger.merged_count, ledger.count) == (10, 15)
    assert ledger == SampleLedger.of_range(15)
    ledger.absorb(*ledger.local_part())
    assert ledger == SampleLedger.of_range(15)
    assert ledger.merged_count == 15


def test_absorbing_without_asking_clears_the_local_part():
    ledger = SampleLedger.of_range(10)
    ledger.absorb(3, 4)
    assert (ledger.count, ledger.digest) == (3, 4)


def test_the_state_is_the_merged_part_in_plain_integers():
    ledger = SampleLedger.of_range(50)
    assert ledger.state_dict() == {"count": 0, "digest": 0}
    ledger.absorb(*ledger.local_part())
    state = ledger.state_dict()
    assert {type(value) for value in state.values()} == {int}
    assert -(2**63) <= state["digest"] < 2**63
    assert SampleLedger.from_state(state) == SampleLedger.of_range(50)
    assert ledger.merged_count == 50


def test_it_shows_what_it_holds():
    assert repr(SampleLedger.of(indices(0))) == "SampleLedger(count=1, digest=0xe220a8397b1dcdaf)"
    assert SampleLedger() != 0
