import pytest

from pollux.backends.nodes.slot import Slot, read_slots


@pytest.mark.parametrize(
    ("name", "slot"), [("3", Slot("", 3)), ("n1/3", Slot("n1", 3)), ("gone:n1/3", Slot("n1", 3).gone)]
)
def test_a_slot_has_a_name(name, slot):
    assert (str(slot), Slot.read(name)) == (name, slot)


def test_a_slot_that_is_gone_is_on_no_node():
    slot = Slot("n1", 3).gone
    assert (slot.is_gone, slot.real_node, slot.gone) == (True, "n1", slot)
    assert slot != Slot("n1", 3)


def test_what_is_no_slots_name_is_left_out():
    assert read_slots(["n1/0", "nonsense", "n1/", 2, None]) == (Slot("n1", 0), Slot("", 2))
