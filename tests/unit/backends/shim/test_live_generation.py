"""What the shim makes of signs of life and orders, without processes and without a store."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest

from pollux.backends.shim import live_generation as module
from pollux.backends.shim.actions import ReplicaChange, Seat
from pollux.backends.shim.live_generation import LiveGeneration
from pollux.core.errors import BackendFailed
from pollux.wire.live import keys
from pollux.wire.live.codec import encode
from pollux.wire.live.heartbeat import Activity, Heartbeat, PauseReport
from pollux.wire.live.messages import AlarmMessage, StartedMessage

DONE = encode(PauseReport(0.1, "move"))


@dataclass
class Order:
    generation: int
    places: tuple[str, ...] = ("0", "1")
    hang_seconds: float = 3.0


@dataclass
class RunningReplica:
    number: int
    place: str = "0"
    code: int | None = None


@dataclass
class Generation:
    """Notes what is asked of it; a new order seats those that are there, and joiners for the rest."""

    order: Order
    members: list[RunningReplica]
    told: list[Any] = field(default_factory=list)
    is_ending: bool = False
    lacks_memory: bool = False

    def take_order(self, order, ranks):
        self.order = order
        staying = [Seat(number, rank) for number, rank in sorted(ranks.items(), key=lambda item: item[1])]
        free = [number for number in range(10) if number not in ranks]
        seats = [*staying, *(Seat(number, None) for number in free)][: len(order.places)]
        return ReplicaChange(
            order.generation, tuple(seats), tuple(seat.number for seat in staying[len(order.places) :])
        )

    def __getattr__(self, name):
        return lambda *arguments: self.told.append((name, *arguments))


class Store:
    pid: int | None = 1

    def __init__(self):
        self.keys, self.watched = {}, {}

    def set(self, key, value):
        self.keys[key] = value

    def watch(self, name, keys, seconds, repeat=False):
        self.watched[name] = list(keys)


@pytest.fixture
def clock(monkeypatch):
    now = itertools.count()
    clock = type("Clock", (), {"now": 0.0})()
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    assert next(now) == 0
    return clock


def alive(hang_seconds=3.0):
    generation = Generation(Order(1, hang_seconds=hang_seconds), [RunningReplica(0), RunningReplica(1, "1")])
    made: Any = LiveGeneration(generation, Store(), lambda message: generation.told.append(message))
    made.generation, made.store = generation, made._store
    return made


@pytest.fixture
def live(clock):
    return alive()


def beat(live, generation, rank, step=3, busy="", refusal="", **more):
    said = Heartbeat(step, 0.0, Activity(busy), refusal=refusal, **more)
    live.key_found(keys.beat(generation, rank), said.encode())


def move(live, *places):
    """Order all of the job to other places."""
    seats = tuple(Seat(2 + rank, None) for rank, _ in enumerate(places))
    live.generation.take_order = lambda order, ranks: ReplicaChange(order.generation, seats, tuple(ranks))
    live.resize(Order(2, places))


def until(live, clock, end, *beating):
    """Second by second to a time, while these ranks of generation 1 give signs of life."""
    while clock.now < end:
        clock.now = min(clock.now + 0.5, end)
        for rank in beating:
            beat(live, 1, rank, waiting=True)
        live.act_on_due()


def asked(live, name):
    return [told[1:] for told in live.generation.told if isinstance(told, tuple) and told[0] == name]


def test_an_order_that_waits_for_the_agent_is_noted_at_once(live, clock):
    live.resize(Order(2, ("0", "1", "2")))
    assert asked(live, "renumber") == [(2,)]
    assert live.is_moving
    beat(live, 1, 0)
    assert "plan/2" in live.store.keys


def test_without_an_agent_an_order_is_refused_after_a_while(live, clock):
    clock.now = 2.0
    live.resize(Order(2))
    until(live, clock, 6.9)
    assert asked(live, "end_for_restart") == []
    until(live, clock, 7.0)
    ((why,),) = asked(live, "end_for_restart")
    assert "no agent" in why


def test_what_cannot_change_is_refused_at_once_with_its_reason(live):
    beat(live, 1, 0, step=-1, refusal="a framework owns the loop")
    live.resize(Order(2))
    assert asked(live, "end_for_restart") == [("it cannot change while it runs: a framework owns the loop",)]


def test_a_replica_of_a_job_that_cannot_change_ends_as_ever(live):
    beat(live, 1, 0, step=-1, refusal="a framework owns the loop")
    assert not live.replica_ended(RunningReplica(1, "1", -9))
    assert asked(live, "dismiss") == []


def test_a_job_that_is_through_is_not_moved(live):
    beat(live, 1, 0)
    beat(live, 1, 0, busy="finished")
    live.resize(Order(2, ("0",)))
    assert "plan/2" not in live.store.keys
    assert live.is_moving
    # It was not: the script trains on.
    beat(live, 1, 0, step=4)
    assert "plan/2" in live.store.keys


def test_joiners_of_a_job_that_is_through_are_not_needed(live):
    beat(live, 1, 0)
    live.resize(Order(2, ("0", "1", "2")))
    beat(live, 1, 0, busy="finished")
    assert "withdrawn/2" in live.store.keys
    assert asked(live, "kill") == [(2,)]


def test_after_one_replica_ended_well_nothing_changes_any_more(live):
    beat(live, 1, 0)
    assert not live.replica_ended(RunningReplica(1, "1", 0))
    live.resize(Order(2, ("0", "1", "2")))
    assert "plan/2" not in live.store.keys
    assert asked(live, "end_for_restart") == []


def test_replicas_are_heard_in_the_generation_they_believe_to_be_in(live, clock):
    beat(live, 1, 0)
    beat(live, 1, 1)
    live.resize(Order(2, ("0",)))
    assert set(live.store.watched["beats"]) == {"beat/1/0", "beat/1/1", "beat/2/0"}
    clock.now = 2.0
    beat(live, 2, 0, busy="first step")
    beat(live, 1, 1, busy="regroup")
    until(live, clock, 5.0)
    assert asked(live, "kill") == [], "it is heard elsewhere"
    while clock.now < 10.0:
        clock.now += 1.0
        beat(live, 2, 0, busy="first step")
        live.act_on_due()
    assert asked(live, "kill") == [(1,)]


@pytest.mark.parametrize("places", [("0",), ("0", "1", "2")])
def test_steps_that_go_by_give_a_change_up(live, clock, places):
    beat(live, 1, 0, step=3)
    beat(live, 1, 1, step=3)
    live.resize(Order(2, places))
    if len(places) > 2:
        beat(live, 2, 2, step=-1, busy="regroup")
        live.key_found("ready/2/2", "")
        live.key_found("here/2/2", "")
    until(live, clock, 31.0, 0, 1)
    beat(live, 1, 0, step=100)
    beat(live, 1, 1, step=3, busy="pass end")
    live.act_on_due()
    assert asked(live, "end_for_restart") == [], "one of them is at something of its own"
    beat(live, 1, 1, step=100)
    live.act_on_due()
    assert "50 steps went by" in asked(live, "end_for_restart")[0][0]


def test_a_hang_right_after_a_change_is_noticed(live, clock):
    beat(live, 1, 0)
    beat(live, 1, 1)
    live.resize(Order(2, ("0", "1")))
    for what, rank in itertools.product(("here", "done"), (0, 1)):
        live.key_found(f"{what}/2/{rank}", DONE)
    assert any(isinstance(told, StartedMessage) for told in live.generation.told)
    while clock.now < 3.0:
        clock.now += 1.0
        beat(live, 2, 1)
        live.act_on_due()
    assert asked(live, "kill") == [(0,)]


def test_who_hangs_is_ended_and_who_waits_for_it_is_not(live, clock):
    beat(live, 1, 0)
    until(live, clock, 2.9, 1)
    assert asked(live, "kill") == []
    until(live, clock, 3.5, 1)
    assert asked(live, "kill") == [(0,)]


def test_one_that_is_heard_after_the_verdict_is_a_false_alarm_that_is_told(live, clock):
    beat(live, 1, 0)
    until(live, clock, 3.5, 1)
    assert asked(live, "kill") == [(0,)]
    beat(live, 1, 0, step=4)
    beat(live, 1, 1, step=4)
    (alarm,) = (told for told in live.generation.told if isinstance(told, AlarmMessage))
    assert (alarm.replica, alarm.text) == (0, "replica 0 sent a heartbeat after it had been given up as hung")


def test_replicas_that_fall_silent_together_are_not_ended(live, clock):
    until(live, clock, 2.0, 0, 1)
    until(live, clock, 29.0)
    assert asked(live, "kill") == []
    until(live, clock, 33.0)
    assert len(asked(live, "kill")) == 1, "one of them holds the state in the end"


def test_after_a_freeze_of_everything_nobody_is_ended(live, clock):
    """The machine, or all processes of the job with the shim, stood still for an hour; beats are old on thaw."""
    until(live, clock, 2.0, 0, 1)
    clock.now += 3600.0
    live.act_on_due()
    assert asked(live, "kill") == asked(live, "end_for_restart") == []
    clock.now += 0.5
    beat(live, 1, 0)
    live.act_on_due()
    until(live, clock, clock.now + 10.0, 0, 1)
    assert asked(live, "kill") == []


def test_a_freeze_while_a_change_prepares_ends_nothing(live, clock):
    beat(live, 1, 0)
    live.resize(Order(2, ("0", "1", "2")))
    clock.now += 3600.0
    live.act_on_due()
    assert "withdrawn/2" not in live.store.keys


def test_it_looks_often_enough_to_know_that_it_was_awake(live, clock):
    beat(live, 1, 0)
    assert live.due <= clock.now + 1.0


def test_a_replica_that_is_through_right_after_it_got_the_state_ends_no_move(live):
    beat(live, 1, 0)
    beat(live, 1, 1)
    move(live, "2", "3")
    for rank in (0, 1):
        live.key_found(f"ready/2/{rank}", "")
    live.key_found("done/2/0", DONE)
    beat(live, 2, 0, busy="finished")
    assert not asked(live, "kill"), "the others of them have still to say that they have it"
    live.key_found("done/2/1", DONE)
    assert "handed/2" in live.store.keys


def test_a_move_of_a_job_that_is_through_is_over(live):
    beat(live, 1, 0)
    beat(live, 1, 1)
    move(live, "2")
    live.key_found("ready/2/0", "")
    beat(live, 1, 0, busy="finished")
    assert asked(live, "kill") == [(2,)]


@pytest.mark.parametrize(("took", "limit"), [(1.0, 180.0), (100.0, 300.0)])
def test_those_that_join_have_three_times_what_the_job_took_to_start(live, clock, took, limit):
    clock.now = took
    beat(live, 1, 0)
    beat(live, 1, 1)
    clock.now += 50.0
    beat(live, 1, 0)
    began = clock.now
    live.resize(Order(2, ("0", "1", "2")))
    until(live, clock, began + limit - 1.0, 0, 1)
    assert "withdrawn/2" not in live.store.keys
    until(live, clock, began + limit + 3.0, 0, 1)
    assert f"not ready after {limit:g} s" in live.store.keys["withdrawn/2"]
    assert asked(live, "end_for_restart") == []


# After a loss


@pytest.mark.parametrize(("hang_seconds", "waits"), [(30.0, 25.0), (300.0, 25.0), (1.0, 5.0)])
def test_survivors_wait_for_a_service_that_is_away_for_a_while(clock, hang_seconds, waits):
    """They themselves do so for 30 s."""
    live = alive(hang_seconds)
    for rank in (0, 1):
        beat(live, 1, rank)
    assert live.replica_ended(RunningReplica(1, "1", -9))
    until(live, clock, waits - 0.5, 0)
    assert asked(live, "end_for_restart") == []
    until(live, clock, waits, 0)
    assert asked(live, "end_for_restart") == [
        (f"the service did not say within {waits:g} s how to go on after a loss",)
    ]


def test_an_order_that_comes_late_after_a_loss_is_followed(clock):
    live = alive(30.0)
    for rank in (0, 1):
        beat(live, 1, rank)
    live.replica_ended(RunningReplica(1, "1", -9))
    until(live, clock, 24.0, 0)
    live.resize(Order(2, ("0",)))
    assert live.store.keys["committed"] == "2"
    assert asked(live, "end_for_restart") == []


# What cannot be started, or written


@pytest.mark.parametrize("failing", [2, 3])
@pytest.mark.parametrize("error", [BlockingIOError(11, "no more processes"), BackendFailed("cannot write it")])
def test_a_joiner_that_cannot_be_started_withdraws_the_change(live, clock, failing, error):
    def join(rank, number):
        live.generation.told.append(("join", rank, number))
        if number == failing:
            raise error

    live.generation.join = join
    beat(live, 1, 0)
    beat(live, 1, 1)
    live.resize(Order(2, ("0", "1", "2", "3")))
    assert asked(live, "join") == [(2, 2), (3, 3)][: failing - 1]
    assert "could not be started" in live.store.keys["withdrawn/2"]
    assert asked(live, "kill") == [(2,), (3,)]
    assert live.store.keys["committed"] == "1", "nobody paused"
    assert live.lost.kept == ("0", "1")
    assert live.lost.withdrawn
    # It goes on, and follows what it is told then.
    until(live, clock, 60.0, 0, 1)
    live.resize(Order(3, ("0", "1")))
    assert live.store.keys["committed"] == "3"
    assert asked(live, "end_for_restart") == []


# Values that say nothing, and agents of another version


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", '{"step": "many"}', "9" * 5000, '{"step": 1e999}', "x"])
def test_a_malformed_value_is_ignored_with_one_line(live, capfd, text):
    for _ in range(3):
        live.key_found("beat/1/0", text)
    assert capfd.readouterr().err.count("\n") == 1
    live.resize(Order(2, ("0", "1", "2")))
    assert "plan/2" not in live.store.keys, "no sign of life has come"
    beat(live, 1, 0)
    live.key_found("ready/2/2", "")
    live.key_found("done/2/0", text)
    assert asked(live, "end_for_restart") == []


def test_an_agent_of_another_version_is_refused_in_one_line(live):
    live.key_found("beat/1/0", '{"step": 3, "version": 7, "of_a_later_release": true}')
    live.resize(Order(2, ("0", "1", "2")))
    ((why,),) = asked(live, "end_for_restart")
    assert "version 7 of the live protocol" in why
    assert "install the same Pollux" in why


def leave(live, number):
    """Have one that was to hand over end with 0."""
    member = next(member for member in live.generation.members if member.number == number)
    member.code = 0
    return live.replica_ended(member)


def test_one_that_leaves_without_handing_over_makes_no_job_done(live, clock):
    beat(live, 1, 0)
    beat(live, 1, 1)
    move(live, "2", "3")
    for rank in (0, 1):
        live.key_found(f"ready/2/{rank}", "")
    assert leave(live, 0)
    assert leave(live, 1)
    assert [number for number, _ in asked(live, "doubt_success")] == [0, 1]
    assert asked(live, "dismiss") == []
    until(live, clock, 2.9)
    assert asked(live, "end_for_restart") == []
    until(live, clock, 4.0)
    assert "without handing over" in asked(live, "end_for_restart")[0][0]
    assert asked(live, "believe_success") == []


def test_one_that_was_through_is_believed_when_that_is_heard_after_its_end(live, clock):
    beat(live, 1, 0)
    beat(live, 1, 1)
    move(live, "2")
    live.key_found("ready/2/0", "")
    leave(live, 0)
    leave(live, 1)
    clock.now = 1.0
    beat(live, 1, 0, busy="finished")
    assert asked(live, "believe_success")
    assert asked(live, "kill") == [(2,)]
    until(live, clock, 9.0)
    assert asked(live, "end_for_restart") == []
