import pytest

from pollux.backends.ray.driver_messages import HostMessage, HostReport
from pollux.backends.ray.node_book import RayNodeBook
from pollux.backends.ray.nodes import RayNode


def described(*names, places=4):
    return [RayNode("id", name, "10.0.0.1", places, "H100", 8.0, 1e9, False) for name in names]


def host(name, **more):
    return HostMessage(name, HostReport(("10.0.0.1", 7), (0, 1, 2, 3)), **more)


@pytest.fixture
def book():
    book = RayNodeBook()
    book.replace_all(described("b", "a"), {})
    return book


def offered(book, num_granted=0):
    found = [known.offered(num_granted) for known in book]
    return {lent.node.id: lent.node.num_gpus for lent in found if lent is not None}


def test_a_node_is_offered_while_its_host_is_up(book):
    assert offered(book) == {}
    book.note_host(host("a"))
    assert offered(book) == {"a": 4}
    book.note_host_gone("a", "its host ended")
    assert offered(book) == {}
    assert book.warnings() == ["its host ended"]
    book.note_host(host("a"))
    assert book.warnings() == []


def test_what_was_reported_stays_when_ray_describes_its_nodes_again(book):
    book.note_host(host("a"))
    book.replace_all(described("a", "c", places=8), {"a": "Ray drains it"})
    assert offered(book) == {"a": 8}
    assert book.leaving == {"a": "Ray drains it"}
    assert ("b" in book, "c" in book) == (False, True)
    book.replace_all(described("c"), {})
    book.replace_all(described("a"), {})
    assert offered(book) == {}, "a node that was gone has another host"


@pytest.mark.parametrize(
    ("change", "places"),
    [
        (lambda book: None, 4),
        (lambda book: setattr(book.get("a"), "limit", 3), 3),
        (lambda book: book.get("a").block("why", 5.0), 2),
        (lambda book: book.note_host(host("a", odd="other options")), 2),
        (lambda book: book.note_host(host("a", doubt="its driver")), 4),
    ],
)
def test_no_fewer_places_are_offered_than_are_granted(book, change, places):
    book.note_host(host("a"))
    change(book)
    assert offered(book, num_granted=2) == {"a": places}


def test_a_block_ends_when_its_time_has_come(book):
    book.get("a").block("Ray failed", 5.0)
    assert not book.unblock(4.9)
    assert book.warnings() == ["Ray failed"]
    assert book.unblock(5.0)
    assert (book.warnings(), book.unblock(5.0)) == ([], False)


def test_warnings_come_in_the_order_of_their_kind_and_their_node(book, caplog):
    book.replace_all(described("b", "a"), {"b": "Ray drains it"})
    book.get("a").note("failure", "failure of a")
    book.get("b").note("no host", "b has none")
    book.get("a").note("no host", "a has none")
    assert book.warnings() == ["node 'b' is being left: Ray drains it", "a has none", "b has none", "failure of a"]
    before = len(caplog.records)
    book.get("a").note("no host", "a has none")
    assert len(caplog.records) == before, "no news"


def test_the_largest_node_is_one_whose_host_is_up(book):
    assert book.largest() == 0
    book.replace_all([*described("a"), *described("big", places=8)], {})
    book.note_host(host("a"))
    assert book.largest() == 4


def test_what_is_told_of_a_node_that_ray_does_not_have_does_not_matter(book):
    book.note_host(host("z"))
    book.note_host_gone("z", "it ended")
    assert (offered(book), book.warnings()) == ({}, [])


def test_nodes_in_use_are_remembered_with_their_hosts(book):
    book.note_host(host("a"))
    book.note_host(host("b"))
    later = RayNodeBook()
    later.restore([*book.record(), {}, {"described": {"name": "a"}, "address": [], "gpus": []}], {"a"})
    assert [known.offered(0) for known in later] == [book.get("a").offered(0)]


def test_a_head_that_has_forgotten_its_nodes_is_told_from_nodes_that_left(book):
    book.replace_all([], {})
    assert (book.is_empty, book.has_new_head) == (True, False)
    book.replace_all(described("a"), {})
    book.is_first_look = True
    assert not book.is_empty
    book.replace_all([], {})
    assert (book.is_empty, book.has_new_head) == (True, True)
    book.replace_all(described("a"), {})
    assert not book.has_new_head
