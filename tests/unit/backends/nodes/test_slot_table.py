"""Places are held once."""

from hypothesis import given
from hypothesis import strategies as st

from pollux.backends.nodes.slot_table import SlotTable


def test_neighbours_are_preferred():
    table = SlotTable(6)
    table.mark_held([1])
    assert table.allocate(2) == (2, 3)
    assert table.allocate(2) == (4, 5)
    assert table.allocate(2) is None
    assert table.allocate(1) == (0,)
    table.release([2, 4])
    assert table.allocate(2) == (2, 4)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=40))
def test_no_place_is_given_twice(steps):
    table = SlotTable(8)
    held: list[tuple[int, ...]] = []
    for give, number in steps:
        if give:
            places = table.allocate(number)
            free = 8 - sum(map(len, held))
            assert (places is None) == (free < number)
            if places is not None:
                assert len(places) == number
                assert not set(places) & {place for each in held for place in each}
                held.append(places)
        elif held:
            table.release(held.pop(number % len(held)))
    assert len(table.free) == 8 - sum(map(len, held))
