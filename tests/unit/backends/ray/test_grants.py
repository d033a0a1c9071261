from typing import Any

import pytest

from pollux.backends.ray.claims import ClaimBook
from pollux.backends.ray.driver_messages import FreeClaims, HostMessage, HostReport, TakeClaims
from pollux.backends.ray.grants import Grants
from pollux.backends.ray.node_book import RayNodeBook
from pollux.backends.ray.nodes import RayNode


class Bench:
    def __init__(self):
        self.now = 1000.0
        self.nodes = RayNodeBook()
        self.orders: list[Any] = []
        self.grants = Grants(ClaimBook("p:"), self.nodes, self.orders.append, lambda: self.now)
        self.see("a", "b")

    def see(self, *names):
        self.nodes.replace_all([RayNode("id", name, "10.0.0.1", 4, "H100", 8.0, 1e9, False) for name in names], {})
        for name in names:
            self.nodes.note_host(HostMessage(name, HostReport(("10.0.0.1", 7), (4, 5, 6, 7))))
        self.grants.drop_claims_without_node()

    def asked(self, job_id, wanted):
        """The names of the claims that the driver is told to take for this."""
        before = len(self.orders)
        self.grants.ask(job_id, wanted)
        return [name for order in self.orders[before:] if isinstance(order, TakeClaims) for name in order.claims]

    def adopted(self, job_id, places):
        before = len(self.orders)
        self.grants.adopt(job_id, places)
        return list(self.orders[before].claims)

    def freed(self):
        return [name for order in self.orders if isinstance(order, FreeClaims) for name in order.names]

    def held(self, job_id):
        return self.grants.book.held(job_id)


@pytest.fixture
def bench():
    return Bench()


def test_a_grant_is_the_place_of_its_gpu(bench):
    (name,) = bench.asked("job", {"a": 1})
    bench.grants.note_grant(name, "6")
    assert bench.held("job") == {"a": (2,)}
    assert bench.freed() == []


def test_the_same_gpu_again_changes_nothing(bench):
    (name,) = bench.adopted("job", {"a": (2,)})
    bench.grants.note_grant(name, "6")
    assert bench.held("job") == {"a": (2,)}
    assert len(bench.orders) == 1


def test_places_of_one_job_are_exchanged_and_those_of_another_are_not(bench):
    one, two = bench.adopted("job", {"a": (0, 1)})
    (other,) = bench.adopted("other", {"a": (2,)})
    bench.grants.note_grant(one, "5")
    assert bench.grants.book.claim_at("a", 1).name == one
    bench.grants.note_grant(other, "4")
    assert bench.held("other") == {"a": (2,)}
    assert isinstance(bench.orders[-1], TakeClaims), "one more is asked for, which cannot be the GPU of the first job"
    assert bench.grants.book.claim_at("a", 0).name == two


@pytest.mark.parametrize(
    ("gpu", "why", "is_for_ever"),
    [("MIG-1", "no whole GPU", True), ("4", "which job 'other' uses; asking again", False)],
)
def test_a_gpu_of_no_use_is_a_refusal_and_blocks_its_node(bench, gpu, why, is_for_ever):
    bench.adopted("other", {"a": (0,)})
    (name,) = bench.asked("job", {"a": 1})
    bench.grants.note_grant(name, gpu)
    assert why in bench.grants.refusal("job")
    assert bench.freed() == [name]
    assert bench.nodes.get("a").offered(1).node.num_gpus == 1
    assert bench.nodes.unblock(bench.now + 60.0) is not is_for_ever
    bench.grants.ask("job", {})
    assert bench.grants.refusal("job") == ""


def test_a_grant_elsewhere_keeps_a_blocked_node_blocked(bench):
    (name,) = bench.asked("job", {"a": 1})
    bench.grants.note_failure(name, "no idea")
    (later,) = bench.asked("other", {"a": 1})
    bench.grants.note_grant(later, "4")
    assert any("(no idea)" in text for text in bench.nodes.warnings())
    assert bench.nodes.get("a").offered(1).node.num_gpus == 1


def test_grants_that_do_not_match_are_kept_until_the_right_one_has_come(bench):
    (first,) = bench.adopted("job", {"a": (2,)})
    bench.grants.note_grant(first, "4")
    (second,) = bench.orders[-1].claims
    bench.grants.note_grant(second, "5")
    (third,) = bench.orders[-1].claims
    assert bench.freed() == [], "Ray would give the same ones again"
    bench.grants.note_grant(third, "6")
    assert bench.freed() == [first, second]
    assert bench.held("job") == {"a": (2,)}


def test_where_the_right_one_never_comes_the_last_stands_for_it(bench):
    (first,) = bench.adopted("job", {"a": (2,)})
    bench.grants.note_grant(first, "4")
    (second,) = bench.orders[-1].claims
    bench.grants.note_wait(second)
    assert bench.freed() == [second]
    assert bench.grants.book.claim_at("a", 2).name == first
    assert "uses GPU 6 of node 'a', which Ray has lent to another job" in bench.nodes.warnings()[0]


def test_a_new_driver_forgets_what_did_not_match(bench):
    (first,) = bench.adopted("job", {"a": (2,)})
    bench.grants.note_grant(first, "4")
    (second,) = bench.orders[-1].claims
    assert bench.grants.for_new_driver() == {second: "a"}
    bench.grants.note_grant(second, "6")
    assert bench.freed() == [], "the new driver has removed it"


def limited(bench):
    """Other Ray jobs hold all of node a: the claim that stays in Ray's queue."""
    (name,) = bench.asked("job", {"a": 1})
    bench.grants.note_wait(name)
    assert "1 on a missing" in bench.grants.refusal("job")
    bench.grants.ask("job", {})
    assert bench.nodes.get("a").offered(0).node.num_gpus == 0
    return name


def test_one_claim_stays_in_rays_queue_at_a_node_that_others_hold(bench):
    name = limited(bench)
    assert bench.freed() == []
    assert bench.grants.for_new_driver() == {name: "a"}
    bench.grants.note_grant(name, "4")
    assert bench.freed() == [name]
    assert bench.nodes.get("a").offered(0).node.num_gpus == 4
    assert bench.held("job") == {}


def test_it_goes_with_its_node(bench):
    """Else its group would wait in Ray for ever."""
    name = limited(bench)
    bench.see("b")
    assert bench.freed() == [name]
    assert bench.grants.for_new_driver() == {}


def test_it_goes_with_the_service(bench):
    name = limited(bench)
    bench.grants.free_sentinels()
    assert bench.freed() == [name]


def test_claims_go_with_their_node(bench):
    (name,) = bench.asked("job", {"a": 1})
    (other,) = bench.asked("other", {"b": 1})
    bench.see("b")
    assert bench.freed() == [name]
    assert bench.grants.for_new_driver() == {other: "b"}


@pytest.mark.parametrize("tell", ["note_grant", "note_wait", "note_failure"])
def test_what_is_told_of_a_claim_that_was_given_back_does_not_matter(bench, tell):
    given = {"note_grant": ("4",), "note_wait": (), "note_failure": ("no idea",)}[tell]
    getattr(bench.grants, tell)("p:none", *given)
    assert bench.orders == []
    assert bench.nodes.warnings() == []
