import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.backends.ray.claims import ClaimBook


def names(claims):
    return [claim.name for claim in claims]


def granted(book, job_id, wanted):
    taken, _ = book.ask(job_id, wanted)
    for claim in taken:
        book.grant(claim.name, None)
    return taken


def test_asking_makes_a_claim_for_every_missing_place():
    book = ClaimBook("pollux:s:")
    taken, freed = book.ask("job", {"a": 2, "b": 1})
    assert sorted(claim.node_id for claim in taken) == ["a", "a", "b"]
    assert freed == []
    assert len(set(names(taken))) == 3
    assert all(name.startswith("pollux:s:job:") for name in names(taken))
    assert book.held("job") == {}


def test_asking_again_takes_only_what_is_missing():
    book = ClaimBook("p:")
    granted(book, "job", {"a": 2})
    taken, freed = book.ask("job", {"a": 3})
    assert (len(taken), freed) == (1, [])


def test_asking_for_less_frees_what_is_not_granted_and_keeps_the_rest():
    book = ClaimBook("p:")
    granted(book, "job", {"a": 1})
    pending, _ = book.ask("job", {"a": 3, "b": 1})
    taken, freed = book.ask("job", {"a": 1})
    assert taken == []
    assert sorted(names(freed)) == sorted(names(pending))
    assert book.held("job") == {"a": (0,)}


def test_places_of_a_grant_are_those_of_the_gpus():
    book = ClaimBook("p:")
    one, two = book.ask("job", {"a": 2})[0]
    book.grant(one.name, 3)
    book.grant(two.name, 1)
    assert book.held("job") == {"a": (1, 3)}
    assert book.granted_on("a") == 2


def test_without_a_gpu_the_lowest_free_number_is_given():
    book = ClaimBook("p:")
    granted(book, "one", {"a": 2})
    granted(book, "two", {"a": 1})
    book.drop("one", {"a": (0,)})
    granted(book, "three", {"a": 1})
    assert book.held("three") == {"a": (0,)}
    assert book.held("two") == {"a": (2,)}


def test_dropping_gives_back_what_is_held_there_and_nothing_else():
    book = ClaimBook("p:")
    granted(book, "job", {"a": 2, "b": 2})
    assert len(book.drop("job", {"a": (1, 7), "c": (0,)})) == 1
    assert book.held("job") == {"a": (0,), "b": (0, 1)}
    assert book.drop("unknown", {"a": (0,)}) == []


def test_a_job_that_holds_nothing_any_more_waits_for_nothing():
    book = ClaimBook("p:")
    granted(book, "job", {"a": 1})
    pending, _ = book.ask("job", {"a": 1, "b": 1})
    gone = book.drop("job", {"a": (0,)})
    assert set(names(pending)) < set(names(gone))
    assert not book.claims


def test_a_node_that_is_gone_takes_its_claims_along():
    book = ClaimBook("p:")
    granted(book, "job", {"a": 1, "b": 1})
    assert [claim.node_id for claim in book.drop_except_on({"b"})] == ["a"]
    assert book.held("job") == {"b": (0,)}
    assert (book.granted_on("a"), book.granted_on("b")) == (0, 1)


def test_a_claim_that_waits_is_a_refusal_until_it_is_granted():
    book = ClaimBook("p:")
    (claim,), _ = book.ask("job", {"a": 1})
    assert book.refusal("job", {"a"}) == ""
    book.note_waiting(claim.name)
    assert "1 on a" in book.refusal("job", {"a"})
    assert book.refusal("job", {"b"}) == ""
    assert book.obtainable_on("a") == 0
    book.grant(claim.name, 0)
    assert book.refusal("job", {"a"}) == ""
    assert book.obtainable_on("a") == 1


def test_what_was_given_back_may_be_had_by_those_that_wait():
    book = ClaimBook("p:")
    (claim,), _ = book.ask("job", {"a": 1})
    book.note_waiting(claim.name)
    assert book.retry_waiting({"b"}) == []
    assert book.retry_waiting({"a"}) == [claim.name]
    assert book.retry_waiting({"a"}) == []
    assert book.refusal("job", {"a"}) == ""


