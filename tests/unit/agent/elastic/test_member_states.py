"""The states of a replica: what may follow which, what a move keeps of the state before it, and what errors tell."""

import pytest
import torch
import torch.distributed as dist

from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.elastic.generation_move import JobLost
from pollux.agent.elastic.member import ElasticMember
from pollux.agent.elastic.member_states import _NEXT, CutOff, FirstStep, Gone, Joining, Regrouping, StateTrack, Training
from pollux.agent.elastic.membership import Membership
from pollux.agent.elastic.pause import ResizePause
from pollux.core.errors import IllegalTransition
from pollux.wire.live.plan import GenerationPlan, PlanMember

PLAN = GenerationPlan(1, 0, (PlanMember(0, 0),))
PAUSE = ResizePause(PLAN, "move", 0.0)


def test_every_pair_of_states_is_either_in_the_table_or_refused():
    made = [Joining(), Training(), FirstStep(PAUSE), Regrouping(PLAN, Training(), 0.0, 1), CutOff(), Gone()]
    assert {state.name for state in made} == set(_NEXT)
    for first in made:
        for second in made:
            track = StateTrack(first)
            if second.name in _NEXT[first.name]:
                track.enter(second)
                assert track.now is second
            else:
                with pytest.raises(IllegalTransition):
                    track.enter(second)
                assert track.now is first


def test_an_illegal_transition_tells_the_story():
    track = StateTrack(Training())
    track.enter(CutOff())
    track.enter(Gone())
    with pytest.raises(IllegalTransition, match=r"'gone' cannot become 'training'; .*: training, cut off, gone"):
        track.enter(Training())


def test_a_move_keeps_what_the_replica_holds_and_whether_it_joins():
    from_joining = Regrouping(PLAN, Joining(), 0.0, 1)
    assert (from_joining.joins, from_joining.has_state, from_joining.can_stay) == (True, False, False)
    from_training = Regrouping(PLAN, Training(), 0.0, 1)
    assert (from_training.joins, from_training.has_state, from_training.can_stay) == (False, True, True)
    assert Regrouping(PLAN, FirstStep(PAUSE), 0.0, 1).can_stay
    cut_off = Regrouping(PLAN, CutOff(joins=True, has_state=True), 0.0, 1)
    assert (cut_off.joins, cut_off.has_state, cut_off.can_stay) == (True, True, False)


def test_a_replica_that_has_ended_takes_no_step(monkeypatch):
    monkeypatch.setattr("pollux.agent.elastic.generation_move._PATIENCE_SECONDS", 0.0)
    member = ElasticMember(Membership(dist.HashStore(), 0, 0), ReplicaGroup(Environment(), torch.device("cpu")), False)

    class Job:
        def __getattr__(self, name):
            return lambda *arguments: None

    with pytest.raises(JobLost):
        member.recover(Job(), "gone")
    with pytest.raises(IllegalTransition, match=r"'gone' cannot take a step; .*: training, cut off"):
        member.stepped(4)
    assert not member.end_pause(), "a loop that ends asks this whatever happened"


def test_a_first_step_ends_the_pause_once():
    member = ElasticMember(Membership(dist.HashStore(), 0, 0), ReplicaGroup(Environment(), torch.device("cpu")), False)
    member.states.now = FirstStep(ResizePause(PLAN, "move", 0.0))
    assert member.stepped(4)
    assert isinstance(member.states.now, Training)
    assert not member.stepped(5)
