"""A generation whose replicas may change while they run: the state machine of `transition` put to work.

Its actions become processes, keys of the job's store, and words to whoever is connected to the shim.
"""

from __future__ import annotations

import enum
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
from pollux.backends.shim.generation import Generation
from pollux.backends.shim.liveness import CommitWatch, ListeningClock, LivenessTracker
from pollux.backends.shim.phases import Limits
from pollux.backends.shim.replica_group import RunningReplica
from pollux.backends.shim.store.server import StoreHost
from pollux.backends.shim.transition import settled_at
from pollux.core.errors import BackendFailed
from pollux.wire.live import exit_codes, keys
from pollux.wire.live.codec import MalformedValue
from pollux.wire.live.heartbeat import Heartbeat, PauseReport, UnsupportedVersion
from pollux.wire.live.messages import AlarmMessage, LaunchOrder, LostMessage, ShimMessage, StartedMessage

__all__ = ["LiveGeneration", "Readiness"]

_POLL_SECONDS = 0.02
_BEAT_SECONDS = 1.0
_FIRST_BEAT_SECONDS = 0.1
# An agent tells that it is there as soon as it is built; without one nobody would follow an order. To import, and to
# build a model, may take so many times the silence that is allowed later.
_START_TIMES = 2.0
_PATIENCE_SECONDS = 5.0
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


class Readiness(enum.Enum):
    """Whether the replicas can carry out an order to change, by what the agents in them have said.

    `UNHEARD`: no agent has given a sign of life; an order waits for one, and is refused after a while. `READY`: they
    can. `UNABLE`: an agent has said why they cannot; an order is refused. `FINISHED`: the job is through, and only its
    script goes on; an order waits until the generation ends. Replicas that are ready survive the loss of others; in the
    other cases the job ends with it.
    """

    UNHEARD = enum.auto()
    READY = enum.auto()
    UNABLE = enum.auto()
    FINISHED = enum.auto()


