"""Every way through a change of running replicas, by the clock of the test: `fail_at` any phase."""

import pytest

from pollux.backends.shim.actions import (
    DoubtEnd,
    GiveUp,
    KillReplica,
    ReplicaChange,
    ReportLoss,
    ReportStart,
    Seat,
    SetKey,
    StartJoiner,
    WatchKeys,
)
from pollux.backends.shim.phases import Limits
from pollux.backends.shim.transition import settled_at
from pollux.core.errors import IllegalTransition
from pollux.wire.live import exit_codes
from pollux.wire.live.codec import encode
from pollux.wire.live.heartbeat import PauseReport
from pollux.wire.live.plan import GenerationPlan, PlanMember

LIMITS = Limits(prepare=10.0, boundary=20.0, move=5.0, leave=2.0, order=3.0, through=1.0)
KILLED = -9
PAUSE = PauseReport(0.1, "move", 7)
DONE = encode(PAUSE)


def running(*numbers, generation=1):
    return settled_at(generation, numbers, LIMITS)


def to(generation, *seats, leavers=()):
    """Seats as numbers that stay, in order, with their rank; and strings of digits for joiners."""
    return ReplicaChange(generation, tuple(Seat(*seat) for seat in seats), leavers)


def grow(machine, now=0.0):
    """Replicas 0 and 1 of generation 1 get 2 and 3 beside them."""
    return machine.begin_change(to(2, (0, 0), (1, 1), (2, None), (3, None)), now)


def commit(machine, now=1.0):
    machine.key_found("ready/2/2", "", now)
    return machine.key_found("ready/2/3", "", now)


