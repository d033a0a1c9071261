"""The state machine of a running job's replicas: from one generation to the next, to a loss, or to the job's end.

Pure: events go in with their time, actions come out. `phases` has the phases; `live_generation` takes the actions.
In a live resize: after `backends.shim.live_generation`, before `agent.elastic.step_requests` (docs/design/0016).
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pollux.backends.shim.actions import (
    Action,
    GiveUp,
    KillReplica,
    ReplicaChange,
    ReportLoss,
    ReportStart,
    SetKey,
    StartJoiner,
    WatchKeys,
)
from pollux.backends.shim.phases import (
    Attempt,
    AwaitingOrder,
    Limits,
    Moving,
    Over,
    Phase,
    PhaseName,
    Preparing,
    Settled,
    Withdrawn,
)
from pollux.core.errors import IllegalTransition
from pollux.wire.live import keys
from pollux.wire.live.codec import encode
from pollux.wire.live.heartbeat import PauseReport
from pollux.wire.live.plan import LOST, RESIZE, GenerationPlan, PlanDeadlines, PlanMember

__all__ = ["Transition", "settled_at"]

_STORY_LINES = 30

_NEXT: Mapping[PhaseName, frozenset[PhaseName]] = {
    "settled": frozenset({"prepare", "move", "lost", "over"}),
    "prepare": frozenset({"move", "lost", "withdrawn", "over"}),
    "move": frozenset({"settled", "lost", "withdrawn", "over"}),
    "lost": frozenset({"prepare", "move", "lost", "over"}),
    "withdrawn": frozenset({"prepare", "move", "lost", "over"}),
    "over": frozenset({"over"}),
}


@dataclass(slots=True)
class Transition:
    """The replicas of one job. `settled`: the last generation that was complete; `ranks`: its ranks by number.

    `dead`: the numbers of the replicas that have died since then.
    """

    settled: int
    ranks: dict[int, int]
    limits: Limits = field(default_factory=Limits)
    dead: set[int] = field(default_factory=set)
    _lost: set[int] = field(default_factory=set)
    _attempt: Attempt | None = None
    _phase: Phase = field(init=False)
    _story: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=_STORY_LINES))

    def __post_init__(self) -> None:
        self._phase = Settled(self)

    @property
    def phase(self) -> PhaseName:
        """The present phase."""
        return self._phase.name

    @property
    def due(self) -> float | None:
        """When `tick` must be called; None: only when something happens."""
        return self._phase.due

    @property
    def change(self) -> ReplicaChange | None:
        """The change that is under way, or that was withdrawn last; None once one is complete."""
        return None if self._attempt is None else self._attempt.change

    @property
    def generation(self) -> int:
        """The newest generation that was ordered."""
        return self.settled if self.change is None else self.change.generation

    @property
    def awaits_boundary(self) -> bool:
        """Whether all replicas have been told to move, and none of the old ones has arrived."""
        return isinstance(self._phase, Moving) and not self._phase.came

    @property
    def is_moving(self) -> bool:
        """Whether a change is under way, or an order for one is awaited."""
        return self.phase in ("prepare", "move", "lost", "withdrawn")

    @property
    def takes_orders(self) -> bool:
        """Whether a change may begin now."""
        return self.phase in ("settled", "lost", "withdrawn")

    # Events

    def begin_change(self, change: ReplicaChange, now: float) -> list[Action]:
        """Begin a change; the ranks in its seats are those of the generation `settled`."""
        self._tell_story(f"order for generation {change.generation}")
        if not self.takes_orders:
            raise self._illegal("prepare")
        attempt = self._attempt = Attempt(change, after_loss=self.phase == "lost")
        # A new replica may have the number of a dead one.
        self.ranks = {number: rank for number, rank in self.ranks.items() if number not in self.dead}
        self.dead = set()
        plan = GenerationPlan(
            change.generation,
            self.settled,
            tuple(PlanMember(rank, seat.was) for rank, seat in enumerate(change.seats)),
            change.num_nodes,
            LOST if attempt.after_loss else RESIZE,
            PlanDeadlines(self.limits.door, self.limits.regroup, self.limits.transfer),
            tuple(sorted(self.ranks[number] for number in change.senders)),
        )
        proposed = SetKey(keys.plan(change.generation), plan.encode())
        if not change.joiners:
            return [proposed, *self.commit_change(attempt, now)]
        self._enter(Preparing(self, now + self.limits.prepare, attempt))
        ready = (keys.ready(change.generation, rank) for rank in change.joiners)
        watched = WatchKeys((*ready, keys.failed(change.generation)))
        return [proposed, watched, *(StartJoiner(rank, number) for rank, number in change.joiners.items())]

    def key_found(self, key: str, text: str, now: float) -> list[Action]:
        """Handle a watched key that was written; `MalformedValue` where its value cannot be read."""
        parts = keys.parse(key)
        if parts is None or self.phase not in ("prepare", "move") or parts.generation != self.generation:
            return []
        if parts.kind == keys.FAILED:
            return self.give_up_generation(f"it cannot change while it runs: {text}")
        return self._phase.key_found(parts.kind, parts.rank or 0, text, now)

    def process_ended(self, number: int, code: int, now: float, hung: str = "") -> list[Action] | None:
        """Handle the end of a process, by its exit code or minus a signal's number; `hung`: why we killed it, if so.

        None: the end has nothing to do with a change; the job ends with this replica.
        """
        self._tell_story(f"replica process {number} ended with {code}")
        return self._phase.process_ended(number, code, now, hung)

    def tick(self, now: float) -> list[Action]:
        """Act on the deadline of the phase, if it has passed."""
        if self.due is None or now < self.due:
            return []
        self._phase.due = None
        return self._phase.tick(now)

    def cannot_join(self, rank: int, why: str) -> list[Action]:
        """Withdraw the change: the process of a joiner could not be started."""
        return self.withdraw_change(f"joining replica {rank} could not be started: {why}")

    def end_job(self) -> list[Action]:
        """Make no more changes, and drop joiners: the job ends, by itself or by order."""
        actions = self._drop_joiners("the job ends")
        self._enter(Over(self))
        return [*actions, WatchKeys(())]

    def give_up_generation(self, why: str) -> list[Action]:
        """End all replicas, so that the job restarts from its checkpoint."""
        self._tell_story(f"given up: {why}")
        actions = self._drop_joiners(why)
        self._enter(Over(self))
        return [*actions, WatchKeys(()), GiveUp(why)]

    def report_deaths(self, numbers: Iterable[int]) -> list[Action]:
        """While the job ends, tell the others that these died: the first of the remaining replicas saves."""
        found = {number for number in numbers if number in self.ranks}
        self.dead |= found
        self._lost |= {self.ranks[number] for number in found}
        return [self._lost_key()] if found else []

    # Transitions that phases decide on

    def commit_change(self, attempt: Attempt, now: float) -> list[Action]:
        """Tell all replicas to move to the new generation: all joiners are ready."""
        change = attempt.change
        generation, size = change.generation, len(change.seats)
        self._enter(Moving(self, now + self.limits.boundary, attempt))
        present = (keys.here(generation, number) for number in range(size + len(change.senders)))
        done = (keys.done(generation, rank) for rank in range(size))
        return [SetKey(keys.COMMITTED, str(generation)), WatchKeys((*present, *done, keys.failed(generation)))]

    def complete_change(self, change: ReplicaChange, pauses: Mapping[int, PauseReport]) -> list[Action]:
        """Note that the change is complete."""
        self.settled = change.generation
        self.ranks = {seat.number: rank for rank, seat in enumerate(change.seats)}
        self.dead, self._lost, self._attempt = set(), set(), None
        self._enter(Settled(self))
        return [WatchKeys(()), ReportStart(self.settled, dict(pauses))]

    def withdraw_change(self, why: str) -> list[Action]:
        """Withdraw a change for which no replica has paused: the replicas train on, and wait for an order."""
        attempt, was_committed = self._attempt, self.phase == "move"
        assert attempt is not None
        if attempt.change.senders:
            return self.give_up_generation(why)
        actions = self._drop_joiners(why, withdrawn=True)
        kept = self._kept()
        self._enter(Withdrawn(self, attempt, was_committed))
        lost = tuple(attempt.change.joiners)
        return [*actions, WatchKeys(()), ReportLoss(attempt.change.generation, lost, kept, why, withdrawn=True)]

    def leave_dead_behind(self, why: str, now: float) -> list[Action]:
        """Let the other replicas go on without the dead ones, once the service has ordered a placement.

        If no replica was to stay, other jobs may need the places: then the living replicas save and end.
        """
        kept, attempt = self._kept(), self._attempt
        dead = {self.ranks[number] for number in self.dead if number in self.ranks}
        # A replica that has left cannot save either.
        gone = set() if attempt is None else attempt.gone
        self._lost |= dead | {self.ranks[number] for number in gone if number in self.ranks}
        if attempt is not None and attempt.change.senders:
            # This key frees a replica that waits for the dead ones during the move.
            stuck = keys.lost(attempt.change.generation)
            told = SetKey(stuck, encode(attempt.dead_by_number(self.dead, self.ranks)))
            return [self._lost_key(), told, *self.give_up_generation(why)]
        if not kept:
            # The leavers are asked to end as well: the first of them must know that it has to save.
            return [self._lost_key(), *self.give_up_generation(f"{why}, and no other is left")]
        actions = [*self._drop_joiners(why), self._lost_key()]
        ranks = tuple(sorted(dead))
        if attempt is not None:
            change = attempt.change
            ranks = tuple(rank for rank, seat in enumerate(change.seats) if seat.number not in kept)
            actions.append(SetKey(keys.lost(change.generation), encode(list(ranks))))
        self._enter(AwaitingOrder(self, now + self.limits.order, attempt))
        return [*actions, WatchKeys(()), ReportLoss(self.generation, ranks, kept, why)]

    def note_early_leaver(self, attempt: Attempt, number: int) -> list[Action]:
        """Note that a leaver has ended although its change was not completed: it cannot save."""
        attempt.gone.add(number)
        self.dead.add(number)
        self._lost.add(self.ranks[number])
        return [self._lost_key()]

    def _drop_joiners(self, why: str, withdrawn: bool = False) -> list[Action]:
        """Kill the joiners, which hold no state of their own; those of a withdrawn change must not arrive later."""
        attempt = self._attempt
        if attempt is None or self.phase not in ("prepare", "move") or attempt.handed:
            return []
        told = withdrawn or self.phase == "prepare"
        actions: list[Action] = [SetKey(keys.withdrawn(attempt.change.generation), why)] if told else []
        return actions + [KillReplica(number) for number in attempt.change.joiners.values() if number not in self.dead]

    def _kept(self) -> tuple[int, ...]:
        """Numbers of the living replicas that hold the state and stay, in the order of their ranks."""
        attempt = self._attempt
        staying = {*self.ranks} if attempt is None else {*attempt.change.survivors.values()} - attempt.gone
        return tuple(sorted(staying - self.dead, key=lambda number: self.ranks[number]))

    def _lost_key(self) -> SetKey:
        return SetKey(keys.lost(self.settled), encode(sorted(self._lost)))

    def _enter(self, phase: Phase) -> None:
        if phase.name not in _NEXT[self.phase]:
            raise self._illegal(phase.name)
        self._phase = phase
        self._tell_story(f"now {phase.name}")

    def _tell_story(self, line: str) -> None:
        self._story.append(line)

    def _illegal(self, phase: PhaseName) -> IllegalTransition:
        return IllegalTransition(
            f"the replicas of generation {self.generation} cannot go from '{self.phase}' to '{phase}'; what happened: "
            + "; ".join(self._story)
        )


def settled_at(generation: int, numbers: Sequence[int], limits: Limits | None = None) -> Transition:
    """The state machine after a start, with these numbers in the order of their ranks."""
    return Transition(generation, {number: rank for rank, number in enumerate(numbers)}, limits or Limits())