class LiveGeneration:
    """Follows one generation, and those that come of it. `lost` is what was told of a loss and not answered yet.

    `pause` is what the last change that came about took.
    """

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
        self._was_heard = False
        # When an order that waits for a first word is refused.
        self._refuse_at: float | None = None
        # Where all of it stood still meanwhile, nobody was silent, or late.
        self._clock = ListeningClock(time.monotonic)
        self._began_at, self._launched_at = self._clock(), time.monotonic()
        self._commit_watch = CommitWatch()
        self._has_exited = False
        self._refusal = ""
        # Keys whose values were malformed: each is told of once.
        self._malformed: set[str] = set()
        # Who is who in every generation that replicas may believe to be in, by the rank there.
        self._numbers = {order.generation: self._by_rank()}
        self.lost: LostMessage | None = None
        self.pause: PauseReport | None = None
        store.set(keys.COMMITTED, str(order.generation))
        self._watch_beats()

    def _by_rank(self) -> dict[int, int]:
        return {rank: number for number, rank in self._transition.ranks.items()}

    @property
    def is_moving(self) -> bool:
        """Whether a change is under way, or awaited, be it in vain since the job is through."""
        return self._transition.is_moving or self._pending is not None or self._transition.phase == "over"

    @property
    def readiness(self) -> Readiness:
        """Whether the replicas can carry out an order now."""
        # Replicas are through together: one that has exited well speaks for all.
        if self._has_exited or self._liveness.is_finished():
            return Readiness.FINISHED
        if not self._was_heard:
            return Readiness.UNHEARD
        return Readiness.UNABLE if self._refusal else Readiness.READY

    @property
    def due(self) -> float | None:
        """When `act_on_due` must be called next, on the monotonic clock."""
        times = [at for at in (self._transition.due, self._liveness.due, self._refuse_at) if at is not None]
        return self._clock.at(min(times)) if times else None

    def resize(self, order: LaunchOrder) -> None:
        """Carry an order out; one that comes while another is under way waits, one that comes too late ends there."""
        readiness = self.readiness
        if self._generation.is_ending or self._transition.phase == "over":
            self._generation.renumber(order.generation)
        elif self._store.pid is None:
            self._refuse(order, "the process that hosts its store has ended")
        elif readiness is Readiness.UNABLE:
            self._refuse(order, self._refusal)
        elif readiness is Readiness.READY and self._transition.takes_orders:
            self._begin(order)
        else:
            self._keep_waiting(order)

    def _begin(self, order: LaunchOrder) -> None:
        self.lost, self._refuse_at = None, None
        change = self._generation.take_order(order, self._transition.ranks)
        self._numbers[change.generation] = {rank: seat.number for rank, seat in enumerate(change.seats)}
        for number in change.joiners.values():
            self._liveness.renew(number)
        self._carry_out(self._transition.begin_change(change, self._clock()))
        self._watch_beats()

    def _keep_waiting(self, order: LaunchOrder) -> None:
        """Note it at once: whoever asks later, a new service say, must learn that this order was taken."""
        if order.generation != self._generation.order.generation:
            self._generation.renumber(order.generation)
        self._pending = order
        if self.readiness is Readiness.UNHEARD and self._refuse_at is None:
            patience = self._clock() + _PATIENCE_SECONDS
            self._refuse_at = max(patience, self._began_at + _START_TIMES * self._liveness.hang_seconds)

    def _resume_pending(self) -> None:
        """Carry out the order that waits, once it can be."""
        can_answer = self.readiness in (Readiness.READY, Readiness.UNABLE)
        if self._pending is not None and can_answer and self._transition.takes_orders:
            order, self._pending = self._pending, None
            self.resize(order)

    def _refuse(self, order: LaunchOrder, why: str) -> None:
        self._generation.renumber(order.generation)
        self._carry_out(self._transition.give_up_generation(f"it cannot change while it runs: {why}"))

    def key_found(self, key: str, text: str) -> None:
        """A key of the store that was looked for; a value that says nothing is ignored, with one line."""
        parts = keys.parse(key)
        try:
            if parts is not None and parts.kind == keys.BEAT:
                self._hear_beat(self._numbers.get(parts.generation, {}).get(parts.rank or 0), text)
            else:
                self._carry_out(self._transition.key_found(key, text, self._clock()))
        except MalformedValue as error:
            if key not in self._malformed:
                self._malformed.add(key)
                print(f"the value of '{key}' is malformed, and is ignored: {error}", file=sys.stderr, flush=True)

    def _hear_beat(self, number: int | None, text: str) -> None:
        if number is None:
            return
        try:
            beat = Heartbeat.decode(text)
        except UnsupportedVersion as error:
            self._refusal = str(error)
            self._note_first_word()
            return
        was_finished = self.readiness is Readiness.FINISHED
        self._refusal = beat.refusal
        self._note_alive(number, beat)
        self._note_first_word()
        if self.readiness is not Readiness.FINISHED:
            if was_finished:
                self._resume_pending()
        elif self._transition.phase in ("prepare", "move") and not self._got_state(number):
            self.end_changes()

    def _note_alive(self, number: int, beat: Heartbeat) -> None:
        alarms = self._liveness.false_alarms
        self._liveness.heard(number, beat, self._clock())
        if self._liveness.false_alarms > alarms:
            rank = self._transition.ranks.get(number)
            text = f"replica {rank} gave a sign of life, having been given up as hung"
            self._tell(AlarmMessage(time.time(), text, rank))
        if self._liveness.is_finished():
            self._generation.believe_success()

    def _got_state(self, number: int) -> bool:
        """Whether it joined where nobody stays: it can be through while those that sent it the state still wait."""
        change = self._transition.change
        return change is not None and bool(change.senders) and number in change.joiners.values()

    def _note_first_word(self) -> None:
        """An agent has spoken: what waited for that goes on."""
        if self._was_heard:
            return
        self._was_heard, self._refuse_at = True, None
        # Who joins does what those that run did until their first word, beside them.
        limits, took = self._transition.limits, time.monotonic() - self._launched_at
        self._transition.limits = replace(limits, prepare=max(limits.prepare, _PREPARE_TIMES * took))
        self._watch_beats()
        self._resume_pending()

    def store_ended(self) -> None:
        """The host of the store is gone: a change under way cannot come about."""
        if self._transition.is_moving:
            self._carry_out(self._transition.give_up_generation("the process that hosts the job's store has ended"))

    def ended(self, member: RunningReplica) -> bool:
        """A replica has ended; whether that is taken care of here."""
        code = member.code or 0
        self._liveness.drop(member.number)
        actions = self._answer_to_end(member.number, code)
        if actions is None:
            self._end_with(member, code)
            return False
        if not any(isinstance(action, GiveUp | DoubtEnd) for action in actions):
            self._generation.dismiss(member)
        self._carry_out(actions)
        return True

    def _answer_to_end(self, number: int, code: int) -> list[Action] | None:
        """What the others are to do about it; None: nothing, the job ends with it, well or not."""
        if self.readiness is not Readiness.READY or (code < 0 and self._generation.lacks_memory):
            return None
        return self._transition.process_ended(number, code, self._clock(), self._hung.pop(number, ""))

    def _end_with(self, member: RunningReplica, code: int) -> None:
        """The job ends as this replica did."""
        self.died_at_the_end([member])
        self._has_exited = self._has_exited or code == 0
        if code != 0 or self._transition.phase == "prepare":
            self.end_changes()

    def lost_with_node(self, members: Sequence[RunningReplica], why: str) -> bool:
        """These are gone together; whether that is taken care of here."""
        if not self._was_heard:
            self.end_changes()
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
            self._resume_pending()
        return cared_for

    def died_at_the_end(self, members: Sequence[RunningReplica]) -> None:
        """These have ended while the job ends; what those left are to know of it."""
        dead = [member.number for member in members if (member.code or 0) not in _WELL_ENDED]
        if dead and self._was_heard and self._generation.is_ending:
            self._carry_out(self._transition.died_at_the_end(dead))

    def end_changes(self) -> None:
        """The job ends: nothing changes any more."""
        if self._transition.phase != "over":
            self._carry_out(self._transition.end_job())
        self._refuse_at = None
        self._liveness.keep(())
        self._store.watch("beats", (), _BEAT_SECONDS)

    def act_on_due(self) -> None:
        """Act on what is due: replicas that are hung, phases that take too long."""
        now = self._clock()
        if self._refuse_at is not None and now >= self._refuse_at:
            self._refuse_at = None
            if self._pending is not None and self.readiness is Readiness.UNHEARD:
                order, self._pending = self._pending, None
                self._refuse(order, "no agent in its replicas gives a sign of life")
        for number in self._liveness.silent(now):
            rank = self._transition.ranks.get(number)
            why = f"replica {rank} hung: {self._liveness.words.pop(number)}"
            self._hung[number] = f"{why}; {self._liveness.false_alarms} false alarms before"
            self._generation.kill(number)
        self._carry_out(self._transition.tick(now))
        why = self._commit_watch.why_ignored(self._liveness.steps(), now) if self._transition.awaits_boundary else ""
        if why:
            self._carry_out(self._transition.give_up_generation(why))

    def _watch_beats(self) -> None:
        watched = [keys.beat(generation, rank) for generation, ranks in self._numbers.items() for rank in sorted(ranks)]
        self._store.watch("beats", watched, _BEAT_SECONDS if self._was_heard else _FIRST_BEAT_SECONDS, repeat=True)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartJoiner):
                if not self._start_joiner(action):
                    break
            else:
                self._do(action)
        self._resume_pending()

    def _start_joiner(self, joiner: StartJoiner) -> bool:
        """Whether there is a process; where not, the change is given up."""
        try:
            self._generation.join(joiner.rank, joiner.number)
        except (OSError, BackendFailed) as error:
            self._carry_out(self._transition.cannot_join(joiner.rank, str(error)))
            return False
        return True

    def _do(self, action: SetKey | WatchKeys | KillReplica | ReportLoss | ReportStart | GiveUp | DoubtEnd) -> None:
        match action:
            case SetKey(key, text):
                self._set_key(key, text)
            case WatchKeys(watched):
                self._store.watch("change", watched, _POLL_SECONDS)
            case KillReplica(number):
                self._kill(number)
            case ReportLoss():
                self._report_loss(action)
            case ReportStart():
                self._report_start(action)
            case GiveUp(why):
                self._generation.end_for_restart(why)
            case DoubtEnd(number, why):
                self._generation.doubt_success(number, why)

    def _set_key(self, key: str, text: str) -> None:
        self._store.set(key, text)
        if key == keys.COMMITTED:
            # Joiners take no steps.
            steps, ranks = self._liveness.steps(), self._transition.ranks
            self._commit_watch.begin({number: step for number, step in steps.items() if number in ranks}, self._clock())

    def _kill(self, number: int) -> None:
        self._generation.kill(number)
        for member in [*self._generation.members]:
            # Who joins was never part of the job; who leaves is until it is gone.
            if member.number == number and number not in self._transition.ranks:
                self._generation.dismiss(member)

    def _report_loss(self, lost: ReportLoss) -> None:
        kept = [member for member in self._generation.members if member.number in lost.kept]
        kept.sort(key=lambda member: lost.kept.index(member.number))
        places = tuple(member.place for member in kept)
        self.lost = LostMessage(time.time(), lost.generation, lost.ranks, places, lost.why, lost.withdrawn)
        self._tell(self.lost)

    def _report_start(self, started: ReportStart) -> None:
        self._generation.adopt_ranks(self._transition.ranks)
        self._numbers = {self._transition.settled: self._by_rank()}
        self._liveness.settle(self._transition.ranks, self._clock())
        self._watch_beats()
        places = tuple(self._generation.order.places)
        self.pause = started.pauses.get(0)
        self._tell(StartedMessage(time.time(), started.generation, places, self.pause))
