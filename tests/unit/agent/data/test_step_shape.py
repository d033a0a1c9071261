"""How the samples of a step are dealt out."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pollux.agent.data.step_shape import MicroBatch, share


@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 9))
def test_parts_are_consecutive_complete_and_even(total, num_replicas, repeats):
    parts = [part for step in share(total, num_replicas, repeats) for part in step]
    assert len(parts) == num_replicas * repeats
    assert parts[0][0] == 0
    assert parts[-1][1] == total
    assert all(end == first for (_, end), (first, _) in itertools.pairwise(parts))
    sizes = [end - first for first, end in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True), "the empty ones come last"


def test_the_rows_are_micro_steps():
    assert share(10, 2, 2) == (((0, 3), (3, 6)), ((6, 8), (8, 10)))
    assert share(1, 2, 2) == (((0, 1), (1, 1)), ((1, 1), (1, 1)))


def test_the_last_micro_batch_is_the_one_before_the_optimiser():
    micro = [MicroBatch(0, index, 3, 1, 3, False, (1,)) for index in range(3)]
    assert [batch.is_last for batch in micro] == [False, False, True]
