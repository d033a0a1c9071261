"""A generation whose replicas can join and leave while the job runs: feeds the state machine of `transition`.

It carries out the actions of the state machine: starts processes, writes keys of the job's store, tells the services.
In a live resize: after `backends.shim.process`, before `backends.shim.transition` (docs/design/0016).
"""

from __future__ import annotations

import enum
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
from pollux.backends.shim.generation_replicas import RunningReplica
from pollux.backends.shim.liveness import CommitWatch, ListeningClock, LivenessTracker
from pollux.backends.shim.phases import Limits
from pollux.backends.shim.store.server import StoreHost
from pollux.backends.shim.transition import settled_at
from pollux.backends.transport.error_stream import say
from pollux.core.errors import BackendFailed
from pollux.wire.live import exit_codes, keys
from pollux.wire.live.codec import MalformedValue
from pollux.wire.live.heartbeat import Heartbeat, PauseReport, UnsupportedVersion
from pollux.wire.live.messages import AlarmMessage, LaunchOrder, LostMessage, ShimMessage, StartedMessage

__all__ = ["LiveGeneration", "Readiness"]

_POLL_SECONDS = 0.02
_BEAT_SECONDS = 1.0
_FIRST_BEAT_SECONDS = 0.1
# Without an agent in the replicas nothing would follow an order. An agent sends its first heartbeat once the script has
# built it; imports and the model may take this many times the silence that is allowed later.
_START_TIMES = 2.0
_PATIENCE_SECONDS = 5.0
_LEAST_REGROUP_SECONDS = 5.0
_LEAST_ORDER_SECONDS = 5.0
_PREPARE_TIMES = 3.0
_WELL_ENDED = frozenset({0, exit_codes.STOPPED, exit_codes.RESTART})


def _limits(hang_seconds: float) -> Limits:
    """The limits of a change where replicas may be silent this long: they are silent while they wait for others."""
    usual = Limits()
    regroup = min(usual.regroup, max(_LEAST_REGROUP_SECONDS, hang_seconds))
    return replace(usual, regroup=regroup, order=min(usual.order, max(_LEAST_ORDER_SECONDS, hang_seconds)))


class Readiness(enum.Enum):
    """Whether the replicas can carry out an order to change, judged by the heartbeats of their agents.

    `UNHEARD`: no agent has sent a heartbeat; an order waits for one, and is refused after a while. `READY`: they can.
    `UNABLE`: an agent has said why they cannot; an order is refused. `FINISHED`: training has finished, and only the
    script goes on; an order waits until the generation ends. Only replicas that are ready survive the loss of others;
    in the other cases a loss ends the job.
    """

    UNHEARD = enum.auto()
    READY = enum.auto()
    UNABLE = enum.auto()
    FINISHED = enum.auto()


