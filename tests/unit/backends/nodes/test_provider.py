"""Books over nodes that are wholly ours."""

from hypothesis import given
from hypothesis import strategies as st

from pollux.backends.nodes.provider import LentNode, PooledNodeProvider
from pollux.core import Node


def node(name, places=2):
    return LentNode(Node(name, places, "cpu"), ("127.0.0.1", 1))


def lender(*nodes):
    made = PooledNodeProvider()
    changes = []
    made.start(b"secret", "127.0.0.1", lambda: changes.append(1))
    made.offer(nodes)
    return made, changes


def test_places_are_given_as_they_come_free():
    made, changes = lender(node("a"), node("b"))
    made.ask("one", {"a": 2})
    made.ask("two", {"a": 1, "b": 1})
    assert made.held("one") == {"a": (0, 1)}
    assert made.held("two") == {"b": (0,)}
    before = len(changes)
    made.drop("one", {"a": (1,)})
    assert made.held("one") == {"a": (0,)}
    assert made.held("two") == {"a": (1,), "b": (0,)}
    assert len(changes) > before


def test_asking_for_more_counts_what_is_held():
    made, _ = lender(node("a", 4))
    made.ask("one", {"a": 1})
    made.ask("one", {"a": 3})
    assert made.held("one") == {"a": (0, 1, 2)}
    made.ask("one", {"a": 3})
    assert made.held("one") == {"a": (0, 1, 2)}


def test_what_was_dropped_is_not_given_back():
    made, _ = lender(node("a"), node("b"))
    made.ask("one", {"a": 2})
    made.ask("two", {"b": 2})
    made.ask("one", {"a": 2, "b": 1})
    made.drop("one", {"a": (0, 1)})
    assert made.held("one") == {}
    made.drop("two", {"b": (0, 1)})
    assert made.held("one") == {"b": (0,)}
    made.drop("one", {"b": (0,)})
    made.drop("one", {"b": (0,), "nowhere": (7,)})
    made.ask("three", {"a": 2, "b": 2})
    assert made.held("three") == {"a": (0, 1), "b": (0, 1)}


def test_a_refusal_names_what_is_missing():
    made, _ = lender(node("a"))
    made.ask("one", {"a": 1})
    assert made.refusal("one") == ""
    made.ask("one", {"a": 3})
    assert "has 2 places" in made.refusal("one")
    made.ask("one", {"b": 1})
    assert "'b' is gone" in made.refusal("one")
    assert made.refusal("nobody") == ""


def test_a_node_that_comes_serves_who_waits_and_one_that_goes_keeps_its_books():
    made, changes = lender(node("a"))
    made.ask("one", {"b": 1})
    made.offer([node("a"), node("b")])
    assert made.held("one") == {"b": (0,)}
    count = len(changes)
    made.offer([node("a"), node("b")])
    assert len(changes) == count
    made.offer([node("a")])
    assert made.held("one") == {"b": (0,)}
    made.drop("one", {"b": (0,)})
    assert made.held("one") == {}


def test_what_is_in_use_already_is_nobody_elses():
    made, _ = lender()
    made.claim("one", {"a": (1,)})
    made.claim("one", {"a": (1,)})
    made.offer([node("a")])
    made.ask("two", {"a": 1})
    assert made.held("two") == {"a": (0,)}
    made.ask("three", {"a": 1})
    assert made.held("three") == {}
    made.drop("one", {"a": (1,)})
    assert made.held("three") == {"a": (1,)}


STEPS = st.lists(
    st.tuples(st.sampled_from("xyz"), st.booleans(), st.sampled_from("ab"), st.integers(1, 3)), max_size=30
)


@given(STEPS)
def test_no_place_is_held_twice(steps):
    made, _ = lender(node("a", 3), node("b", 2))
    for job, asks, name, count in steps:
        if asks:
            made.ask(job, {name: count})
        else:
            made.drop(job, {name: made.held(job).get(name, ())[:count]})
        held = [(where, place) for each in "xyz" for where, places in made.held(each).items() for place in places]
        assert len(held) == len(set(held))
        assert all(place < {"a": 3, "b": 2}[where] for where, place in held)