def test_what_a_job_was_found_to_use_is_claimed_as_it_is():
    book = ClaimBook("p:")
    granted(book, "job", {"a": 1})
    assert len(book.adopt("job", {"a": (0, 2)})) == 1
    assert book.held("job") == {"a": (0, 2)}
    assert book.adopt("job", {"a": (0, 2)}) == []


def test_what_a_job_uses_is_first_what_it_had_claimed_before_the_grants_were_noted():
    book = ClaimBook("p:")
    book.ask("job", {"a": 2})
    late = ClaimBook("p:")
    late.restore(book.record())
    assert late.adopt("job", {"a": (0, 1, 3)}) == [late.claim_at("a", 3)]
    for name in [*late.claims]:
        late.grant(name, None)
    assert late.held("job") == {"a": (0, 1, 3)}


def test_who_has_a_place_is_known():
    book = ClaimBook("p:")
    one, two = granted(book, "job", {"a": 2})
    assert (book.claim_at("a", 0).name, book.claim_at("a", 1).name, book.claim_at("a", 2)) == (one.name, two.name, None)
    book.swap_places(one.name, two.name)
    assert (book.claim_at("a", 0).name, book.claim_at("a", 1).name) == (two.name, one.name)
    assert book.held("job") == {"a": (0, 1)}
    new = book.replace_claim(one.name)
    assert (new.place, book.claim_at("a", 1).name, one.name in book.claims) == (1, new.name, False)
    book.replace_claim(new.name, one.name)
    assert (book.claim_at("a", 1).name, new.name in book.claims) == (one.name, False)
    book.remove(one.name)
    assert book.claim_at("a", 1) is None


def test_unknown_names_do_not_matter():
    book = ClaimBook("p:")
    assert book.grant("p:none", 0) is None
    book.note_waiting("p:none")
    book.remove("p:none")
    assert not book.claims


def test_a_new_book_knows_what_the_old_one_recorded():
    book = ClaimBook("p:")
    granted(book, "job", {"a": 2})
    book.ask("other", {"b": 1})
    new = ClaimBook("p:")
    new.restore(book.record())
    assert new.claims == book.claims
    assert new.granted_on("a") == 2
    again, _ = new.ask("third", {"a": 1})
    assert again[0].name not in book.claims


@pytest.mark.parametrize(
    "row",
    [5, None, "p:job:a:1", ["p:job:a:1", "job", "a"], ["p:job:a:1", "job", "a", "x"], ["p:job:a:1", "j", "a", []]],
)
def test_rows_of_another_version_are_left_out(row):
    book = ClaimBook("p:")
    book.restore({"next": "x", "claims": [row, ["p:job:a:7", "job", "a", 2]]})
    assert book.held("job") == {"a": (2,)}
    assert len(book.claims) == 1
    assert book.ask("job", {"a": 2})[0][0].name == "p:job:a:8"


@pytest.mark.parametrize("record", [{"claims": 5}, {"claims": None}, {"next": None}, {"next": -3}])
def test_a_record_that_is_none(record):
    book = ClaimBook("p:")
    book.restore(record)
    assert book.ask("job", {"a": 1})[0][0].name == "p:job:a:1"


def test_claims_of_another_service_are_not_restored():
    book = ClaimBook("p:")
    book.ask("job", {"a": 1})
    new = ClaimBook("q:")
    new.restore(book.record())
    assert not new.claims


STEPS = st.sampled_from(["ask", "give back", "adopt"])


@given(st.lists(st.tuples(st.sampled_from("jk"), st.sampled_from("ab"), st.integers(0, 3), STEPS), max_size=30))
def test_no_place_is_held_twice(steps):
    book = ClaimBook("p:")
    for job, node, count, step in steps:
        if step == "adopt":
            # What a job uses is nobody else's.
            free = {place for place in range(9) if (at := book.claim_at(node, place)) is None or at.job_id == job}
            book.adopt(job, {node: tuple(sorted(free)[:count])})
        elif step == "give back":
            held = book.held(job)
            book.drop(job, {node: held.get(node, ())[:count]})
        else:
            granted(book, job, {node: count})
        places = [(claim.node_id, claim.place) for claim in book.claims.values()]
        assert len(places) == len(set(places))
        assert all(book.claim_at(claim.node_id, claim.place) is claim for claim in book.claims.values())
        for each in "ab":
            assert book.granted_on(each) == sum(claim.node_id == each for claim in book.claims.values())