class LiveGeneration:
    """Follows one generation and its live resizes.

    `lost`: the loss that was reported and not answered yet. `pause`: how long the last completed change took.
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
        # When an order that waits for a first heartbeat is refused.
        self._refuse_at: float | None = None
        # The clock stops while the machine or the whole job stands still: no replica is silent, or late, then.
        self._clock = ListeningClock(time.monotonic)
        self._began_at, self._launched_at = self._clock(), time.monotonic()
        self._commit_watch = CommitWatch()
        self._has_exited = False
        self._refusal = ""
        # Keys whose values were malformed: each is logged once.
        self._malformed: set[str] = set()
        # Numbers by rank, for each generation that a replica may take for the current one.
        self._numbers = {order.generation: self._by_rank()}
        self.lost: LostMessage | None = None
        self.pause: PauseReport | None = None
        store.set(keys.COMMITTED, str(order.generation))
        self._watch_beats()

    def _by_rank(self) -> dict[int, int]:
        return {rank: number for number, rank in self._transition.ranks.items()}

    @property
    def is_moving(self) -> bool:
        """Whether a change is under way or waits, even if the job has finished and the change will not happen."""
        return self._transition.is_moving or self._pending is not None or self._transition.phase == "over"

    @property
    def readiness(self) -> Readiness:
        """Whether the replicas can carry out an order now."""
        # Replicas finish together: one that has exited with 0 speaks for all.
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
        """Carry out an order, or let it wait while another is under way; orders during the job's end have no effect."""
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
        """Keep an order, and record its generation at once: a new service must learn that the order was accepted."""
        if order.generation != self._generation.order.generation:
            self._generation.renumber(order.generation)
        self._pending = order
        if self.readiness is Readiness.UNHEARD and self._refuse_at is None:
            patience = self._clock() + _PATIENCE_SECONDS
            self._refuse_at = max(patience, self._began_at + _START_TIMES * self._liveness.hang_seconds)

    def _resume_pending(self) -> None:
        """Carry out the order that waits, if that is possible now."""
        can_answer = self.readiness in (Readiness.READY, Readiness.UNABLE)
        if self._pending is not None and can_answer and self._transition.takes_orders:
            order, self._pending = self._pending, None
            self.resize(order)

    def _refuse(self, order: LaunchOrder, why: str) -> None:
        self._generation.renumber(order.generation)
        self._carry_out(self._transition.give_up_generation(f"it cannot change while it runs: {why}"))

    def key_found(self, key: str, text: str) -> None:
        """Handle a watched key of the store; a malformed value is ignored, with one line on the error stream."""
        parts = keys.parse(key)
        try:
            if parts is not None and parts.kind == keys.BEAT:
                self._hear_beat(self._numbers.get(parts.generation, {}).get(parts.rank or 0), text)
            else:
                self._carry_out(self._transition.key_found(key, text, self._clock()))
        except MalformedValue as error:
            if key not in self._malformed:
                self._malformed.add(key)
                say(f"the value of '{key}' is malformed, and is ignored: {error}")

    def _hear_beat(self, number: int | None, text: str) -> None:
        if number is None:
            return
        try:
            beat = Heartbeat.decode(text)
        except UnsupportedVersion as error:
            self._refusal = str(error)
            self._note_first_beat()
            return
        was_finished = self.readiness is Readiness.FINISHED
        self._refusal = beat.refusal
        self._note_alive(number, beat)
        self._note_first_beat()
        if self.readiness is not Readiness.FINISHED:
            if was_finished:
                self._resume_pending()
        elif self._transition.phase in ("prepare", "move") and not self._got_state(number):
            self.end_changes()

    def _note_alive(self, number: int, beat: Heartbeat) -> None:
        alarms = self._liveness.false_alarms
        self._liveness.note_beat(number, beat, self._clock())
        if self._liveness.false_alarms > alarms:
            rank = self._transition.ranks.get(number)
            text = f"replica {rank} sent a heartbeat after it had been given up as hung"
            self._tell(AlarmMessage(time.time(), text, rank))
        if self._liveness.is_finished():
            self._generation.believe_success()

    def _got_state(self, number: int) -> bool:
        """Whether the replica joined a change in which no other stays: it may finish while the senders still wait."""
        change = self._transition.change
        return change is not None and bool(change.senders) and number in change.joiners.values()

    def _note_first_beat(self) -> None:
        """Carry out what waited for the first heartbeat of an agent."""
        if self._was_heard:
            return
        self._was_heard, self._refuse_at = True, None
        # A joiner needs as long for its start as the others did, or longer, as it shares the machine with them.
        limits, took = self._transition.limits, time.monotonic() - self._launched_at
        self._transition.limits = replace(limits, prepare=max(limits.prepare, _PREPARE_TIMES * took))
        self._watch_beats()
        self._resume_pending()

    def store_ended(self) -> None:
        """Give up a change that is under way: the process of the store has ended."""
        if self._transition.is_moving:
            self._carry_out(self._transition.give_up_generation("the process that hosts the job's store has ended"))

    def replica_ended(self, member: RunningReplica) -> bool:
        """Handle the end of a replica; whether the job goes on without it, or ends for a restart."""
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
        """The actions by which the others go on; None where the job ends with this replica."""
        if self.readiness is not Readiness.READY or (code < 0 and self._generation.lacks_memory):
            return None
        return self._transition.process_ended(number, code, self._clock(), self._hung.pop(number, ""))

    def _end_with(self, member: RunningReplica, code: int) -> None:
        """End changes where the job ends with this replica."""
        self.report_deaths([member])
        self._has_exited = self._has_exited or code == 0
        if code != 0 or self._transition.phase == "prepare":
            self.end_changes()

    def handle_node_loss(self, members: Sequence[RunningReplica], why: str) -> bool:
        """Handle replicas that were lost together with their node; whether the job goes on, or ends for a restart."""
        if not self._was_heard:
            self.end_changes()
            return False
        # All of them are dead before the first loss is reported, so that no plan contains one of them.
        self._transition.dead.update(member.number for member in members if member.number in self._transition.ranks)
        cared_for = True
        # An order that waits must not reuse their numbers before all of them have departed.
        pending, self._pending = self._pending, None
        for member in sorted(members, key=lambda member: member.number not in self._transition.ranks):
            # A joiner may have departed already, if the loss of another one withdrew its change.
            if member in self._generation.members:
                self._hung[member.number] = why
                cared_for = self.replica_ended(member) and cared_for
        if pending is not None and self._pending is None:
            self._pending = pending
            self._resume_pending()
        return cared_for

    def report_deaths(self, members: Sequence[RunningReplica]) -> None:
        """While the job ends, tell the remaining replicas which ones died."""
        dead = [member.number for member in members if (member.code or 0) not in _WELL_ENDED]
        if dead and self._was_heard and self._generation.is_ending:
            self._carry_out(self._transition.report_deaths(dead))

    def end_changes(self) -> None:
        """Make no more changes: the job ends."""
        if self._transition.phase != "over":
            self._carry_out(self._transition.end_job())
        self._refuse_at = None
        self._liveness.keep(())
        self._store.watch("beats", (), _BEAT_SECONDS)

    def act_on_due(self) -> None:
        """Do what is due: kill hung replicas, act on phases that take too long."""
        now = self._clock()
        if self._refuse_at is not None and now >= self._refuse_at:
            self._refuse_at = None
            if self._pending is not None and self.readiness is Readiness.UNHEARD:
                order, self._pending = self._pending, None
                self._refuse(order, "no agent in its replicas sends heartbeats")
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
        """Start the process of a joiner; where that fails, withdraw the change and return False."""
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
            # Only old replicas count: joiners take no steps.
            steps, ranks = self._liveness.steps(), self._transition.ranks
            self._commit_watch.begin({number: step for number, step in steps.items() if number in ranks}, self._clock())

    def _kill(self, number: int) -> None:
        self._generation.kill(number)
        for member in [*self._generation.members]:
            # A joiner was never part of the job; a leaver is part of it until it has ended.
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
