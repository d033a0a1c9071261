import pytest

from pollux.core import NOWHERE, InvalidInput, Placement
from pollux.testing import place


def test_counts_and_nodes():
    placement = Placement((("b", 3), ("a", 1)))
    assert placement.num_gpus == 4
    assert placement.num_nodes == 2
    assert placement.counts == (3, 1)
    assert placement.is_distributed
    assert (placement.on("a"), placement.on("b"), placement.on("c")) == (1, 3, 0)
    assert list(placement) == [("b", 3), ("a", 1)]


def test_one_node_is_not_distributed():
    assert not Placement((("a", 8),)).is_distributed


def test_nowhere_holds_nothing_and_is_false():
    assert not NOWHERE
    assert NOWHERE.num_gpus == NOWHERE.num_nodes == 0
    assert str(NOWHERE) == "nowhere"
    assert Placement.of({"a": 0}) == NOWHERE


def test_order_matters():
    assert place("a:1 b:2") != place("b:2 a:1")
    assert hash(place("a:1 b:2")) == hash(Placement((("a", 1), ("b", 2))))


def test_of_leaves_zeros_out():
    assert Placement.of({"a": 2, "b": 0, "c": 1}) == place("a:2 c:1")


def test_it_prints_as_it_is_read():
    assert str(place("n0:4 n1:2")) == "n0:4 n1:2"
    assert place("") == NOWHERE


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((("a", 0),), "holds 0 GPUs on 'a'"),
        ((("a", -2),), "holds -2 GPUs on 'a'"),
        ((("a", 1), ("b", 1), ("a", 1)), "names a node twice"),
    ],
)
def test_impossible_placements_are_refused(shares, said):
    with pytest.raises(InvalidInput, match=said):
        Placement(shares)
