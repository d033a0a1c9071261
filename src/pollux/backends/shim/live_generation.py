"""A generation whose replicas may change while they run: the state machine of `transition` put to work.

Its actions become processes, keys of the job's store, and words to whoever is connected to the shim.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from pollux.backends.shim.actions import (
    Action,
    DoubtEnd,
    GiveUp,
    KillReplica,
    ReportLoss,
    ReportStart,
    SetKey,
    StartJoiner,
    WatchKeys,
)
from pollux.backends.shim.generation import Generation, RunningReplica
from pollux.backends.shim.liveness import ListeningClock, LivenessTracker
from pollux.backends.shim.phases import Limits
from pollux.backends.shim.store_server import StoreHost
from pollux.backends.shim.transition import settled_at
from pollux.core.errors import BackendFailed
from pollux.wire.live import exit_codes, keys
from pollux.wire.live.codec import MalformedValue
from pollux.wire.live.heartbeat import Heartbeat, UnsupportedVersion
from pollux.wire.live.messages import AlarmMessage, LaunchOrder, LostMessage, ShimMessage, StartedMessage

__all__ = ["LiveGeneration"]

_POLL_SECONDS = 0.02
_BEAT_SECONDS = 1.0
_FIRST_BEAT_SECONDS = 0.1
# An agent tells that it is there as soon as it is built; without one nobody would follow an order. To import, and to
# build a model, may take so many times the silence that is allowed later.
_START_TIMES = 2.0
_PATIENCE_SECONDS = 5.0
# Replicas agree on a boundary within two steps of hearing of a change, and they listen ten times a second.
_MOST_STEPS = 50
_LEAST_BOUNDARY_SECONDS = 30.0
_LEAST_REGROUP_SECONDS = 5.0
_LEAST_ORDER_SECONDS = 5.0
_PREPARE_TIMES = 3.0
# Through, saved and stopped, or saved to be started anew.
_WELL_ENDED = frozenset({0, exit_codes.STOPPED, exit_codes.RESTART})


def _limits(hang_seconds: float) -> Limits:
    """Who meets the others in a new group is silent meanwhile, and waits no longer than silence is borne.

    Nor does who waits for a word after a loss.
    """
    usual = Limits()
    regroup = min(usual.regroup, max(_LEAST_REGROUP_SECONDS, hang_seconds))
    return replace(usual, regroup=regroup, order=min(usual.order, max(_LEAST_ORDER_SECONDS, hang_seconds)))


class LiveGeneration:
    """Follows one generation, and those that come of it. `lost` is what was told of a loss and not answered yet."""

    def __init__(
        self,
        generation: Generation,
        store: StoreHost,
        tell: Callable[[ShimMessage], None],
        limits: Limits | None = None,
    ) -> None:
        self._generation = generation
        self._store = store
        self._tell = tell
        order = generation.order
        limits = limits or _limits(order.hang_seconds)
        self._transition = settled_at(order.generation, [member.number for member in generation.members], limits)
        self._liveness = LivenessTracker(order.hang_seconds, self._transition.limits.regroup)
        self._liveness.unheard.update(member.number for member in generation.members)
        self._hung: dict[int, str] = {}
        self._pending: LaunchOrder | None = None
        self._follows = False
        self._follow_by: float | None = None
        # Where all of it stood still meanwhile, nobody was silent, or late.
        self._clock = ListeningClock(time.monotonic)
        self._began_at, self._launched_at = self._clock(), time.monotonic()
        self._committed_at, self._steps = 0.0, dict[int, int]()
        self._through = False
        self._refusal = ""
        # Keys whose values were malformed: each is told of once.
        self._malformed: set[str] = set()
        # Who is who in every generation that replicas may believe to be in, by the rank there.
        self._numbers = {order.generation: self._by_rank()}
        self.lost: LostMessage | None = None
        store.set(keys.COMMITTED, str(order.generation))
        self._watch_beats()

    def _by_rank(self) -> dict[int, int]:
        return {rank: number for number, rank in self._transition.ranks.items()}

    @property
    def is_moving(self) -> bool:
        """Whether a change is under way, or awaited, be it in vain since the job is through."""
        return self._transition.is_moving or self._pending is not None or self._transition.phase == "over"

    @property
    def _is_through(self) -> bool:
        """Whether the job is through, and only its script goes on."""
        return self._through or self._liveness.is_finished()

    @property
    def look_again_at(self) -> float | None:
        """When `look` must be called next, on the monotonic clock."""
        times = [at for at in (self._transition.due, self._liveness.due, self._follow_by) if at is not None]
        return self._clock.at(min(times)) if times else None

    def resize(self, order: LaunchOrder) -> None:
        """Carry an order out; one that comes while another is under way waits, one that comes too late ends there."""
        if self._generation.is_ending or self._transition.phase == "over":
            self._generation.renumber(order.generation)
        elif self._store.pid is None:
            self._refuse(order, "the process that hosts its store has ended")
        elif self._refusal:
            self._refuse(order, self._refusal)
        elif not self._follows or not self._transition.takes_orders or self._is_through:
            self._wait_with(order)
            if not self._follows:
                self._wait_for_words()
        else:
            self.lost, self._follow_by = None, None
            change = self._generation.seat(order, self._transition.ranks)
            self._numbers[change.generation] = {rank: seat.number for rank, seat in enumerate(change.seats)}
            for number in change.joiners.values():
                self._liveness.renew(number)
            self._carry_out(self._transition.begin(change, self._clock()))
            self._watch_beats()

    def _wait_with(self, order: LaunchOrder) -> None:
        """Note it at once: whoever asks later, a new service say, must learn that this order was taken."""
        if order.generation != self._generation.order.generation:
            self._generation.renumber(order.generation)
        self._pending = order

    def _wait_for_words(self) -> None:
        if self._follow_by is None:
            now = self._clock()
            self._follow_by = max(now + _PATIENCE_SECONDS, self._began_at + _START_TIMES * self._liveness.hang_seconds)

    def _refuse(self, order: LaunchOrder, why: str) -> None:
        self._generation.renumber(order.generation)
        self._carry_out(self._transition.give_up(f"it cannot change while it runs: {why}"))

    def found(self, key: str, text: str) -> None:
        """A key of the store that was looked for; a value that says nothing is ignored, with one line."""
        parts = keys.parse(key)
        try:
            if parts is not None and parts.kind == keys.BEAT:
                self._hear_beat(self._numbers.get(parts.generation, {}).get(parts.rank or 0), text)
            else:
                self._carry_out(self._transition.seen(key, text, self._clock()))
        except MalformedValue as error:
            if key not in self._malformed:
                self._malformed.add(key)
                print(f"the value of '{key}' is malformed, and is ignored: {error}", file=sys.stderr, flush=True)

    def _hear_beat(self, number: int | None, text: str) -> None:
        if number is None:
            return
        was_through = self._is_through
        try:
            beat = Heartbeat.decode(text)
        except UnsupportedVersion as error:
            self._refusal = str(error)
            self._begin_to_follow()
            return
        self._refusal = beat.refusal
        alarms = self._liveness.false_alarms
        self._liveness.heard(number, beat, self._clock())
        if self._liveness.false_alarms > alarms:
            rank = self._transition.ranks.get(number)
            text = f"replica {rank} gave a sign of life, having been given up as hung"
            self._tell(AlarmMessage(time.time(), text, rank))
        if self._liveness.is_finished():
            self._generation.believe()
        self._begin_to_follow()
        if self._is_through and self._transition.phase in ("prepare", "move") and not self._got_state(number):
            self.over()
        elif was_through and not self._is_through:
            self._carry_out([])

    def _got_state(self, number: int) -> bool:
        """Whether it joined where nobody stays: it can be through while those that sent it the state still wait."""
        change = self._transition.change
        return change is not None and bool(change.senders) and number in change.joiners.values()

    def _begin_to_follow(self) -> None:
        if not self._follows:
            self._follows, self._follow_by = True, None
            # Who joins does what those that run did until their first word, beside them.
            limits, took = self._transition.limits, time.monotonic() - self._launched_at
            self._transition.limits = replace(limits, prepare=max(limits.prepare, _PREPARE_TIMES * took))
            self._watch_beats()
            self._carry_out([])

    def store_ended(self) -> None:
        """The host of the store is gone: a change under way cannot come about."""
        if self._transition.is_moving:
            self._carry_out(self._transition.give_up("the process that hosts the job's store has ended"))

    def ended(self, member: RunningReplica) -> bool:
        """A replica has ended; whether that is taken care of here."""
        code = member.code or 0
        self._liveness.drop(member.number)
        alone = not self._follows or self._refusal or self._is_through
        if alone or (code < 0 and self._generation.lacks_memory):
            actions = None
        else:
            actions = self._transition.ended(member.number, code, self._clock(), self._hung.pop(member.number, ""))
        if actions is None:
            self.died_at_the_end([member])
            # Replicas are through together.
            self._through = self._through or code == 0
            if code != 0 or self._transition.phase == "prepare":
                self.over()
            return False
        if not any(isinstance(action, GiveUp | DoubtEnd) for action in actions):
            self._generation.depart(member)
        self._carry_out(actions)
        return True

    def lost_with_node(self, members: Sequence[RunningReplica], why: str) -> bool:
        """These are gone together; whether that is taken care of here."""
        if not self._follows:
            self.over()
            return False
        # Nobody may count on one of them while the others' ends are told.
        self._transition.dead.update(member.number for member in members if member.number in self._transition.ranks)
        cared_for = True
        # An order that waits must not give their numbers to others before all of them have departed.
        pending, self._pending = self._pending, None
        for member in sorted(members, key=lambda member: member.number not in self._transition.ranks):
            # A joiner may have gone with the change that an earlier one of them ended.
            if member in self._generation.members:
                self._hung[member.number] = why
                cared_for = self.ended(member) and cared_for
        if pending is not None and self._pending is None:
            self._pending = pending
            self._carry_out([])
        return cared_for

    def died_at_the_end(self, members: Sequence[RunningReplica]) -> None:
        """These have ended while the job ends; what those left are to know of it."""
        dead = [member.number for member in members if (member.code or 0) not in _WELL_ENDED]
        if dead and self._follows and self._generation.is_ending:
            self._carry_out(self._transition.died_at_the_end(dead))

    def over(self) -> None:
        """The job ends: nothing changes any more."""
        if self._transition.phase != "over":
            self._carry_out(self._transition.over())
        self._follow_by = None
        self._liveness.keep(())
        self._store.watch("beats", (), _BEAT_SECONDS)

    def look(self) -> None:
        """Act on what is due: replicas that are hung, phases that take too long."""
        now = self._clock()
        if self._follow_by is not None and now >= self._follow_by:
            self._follow_by = None
            if self._pending is not None and not self._is_through:
                order, self._pending = self._pending, None
                self._refuse(order, "no agent in its replicas gives a sign of life")
        for number in self._liveness.silent(now):
            rank = self._transition.ranks.get(number)
            why = f"replica {rank} hung: {self._liveness.words.pop(number)}"
            self._hung[number] = f"{why}; {self._liveness.false_alarms} false alarms before"
            self._generation.kill(number)
        self._carry_out(self._transition.tick(now))
        if self._transition.awaits_boundary and self._steps_by(now) > _MOST_STEPS:
            why = f"{_MOST_STEPS} steps went by, and no replica went to its new generation"
            self._carry_out(self._transition.give_up(why))

    def _steps_by(self, now: float) -> int:
        """Steps that all have taken since everybody was told to go; 0 where that is not long ago."""
        steps = self._liveness.steps()
        if now < self._committed_at + _LEAST_BOUNDARY_SECONDS:
            return 0
        return min((step - self._steps[number] for number, step in steps.items() if number in self._steps), default=0)

    def _watch_beats(self) -> None:
        watched = [keys.beat(generation, rank) for generation, ranks in self._numbers.items() for rank in sorted(ranks)]
        self._store.watch("beats", watched, _BEAT_SECONDS if self._follows else _FIRST_BEAT_SECONDS, repeat=True)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SetKey(key, text):
                    self._store.set(key, text)
                    if key == keys.COMMITTED:
                        steps, ranks = self._liveness.steps(), self._transition.ranks
                        self._committed_at = self._clock()
                        # Joiners take none.
                        self._steps = {number: step for number, step in steps.items() if number in ranks}
                case WatchKeys(watched):
                    self._store.watch("change", watched, _POLL_SECONDS)
                case KillReplica(number):
                    self._kill(number)
                case ReportLoss():
                    self._report_loss(action)
                case ReportStart():
                    self._report_start(action)
                case GiveUp(why):
                    self._generation.give_up(why)
                case DoubtEnd(number, why):
                    self._generation.doubt(number, why)
                case StartJoiner(rank, number):
                    try:
                        self._generation.join(rank, number)
                    except (OSError, BackendFailed) as error:
                        self._carry_out(self._transition.cannot_join(rank, str(error)))
                        break
        if self._pending is not None and self._follows and self._transition.takes_orders and not self._is_through:
            order, self._pending = self._pending, None
            self.resize(order)

    def _kill(self, number: int) -> None:
        self._generation.kill(number)
        for member in [*self._generation.members]:
            # Who joins was never part of the job; who leaves is until it is gone.
            if member.number == number and number not in self._transition.ranks:
                self._generation.depart(member)

    def _report_loss(self, lost: ReportLoss) -> None:
        kept = [member for member in self._generation.members if member.number in lost.kept]
        kept.sort(key=lambda member: lost.kept.index(member.number))
        places = tuple(member.place for member in kept)
        self.lost = LostMessage(time.time(), lost.generation, lost.ranks, places, lost.why, lost.withdrawn)
        self._tell(self.lost)

    def _report_start(self, started: ReportStart) -> None:
        self._generation.settle(self._transition.ranks)
        self._numbers = {self._transition.settled: self._by_rank()}
        self._liveness.settle(self._transition.ranks, self._clock())
        self._watch_beats()
        places = tuple(self._generation.order.places)
        self._tell(StartedMessage(time.time(), started.generation, places, started.pauses.get(0)))