def only(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def keys(actions):
    """The keys that are written; a plan as it is read."""
    written = {action.key: action.value for action in only(actions, SetKey)}
    return {key: GenerationPlan.decode(text) if "plan" in key else text for key, text in written.items()}


# The way that nobody fails on


def test_growing_starts_joiners_before_anybody_is_told():
    machine = running(0, 1)
    actions = grow(machine)
    assert only(actions, StartJoiner) == [StartJoiner(2, 2), StartJoiner(3, 3)]
    plan = keys(actions)["plan/2"]
    assert plan.before == 1
    assert [member.was for member in plan.members] == [0, 1, None, None]
    assert plan.why == "resize"
    assert "committed" not in keys(actions)
    assert machine.phase == "prepare"


def test_a_change_is_committed_when_all_joiners_are_ready():
    machine = running(0, 1)
    grow(machine)
    assert machine.key_found("ready/2/3", "", 1.0) == []
    actions = machine.key_found("ready/2/2", "", 2.0)
    assert keys(actions) == {"committed": "2"}
    assert "done/2/3" in only(actions, WatchKeys)[0].keys
    assert machine.phase == "move"


def test_it_is_the_generation_once_all_have_stepped_in_it():
    machine = running(0, 1)
    grow(machine)
    commit(machine)
    for rank in (3, 1, 0):
        assert machine.key_found(f"done/2/{rank}", DONE, 2.0) == []
    actions = machine.key_found("done/2/2", DONE, 2.0)
    assert only(actions, ReportStart) == [ReportStart(2, dict.fromkeys(range(4), PAUSE))]
    assert (machine.phase, machine.settled, machine.due) == ("settled", 2, None)
    assert machine.ranks == {0: 0, 1: 1, 2: 2, 3: 3}


def test_shrinking_needs_no_preparation_and_waits_for_who_leaves():
    machine = running(5, 6, 7)
    actions = machine.begin_change(to(2, (5, 0), (6, 1), leavers=(7,)), 0.0)
    assert keys(actions)["committed"] == "2"
    machine.key_found("done/2/0", DONE, 1.0)
    assert machine.key_found("done/2/1", DONE, 1.0) == []
    assert only(machine.process_ended(7, 0, 1.5), ReportStart)
    assert machine.ranks == {5: 0, 6: 1}


def test_who_does_not_leave_in_time_is_ended_and_the_change_stands():
    machine = running(5, 6)
    machine.begin_change(to(2, (5, 0), leavers=(6,)), 0.0)
    machine.key_found("done/2/0", DONE, 1.0)
    assert machine.tick(2.9) == []
    assert machine.tick(3.0) == [KillReplica(6)]
    assert only(machine.process_ended(6, KILLED, 3.1), ReportStart)


def test_words_of_another_generation_say_nothing():
    machine = running(0, 1)
    grow(machine)
    assert machine.key_found("ready/3/2", "", 1.0) == machine.key_found("failed/1", "x", 1.0) == []
    assert machine.key_found("done/2/0", DONE, 1.0) == []
    assert machine.phase == "prepare"


# A joiner dies or is late in 1: nobody paused


def test_a_joiner_that_dies_early_withdraws_the_change():
    machine = running(0, 1)
    grow(machine)
    machine.key_found("ready/2/2", "", 1.0)
    actions = machine.process_ended(3, 1, 2.0)
    assert keys(actions).keys() == {"withdrawn/2"}
    assert only(actions, KillReplica) == [KillReplica(2)]
    assert only(actions, ReportLoss)[0].ranks == (2, 3)
    assert only(actions, ReportLoss)[0].kept == (0, 1)
    assert only(actions, ReportLoss)[0].withdrawn
    assert (machine.phase, machine.due) == ("withdrawn", None)


def test_a_joiner_that_is_late_withdraws_the_change():
    machine = running(0, 1)
    grow(machine)
    machine.key_found("ready/2/2", "", 1.0)
    assert machine.tick(9.9) == []
    actions = machine.tick(10.0)
    assert only(actions, KillReplica) == [KillReplica(2), KillReplica(3)]
    assert "replicas 3 were not ready" in only(actions, ReportLoss)[0].why
    assert machine.process_ended(3, KILLED, 10.1) == []


def test_after_a_withdrawal_the_next_plan_counts_from_what_runs():
    machine = running(0, 1)
    grow(machine)
    machine.process_ended(2, 1, 2.0)
    actions = machine.begin_change(to(3, (0, 0), (1, 1)), 3.0)
    plan = keys(actions)["plan/3"]
    assert (plan.before, plan.why) == (1, "resize")
    assert machine.phase == "move"


# The coordinator dies after proposing: the change goes on by itself, and an order is taken once only


def test_orders_are_taken_only_where_nothing_is_under_way():
    machine = running(0, 1)
    assert machine.takes_orders
    grow(machine)
    assert not machine.takes_orders
    commit(machine)
    assert not machine.takes_orders
    machine.process_ended(0, KILLED, 2.0)
    assert machine.takes_orders


# A survivor dies in 2 to 4


@pytest.mark.parametrize("phase", ["prepare", "move", "first done"])
def test_a_survivor_that_dies_on_the_way_is_left_behind(phase):
    machine = running(0, 1)
    grow(machine)
    if phase != "prepare":
        commit(machine)
    if phase == "first done":
        machine.key_found("done/2/0", DONE, 2.0)
    actions = machine.process_ended(0, KILLED, 3.0)
    assert keys(actions)["lost/1"] == "[0]"
    assert keys(actions)["lost/2"] == "[0, 2, 3]"
    assert ("withdrawn/2" in keys(actions)) == (phase == "prepare")
    assert only(actions, KillReplica) == [KillReplica(2), KillReplica(3)]
    assert only(actions, ReportLoss) == [ReportLoss(2, (0, 2, 3), (1,), "replica 0 was killed by signal 9")]
    plan = keys(machine.begin_change(to(3, (1, 1)), 4.0))["plan/3"]
    assert (plan.before, plan.why, plan.members) == (1, "lost", (PlanMember(0, 1),))


def test_where_no_survivor_is_left_the_job_starts_anew():
    machine = running(0, 1)
    grow(machine)
    commit(machine)
    machine.process_ended(0, KILLED, 2.0)
    actions = machine.process_ended(1, KILLED, 2.1)
    assert "no other is left" in only(actions, GiveUp)[0].why
    assert machine.phase == "over"


# A joiner dies in 4 or 5: no state was lost


@pytest.mark.parametrize("code", [1, KILLED])
def test_a_joiner_that_dies_on_the_way_is_left_behind_with_the_others(code):
    machine = running(0, 1)
    grow(machine)
    commit(machine)
    machine.key_found("here/2/0", "", 2.0)
    actions = machine.process_ended(2, code, 3.0)
    assert only(actions, KillReplica) == [KillReplica(3)]
    assert only(actions, ReportLoss)[0].kept == (0, 1)
    assert keys(actions)["lost/2"] == "[2, 3]"
    assert keys(actions)["lost/1"] == "[]"


# Anything that gets stuck, or is refused


def test_a_refusal_gives_the_change_up():
    machine = running(0, 1)
    machine.begin_change(to(2, (0, 0)), 0.0)
    actions = machine.key_found("failed/2", "no pickle here", 1.0)
    assert "no pickle here" in only(actions, GiveUp)[0].why
    assert machine.process_ended(0, 143, 2.0) is None


@pytest.mark.parametrize("at_the_door", [(), (2, 3)])
def test_a_change_that_nobody_comes_to_is_withdrawn_and_those_that_run_are_left_alone(at_the_door):
    machine = running(0, 1)
    grow(machine)
    commit(machine, 1.0)
    for rank in at_the_door:
        # Who joins is there at once; the others may evaluate for long before they take another step.
        assert machine.key_found(f"here/2/{rank}", "", 1.1) == []
    assert machine.awaits_boundary
    assert machine.tick(20.9) == []
    actions = machine.tick(21.0)
    assert not only(actions, GiveUp)
    assert only(actions, KillReplica) == [KillReplica(2), KillReplica(3)]
    assert "withdrawn/2" in keys(actions)
    lost = only(actions, ReportLoss)[0]
    assert (lost.ranks, lost.kept) == ((2, 3), (0, 1))
    assert machine.takes_orders
    plan = keys(machine.begin_change(to(3, (0, 0), (1, 1)), 22.0))["plan/3"]
    assert (plan.before, plan.why) == (1, "resize")


def test_a_change_without_joiners_waits_as_long_as_those_that_run_need():
    machine = running(0, 1)
    machine.begin_change(to(2, (0, 0), leavers=(1,)), 0.0)
    for now in (20.0, 40.0, 60.0):
        assert machine.tick(now) == []
    machine.key_found("here/2/0", "", 61.0)
    machine.key_found("done/2/0", DONE, 62.0)
    assert only(machine.process_ended(1, 0, 62.5), ReportStart)


def test_after_a_loss_nobody_is_waited_for_in_vain():
    machine = running(0, 1, 2)
    machine.process_ended(2, KILLED, 1.0)
    machine.begin_change(to(2, (0, 0), (1, 1)), 2.0)
    assert "replicas 0, 1 of generation 2" in only(machine.tick(22.0), GiveUp)[0].why


def test_a_leaver_that_has_gone_shows_that_the_others_are_there():
    machine = running(0, 1)
    machine.begin_change(to(2, (0, 0), (2, None), leavers=(1,)), 0.0)
    machine.key_found("ready/2/1", "", 1.0)
    assert machine.process_ended(1, 0, 2.0) == []
    assert not machine.awaits_boundary
    assert only(machine.tick(7.0), GiveUp)


def test_a_leaver_that_goes_just_as_its_change_is_withdrawn_is_not_through_with_the_job():
    machine = running(0, 1)
    machine.begin_change(to(2, (0, 0), (2, None), leavers=(1,)), 0.0)
    machine.key_found("ready/2/1", "", 1.0)
    assert only(machine.tick(21.0), ReportLoss)[0].kept == (0,)
    assert keys(machine.process_ended(1, 0, 21.1)) == {"lost/1": "[1]"}
    machine.begin_change(to(3, (0, 0)), 22.0)
    assert machine.ranks == {0: 0}


def test_those_at_the_door_wait_longer_than_anybody_here():
    plan = keys(grow(running(0, 1)))["plan/2"]
    assert plan.deadlines.join >= LIMITS.boundary + LIMITS.move


def test_who_was_to_leave_learns_that_it_is_the_first_left():
    machine = running(0, 1)
    machine.begin_change(to(2, (0, 0), (2, None), leavers=(1,)), 0.0)
    actions = machine.process_ended(0, KILLED, 1.0)
    assert keys(actions)["lost/1"] == "[0]"
    assert isinstance(actions[-1], GiveUp)


def test_who_has_left_is_not_the_first_left():
    machine = running(0, 1, 2)
    machine.begin_change(to(2, (1, 1), (2, 2), leavers=(0,)), 0.0)
    machine.key_found("here/2/0", "", 1.0)
    machine.process_ended(0, 0, 2.0)
    assert keys(machine.process_ended(1, KILLED, 3.0))["lost/1"] == "[0, 1]"


def test_who_dies_while_the_job_ends_is_told_to_those_that_may_save():
    machine = running(0, 1, 2)
    machine.end_job()
    assert keys(machine.report_deaths([0])) == {"lost/1": "[0]"}
    assert keys(machine.report_deaths([1, 7])) == {"lost/1": "[0, 1]"}
    assert machine.report_deaths([7]) == []
    assert machine.phase == "over"


def test_every_sign_of_the_move_gives_it_more_time():
    machine = running(0, 1)
    grow(machine)
    commit(machine)
    machine.key_found("here/2/0", "", 19.0)
    machine.key_found("done/2/0", DONE, 23.0)
    assert machine.tick(27.9) == []
    assert only(machine.tick(28.0), GiveUp)


def test_nobody_answers_after_a_loss():
    machine = running(0, 1, 2)
    machine.process_ended(2, KILLED, 1.0)
    assert machine.tick(3.9) == []
    assert "the service did not say" in only(machine.tick(4.0), GiveUp)[0].why


def test_a_replica_that_asks_for_a_restart_gets_one():
    machine = running(0, 1)
    assert only(machine.process_ended(1, exit_codes.RESTART, 1.0), GiveUp)


# A rank crashes or hangs in normal training


def test_a_killed_replica_is_told_and_the_others_wait():
    machine = running(4, 5, 6)
    actions = machine.process_ended(5, KILLED, 1.0)
    assert keys(actions) == {"lost/1": "[1]"}
    assert only(actions, ReportLoss) == [ReportLoss(1, (1,), (4, 6), "replica 1 was killed by signal 9")]
    again = machine.process_ended(6, KILLED, 1.5)
    assert keys(again) == {"lost/1": "[1, 2]"}
    assert only(again, ReportLoss)[0].kept == (4,)


def test_a_hung_replica_is_told_with_its_reason():
    machine = running(0, 1)
    assert only(machine.process_ended(1, KILLED, 1.0, "it hung"), ReportLoss)[0].why == "it hung"
    alone = running(0)
    assert only(alone.process_ended(0, KILLED, 1.0, "it hung"), GiveUp)[0].why == "it hung, and no other is left"


def test_ends_that_are_no_part_of_a_change_are_judged_as_ever():
    assert running(0).process_ended(0, KILLED, 1.0) is None
    assert running(0, 1).process_ended(0, 0, 1.0) is None
    assert running(0, 1).process_ended(0, 1, 1.0) is None


def test_a_replica_that_fails_for_the_loss_of_another_is_no_crash():
    machine = running(0, 1, 2)
    machine.process_ended(2, KILLED, 1.0)
    assert "did not survive" in only(machine.process_ended(0, 1, 1.5), GiveUp)[0].why


def test_numbers_of_the_dead_may_be_given_anew():
    machine = running(0, 1)
    machine.process_ended(0, KILLED, 1.0)
    machine.begin_change(to(2, (1, 1), (0, None)), 2.0)
    machine.key_found("ready/2/1", "", 3.0)
    machine.key_found("done/2/0", DONE, 4.0)
    machine.key_found("done/2/1", DONE, 4.0)
    assert (machine.phase, machine.ranks) == ("settled", {1: 0, 0: 1})
    assert keys(machine.process_ended(0, KILLED, 5.0)) == {"lost/2": "[1]"}


# The job ends meanwhile


def test_a_job_that_ends_while_joiners_prepare_needs_none():
    machine = running(0)
    machine.begin_change(to(2, (0, 0), (1, None)), 0.0)
    assert machine.process_ended(0, 0, 1.0) is None
    actions = machine.end_job()
    assert keys(actions).keys() == {"withdrawn/2"}
    assert only(actions, KillReplica) == [KillReplica(1)]
    assert (machine.phase, machine.due) == ("over", None)


def test_a_job_that_is_through_right_after_the_move_is_no_loss():
    machine = running(0)
    machine.begin_change(to(2, (0, 0), (1, None)), 0.0)
    machine.key_found("ready/2/1", "", 1.0)
    assert machine.process_ended(1, 0, 2.0) is None
    assert machine.process_ended(0, 0, 2.0) is None


def test_a_job_that_is_through_before_it_moves_leaves_no_joiner_waiting():
    machine = running(0)
    machine.begin_change(to(2, (0, 0), (1, None)), 0.0)
    machine.key_found("ready/2/1", "", 1.0)
    assert machine.process_ended(0, 0, 2.0) is None
    machine.key_found("here/2/1", "", 2.5)
    assert machine.tick(2.9) == []
    assert only(machine.tick(3.0), KillReplica) == [KillReplica(1)]
    assert machine.phase == "over"


# Leavers, losses and steps that go by


def test_the_boundary_is_awaited_until_the_first_is_there():
    machine = running(0, 1)
    grow(machine)
    assert not machine.awaits_boundary
    commit(machine)
    assert machine.awaits_boundary
    machine.key_found("here/2/1", "", 2.0)
    assert not machine.awaits_boundary


def test_a_change_may_be_given_up_for_reasons_of_others():
    machine = running(0, 1)
    grow(machine)
    commit(machine)
    actions = machine.give_up_generation("steps went by")
    assert only(actions, GiveUp) == [GiveUp("steps went by")]
    assert {action.number for action in only(actions, KillReplica)} == {2, 3}


def shrink_and_lose():
    """Of replicas 0, 1 and 2 the last is to leave, and the first dies meanwhile."""
    machine = running(0, 1, 2)
    machine.begin_change(to(2, (0, 0), (1, 1), leavers=(2,)), 0.0)
    assert only(machine.process_ended(0, KILLED, 1.0), ReportLoss) == [
        ReportLoss(2, (0,), (1,), "replica 0 was killed by signal 9")
    ]
    return machine


def test_who_leaves_after_a_loss_is_not_through_with_the_job():
    machine = shrink_and_lose()
    assert keys(machine.process_ended(2, 0, 2.0)) == {"lost/1": "[0, 2]"}
    assert machine.phase == "lost"
    actions = machine.begin_change(to(3, (1, 1)), 3.0)
    assert keys(actions)["plan/3"].why == "lost"
    assert machine.ranks == {1: 1}


def test_who_leaves_while_others_prepare_after_a_loss_does_not_end_the_job():
    machine = shrink_and_lose()
    machine.begin_change(to(3, (1, 1), (4, None), leavers=(2,)), 2.0)
    assert machine.process_ended(2, 0, 3.0) == []
    machine.key_found("ready/3/1", "", 4.0)
    machine.key_found("done/3/0", DONE, 5.0)
    assert only(machine.key_found("done/3/1", DONE, 5.0), ReportStart)


def test_a_leaver_that_is_through_before_anybody_was_told_to_leave_is_through():
    machine = running(0, 1)
    machine.begin_change(to(2, (0, 0), (2, None), leavers=(1,)), 0.0)
    assert machine.process_ended(1, 0, 1.0) is None


# Where nobody stays, those that leave hand the state over


def move(machine, generation=2):
    """Replicas 0 and 1 of generation 1 give way to 2 and 3."""
    return machine.begin_change(to(generation, (2, None), (3, None), leavers=(0, 1)), 0.0)


def moved(machine):
    """To where those that joined have stepped, and those before them are still there."""
    move(machine)
    machine.key_found("ready/2/0", "", 1.0)
    machine.key_found("ready/2/1", "", 1.0)
    machine.key_found("done/2/0", DONE, 2.0)
    return machine.key_found("done/2/1", DONE, 2.0)


def test_where_somebody_stays_nobody_hands_over_and_leaves():
    assert to(2, (0, 0), (2, None), leavers=(1,)).senders == ()
    assert keys(grow(running(0, 1)))["plan/2"].senders == ()


def test_those_that_hand_over_are_in_the_plan_and_awaited_at_the_door():
    machine = running(5, 6)
    plan = keys(machine.begin_change(to(2, (0, None), (1, None), leavers=(6, 5)), 0.0))["plan/2"]
    assert plan.senders == (0, 1)
    assert plan.members == (PlanMember(0, None), PlanMember(1, None))
    machine.key_found("ready/2/0", "", 1.0)
    watched = only(machine.key_found("ready/2/1", "", 1.0), WatchKeys)[0].keys
    assert {"here/2/2", "here/2/3", "done/2/1"} <= {*watched}
    assert "done/2/2" not in watched
    machine.key_found("here/2/0", "", 2.0)
    assert machine.awaits_boundary, "those that join are there at once"
    machine.key_found("here/2/2", "", 2.0)
    assert not machine.awaits_boundary


def test_those_that_hand_over_leave_when_all_others_have_stepped():
    machine = running(0, 1)
    assert keys(moved(machine)) == {"handed/2": ""}
    assert machine.phase == "move"
    assert machine.process_ended(1, 0, 3.0) == []
    assert only(machine.process_ended(0, 0, 3.0), ReportStart) == [ReportStart(2, {0: PAUSE, 1: PAUSE})]
    assert (machine.settled, machine.ranks) == (2, {2: 0, 3: 1})


def test_who_has_handed_over_and_does_not_leave_is_ended():
    machine = running(0, 1)
    moved(machine)
    assert machine.tick(4.1) == [KillReplica(0), KillReplica(1)]
    machine.process_ended(0, KILLED, 4.2)
    assert only(machine.process_ended(1, KILLED, 4.2), ReportStart)


@pytest.mark.parametrize("committed", [False, True])
def test_one_that_comes_and_dies_has_the_others_save(committed):
    machine = running(0, 1)
    move(machine)
    if committed:
        machine.key_found("ready/2/0", "", 1.0)
        machine.key_found("ready/2/1", "", 1.0)
        machine.key_found("here/2/2", "", 1.0)
    actions = machine.process_ended(3, KILLED, 2.0)
    assert only(actions, KillReplica) == [KillReplica(2)]
    assert "joining replica 1 ended" in only(actions, GiveUp)[0].why
    assert not only(actions, ReportLoss), "others may be to have the places that all were to leave"


@pytest.mark.parametrize("committed", [False, True])
def test_one_that_holds_the_state_and_dies_has_the_rest_save(committed):
    machine = running(0, 1)
    move(machine)
    if committed:
        machine.key_found("ready/2/0", "", 1.0)
        machine.key_found("ready/2/1", "", 1.0)
    actions = machine.process_ended(0, KILLED, 2.0)
    assert keys(actions)["lost/1"] == "[0]", "the other is the first that is left"
    assert keys(actions)["lost/2"] == "[2]", "who is stuck with it on the way is freed"
    assert only(actions, KillReplica) == [KillReplica(2), KillReplica(3)]
    assert only(actions, GiveUp) == [GiveUp("replica 0 was killed by signal 9")]


def test_one_that_dies_when_it_alone_holds_the_state_has_its_peers_save():
    machine = running(0, 1)
    moved(machine)
    actions = machine.process_ended(2, KILLED, 3.0)
    assert only(actions, GiveUp)
    assert not only(actions, KillReplica), "the others that joined hold all there is"
    assert keys(actions)["lost/2"] == "[0]"


def test_a_job_that_ends_has_those_that_joined_end_only_while_others_hold_its_state():
    machine = running(0, 1)
    move(machine)
    assert only(machine.end_job(), KillReplica) == [KillReplica(2), KillReplica(3)]
    machine = running(0, 1)
    moved(machine)
    assert not only(machine.end_job(), KillReplica)


def test_a_move_that_nobody_comes_to_is_a_restart():
    machine = running(0, 1)
    move(machine)
    machine.key_found("ready/2/0", "", 1.0)
    machine.key_found("ready/2/1", "", 1.0)
    assert "no replica reached the end of a step" in only(machine.tick(21.1), GiveUp)[0].why


def test_after_a_move_the_next_change_counts_from_it():
    machine = running(0, 1)
    moved(machine)
    machine.process_ended(0, 0, 3.0)
    machine.process_ended(1, 0, 3.0)
    actions = machine.begin_change(to(3, (2, 0), leavers=(3,)), 4.0)
    assert (keys(actions)["plan/3"].before, keys(actions)["plan/3"].senders) == (2, ())
    machine.key_found("done/3/0", DONE, 5.0)
    assert only(machine.process_ended(3, 0, 5.0), ReportStart)


def test_one_that_ends_well_before_it_has_handed_over_is_doubted():
    machine = running(0, 1)
    move(machine)
    machine.key_found("ready/2/0", "", 1.0)
    machine.key_found("ready/2/1", "", 1.0)
    assert only(machine.process_ended(1, 0, 2.0), DoubtEnd)[0].number == 1
    assert machine.tick(2.9) == []
    actions = machine.tick(3.0)
    assert "without handing over" in only(actions, GiveUp)[0].why
    assert only(actions, KillReplica) == [KillReplica(2), KillReplica(3)]


# Illegal transitions


def test_an_order_that_comes_while_a_change_is_under_way_raises_with_the_story():
    machine = running(0, 1)
    grow(machine)
    machine.process_ended(0, KILLED, 1.0)
    grow(machine)
    with pytest.raises(
        IllegalTransition, match=r"from 'prepare' to 'prepare'.*replica process 0 ended with -9; now lost"
    ):
        machine.begin_change(to(3, (1, 1)), 2.0)


def test_nothing_begins_once_the_job_ends():
    machine = running(0, 1)
    machine.end_job()
    with pytest.raises(IllegalTransition, match=r"from 'over' to 'prepare'"):
        grow(machine)
    assert machine.phase == "over"
