"""A generation whose replicas may change while they run: the state machine of `transition` put to work.

Its actions become processes, keys of the job's store, and words to whoever is connected to the shim.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pollux.backends.shim.generation import Generation, Member, Order
from pollux.backends.shim.liveness import Beats, ListeningClock
from pollux.backends.shim.store_server import StoreHost
from pollux.backends.shim.transition import (
    RESTART_EXIT_CODE,
    Action,
    Doubt,
    GiveUp,
    Join,
    Kill,
    Limits,
    Lost,
    SetKey,
    Started,
    Watch,
    settled_at,
)
from pollux.core.errors import BackendFailed

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
_WELL_ENDED = frozenset({0, 128 + signal.SIGTERM, RESTART_EXIT_CODE})
_CANNOT_HAND_OVER = "an agent of an older release in its replicas cannot hand its state over where nobody stays"


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
        tell: Callable[[Mapping[str, Any]], None],
        limits: Limits | None = None,
    ) -> None:
        self._generation = generation
        self._store = store
        self._tell = tell
        order = generation.order
        limits = limits or _limits(order.hang_seconds)
        self._regroup = settled_at(order.generation, [member.number for member in generation.members], limits)
        self._beats = Beats(order.hang_seconds, self._regroup.limits.regroup)
        self._beats.unheard.update(member.number for member in generation.members)
        self._hung: dict[int, str] = {}
        self._pending: Order | None = None
        self._follows = False
        self._follow_by: float | None = None
        # Where all of it stood still meanwhile, nobody was silent, or late.
        self._clock = ListeningClock(time.monotonic)
        self._began_at, self._launched_at = self._clock(), time.monotonic()
        self._committed_at, self._steps = 0.0, dict[int, int]()
        self._through = False
        self._refusal = ""
        # Whether an agent knows how to hand over where nobody stays, by number: older releases do not.
        self._hands_over: dict[int, bool] = {}
        # Who is who in every generation that replicas may believe to be in, by the rank there.
        self._numbers = {order.generation: self._by_rank()}
        self.lost: Mapping[str, Any] | None = None
        store.set("committed", str(order.generation))
        self._watch_beats()

    def _by_rank(self) -> dict[int, int]:
        return {rank: number for number, rank in self._regroup.ranks.items()}

    @property
    def is_moving(self) -> bool:
        """Whether a change is under way, or awaited, be it in vain since the job is through."""
        return self._regroup.is_moving or self._pending is not None or self._regroup.phase == "over"

    @property
    def _is_through(self) -> bool:
        """Whether the job is through, and only its script goes on."""
        return self._through or self._beats.is_finished()

    @property
    def look_again_at(self) -> float | None:
        """When `look` must be called next, on the monotonic clock."""
        times = [at for at in (self._regroup.due, self._beats.due, self._follow_by) if at is not None]
        return self._clock.at(min(times)) if times else None

    def resize(self, order: Order) -> None:
        """Carry an order out; one that comes while another is under way waits, one that comes too late ends there."""
        if self._generation.is_ending or self._regroup.phase == "over":
            self._generation.renumber(order.generation)
        elif self._store.pid is None:
            self._refuse(order, "the process that hosts its store has ended")
        elif self._refusal:
            self._refuse(order, self._refusal)
        elif not self._follows or not self._regroup.takes_orders or self._is_through:
            self._wait_with(order)
            if not self._follows:
                self._wait_for_words()
        elif (can := self._can_follow(order)) is None:
            self._wait_with(order)
            self._wait_for_words()
        elif not can:
            self._refuse(order, _CANNOT_HAND_OVER)
        else:
            self.lost, self._follow_by = None, None
            change = self._generation.seat(order, self._regroup.ranks)
            self._numbers[change.generation] = {rank: seat.number for rank, seat in enumerate(change.seats)}
            for number in change.joiners.values():
                self._beats.renew(number)
                self._hands_over.pop(number, None)
            self._do(self._regroup.begin(change, self._clock()))
            self._watch_beats()

    def _wait_with(self, order: Order) -> None:
        """Note it at once: whoever asks later, a new service say, must learn that this order was taken."""
        if order.generation != self._generation.order.generation:
            self._generation.renumber(order.generation)
        self._pending = order

    def _wait_for_words(self) -> None:
        if self._follow_by is None:
            now = self._clock()
            self._follow_by = max(now + _PATIENCE_SECONDS, self._began_at + _START_TIMES * self._beats.hang_seconds)

    def _can_follow(self, order: Order) -> bool | None:
        """Whether somebody stays, or all that hold the state say that they hand it over; None: not all have spoken."""
        ranks = self._regroup.ranks
        holders = [member for member in self._generation.members if member.code is None and member.number in ranks]
        if any(member.place in order.places for member in holders):
            return True
        said = [self._hands_over.get(member.number) for member in holders]
        return False if False in said else None if None in said else True

    def _refuse(self, order: Order, why: str) -> None:
        self._generation.renumber(order.generation)
        self._do([GiveUp(f"it cannot change while it runs: {why}")])

    def found(self, key: str, value: Any) -> None:
        """A key of the store that was looked for."""
        what, _, rest = key.partition("/")
        if what == "beat":
            self._heard(rest, value)
        elif what == "ready" and not self._can_join(rest, value):
            self._do(self._regroup.give_up("it cannot change while it runs: a replica of an older release that comes "
                                           "cannot receive the state where nobody stays"))  # fmt: skip
        else:
            self._do(self._regroup.seen(key, value, self._clock()))

    def _number_at(self, where: str) -> int | None:
        generation, _, rank = where.partition("/")
        return self._numbers.get(int(generation), {}).get(int(rank))

    def _can_join(self, where: str, value: Any) -> bool:
        """Whether one that is ready can do its part; what it says then it says of changes to come, too."""
        number, change = self._number_at(where), self._regroup.change
        says_so = isinstance(value, Mapping) and bool(value.get("hands_over"))
        if number is not None:
            self._hands_over[number] = says_so
        return says_so or self._regroup.phase != "prepare" or change is None or not change.senders

    def _heard(self, where: str, value: Any) -> None:
        number = self._number_at(where)
        if number is None or not isinstance(value, Mapping):
            return
        was_through, self._refusal = self._is_through, str(value.get("refusal") or "")
        alarms = self._beats.false_alarms
        self._beats.heard(number, value, self._clock())
        if self._beats.false_alarms > alarms:
            rank = self._regroup.ranks.get(number)
            text = f"replica {rank} gave a sign of life, having been given up as hung"
            self._tell({"event": "alarm", "text": text, "replica": rank, "at": time.time()})
        if self._beats.is_finished():
            self._generation.believe()
        was_known = number in self._hands_over
        self._hands_over[number] = bool(value.get("hands_over"))
        self._begin_to_follow()
        if self._is_through and self._regroup.phase in ("prepare", "move") and not self._got_state(number):
            self.over()
        elif not was_known or (was_through and not self._is_through):
            self._do([])

    def _got_state(self, number: int) -> bool:
        """Whether it joined where nobody stays: it can be through while those that sent it the state still wait."""
        change = self._regroup.change
        return change is not None and bool(change.senders) and number in change.joiners.values()

    def _begin_to_follow(self) -> None:
        if not self._follows:
            self._follows, self._follow_by = True, None
            # Who joins does what those that run did until their first word, beside them.
            limits, took = self._regroup.limits, time.monotonic() - self._launched_at
            self._regroup.limits = replace(limits, prepare=max(limits.prepare, _PREPARE_TIMES * took))
            self._watch_beats()
            self._do([])

    def store_ended(self) -> None:
        """The host of the store is gone: a change under way cannot come about."""
        if self._regroup.is_moving:
            self._do([*self._regroup.over(), GiveUp("the process that hosts the job's store has ended")])

    def ended(self, member: Member) -> bool:
        """A replica has ended; whether that is taken care of here."""
        code = member.code or 0
        self._beats.drop(member.number)
        self._hands_over.pop(member.number, None)
        alone = not self._follows or self._refusal or self._is_through
        if alone or (code < 0 and self._generation.lacks_memory):
            actions = None
        else:
            actions = self._regroup.ended(member.number, code, self._clock(), self._hung.pop(member.number, ""))
        if actions is None:
            self.died_at_the_end([member])
            # Replicas are through together.
            self._through = self._through or code == 0
            if code != 0 or self._regroup.phase == "prepare":
                self.over()
            return False
        if not any(isinstance(action, GiveUp | Doubt) for action in actions):
            self._generation.depart(member)
        self._do(actions)
        return True

    def lost_with_node(self, members: Sequence[Member], why: str) -> bool:
        """These are gone together; whether that is taken care of here."""
        if not self._follows:
            self.over()
            return False
        # Nobody may count on one of them while the others' ends are told.
        self._regroup.dead.update(member.number for member in members if member.number in self._regroup.ranks)
        cared_for = True
        # An order that waits must not give their numbers to others before all of them have departed.
        pending, self._pending = self._pending, None
        for member in sorted(members, key=lambda member: member.number not in self._regroup.ranks):
            # A joiner may have gone with the change that an earlier one of them ended.
            if member in self._generation.members:
                self._hung[member.number] = why
                cared_for = self.ended(member) and cared_for
        if pending is not None and self._pending is None:
            self._pending = pending
            self._do([])
        return cared_for

    def died_at_the_end(self, members: Sequence[Member]) -> None:
        """These have ended while the job ends; what those left are to know of it."""
        dead = [member.number for member in members if (member.code or 0) not in _WELL_ENDED]
        if dead and self._follows and self._generation.is_ending:
            self._do(self._regroup.died_at_the_end(dead))

    def over(self) -> None:
        """The job ends: nothing changes any more."""
        if self._regroup.phase != "over":
            self._do(self._regroup.over())
        self._follow_by = None
        self._beats.keep(())
        self._store.watch("beats", (), _BEAT_SECONDS)

    def look(self) -> None:
        """Act on what is due: replicas that are hung, phases that take too long."""
        now = self._clock()
        if self._follow_by is not None and now >= self._follow_by:
            self._follow_by = None
            if self._pending is not None and not self._is_through:
                order, self._pending = self._pending, None
                why = _CANNOT_HAND_OVER if self._follows else "no agent in its replicas gives a sign of life"
                self._refuse(order, why)
        for number in self._beats.silent(now):
            rank = self._regroup.ranks.get(number)
            why = f"replica {rank} hung: {self._beats.words.pop(number)}"
            self._hung[number] = f"{why}; {self._beats.false_alarms} false alarms before"
            self._generation.kill(number)
        self._do(self._regroup.tick(now))
        if self._regroup.awaits_boundary and self._steps_by(now) > _MOST_STEPS:
            self._do(self._regroup.give_up(f"{_MOST_STEPS} steps went by, and no replica went to its new generation"))

    def _steps_by(self, now: float) -> int:
        """Steps that all have taken since everybody was told to go; 0 where that is not long ago."""
        steps = self._beats.steps()
        if now < self._committed_at + _LEAST_BOUNDARY_SECONDS:
            return 0
        return min((step - self._steps[number] for number, step in steps.items() if number in self._steps), default=0)

    def _watch_beats(self) -> None:
        keys = [f"beat/{generation}/{rank}" for generation, ranks in self._numbers.items() for rank in sorted(ranks)]
        self._store.watch("beats", keys, _BEAT_SECONDS if self._follows else _FIRST_BEAT_SECONDS, repeat=True)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SetKey(key, value):
                    self._store.set(key, value)
                    if key == "committed":
                        steps = self._beats.steps()
                        self._committed_at = self._clock()
                        # Those that join take none.
                        self._steps = {number: step for number, step in steps.items() if number in self._regroup.ranks}
                case Watch(keys):
                    self._store.watch("change", keys, _POLL_SECONDS)
                case Kill(number):
                    self._kill(number)
                case Lost():
                    self._say_lost(action)
                case Started():
                    self._say_started(action)
                case GiveUp(why):
                    self._regroup.phase = "over"
                    self._generation.give_up(why)
                case Doubt(number, why):
                    self._generation.doubt(number, why)
                case Join(rank, number):
                    try:
                        self._generation.join(rank, number)
                    except (OSError, BackendFailed) as error:
                        self._do(self._regroup.cannot_join(rank, str(error)))
                        break
        if self._pending is not None and self._follows and self._regroup.takes_orders and not self._is_through:
            order, self._pending = self._pending, None
            self.resize(order)

    def _kill(self, number: int) -> None:
        self._generation.kill(number)
        for member in [*self._generation.members]:
            # Who joins was never part of the job; who leaves is until it is gone.
            if member.number == number and number not in self._regroup.ranks:
                self._generation.depart(member)

    def _say_lost(self, lost: Lost) -> None:
        kept = [member for member in self._generation.members if member.number in lost.kept]
        self.lost = {
            "event": "lost",
            "at": time.time(),
            "generation": lost.generation,
            "replicas": list(lost.ranks),
            "kept": [member.place for member in sorted(kept, key=lambda member: lost.kept.index(member.number))],
            "why": lost.why,
            "withdrawn": lost.withdrawn,
        }
        self._tell(self.lost)

    def _say_started(self, started: Started) -> None:
        self._generation.settle(self._regroup.ranks)
        self._numbers = {self._regroup.settled: self._by_rank()}
        self._beats.settle(self._regroup.ranks, self._clock())
        self._watch_beats()
        first = started.pauses.get(0)
        self._tell(
            {
                "event": "started",
                "generation": started.generation,
                "at": time.time(),
                "places": list(self._generation.order.places),
                "pause": first if isinstance(first, Mapping) else None,
            }
        )
