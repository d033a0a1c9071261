import pytest

from pollux.wire.live.codec import MalformedValue
from pollux.wire.live.plan import GenerationPlan, PlanDeadlines, PlanMember


def plan(*was, why="resize"):
    return GenerationPlan(1, 0, tuple(PlanMember(rank, old) for rank, old in enumerate(was)), why=why)


def test_a_plan_comes_back_as_it_was_written():
    first = GenerationPlan(4, 2, (PlanMember(0, 1), PlanMember(1, None)), 2, "lost", PlanDeadlines(join=3.0), (0, 2))
    assert GenerationPlan.decode(first.encode()) == first


def test_ranks_and_kinds_follow_from_the_members():
    change = plan(0, 2, None)
    assert [change.rank_of(was) for was in range(3)] == [0, None, 1]
    assert [change.kind(before) for before in (2, 3, 4)] == ["grow", "move", "shrink"]
    assert plan(0, why="lost").kind(3) == "recover"


def test_senders_are_numbered_after_the_members():
    change = GenerationPlan(1, 0, (PlanMember(0, None),), senders=(0, 2))
    assert change.num_present == 3
    assert [change.place_of_sender(was) for was in range(3)] == [1, None, 2]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[]",
        '{"generation": 1}',
        '{"generation": 1, "before": 0, "members": [{"rank": 1, "was": 0}]}',
        '{"generation": 1, "before": 0, "members": [{"rank": 0, "was": 0.5}]}',
        '{"generation": 1e999, "before": 0, "members": []}',
        '{"generation": 1, "before": 0, "members": [], "of_another_version": 1}',
    ],
)
def test_a_plan_that_nobody_wrote_is_malformed(text):
    with pytest.raises(MalformedValue):
        GenerationPlan.decode(text)
