"""The phases of a change of a running job's replicas: one class for each phase handles events, and has a deadline.

Each method takes an event with its time, and returns actions. `transition` leads from phase to phase.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from pollux.backends.shim.actions import Action, DoubtEnd, KillReplica, ReplicaChange, SetKey
from pollux.wire.live import exit_codes, keys
from pollux.wire.live.codec import decode
from pollux.wire.live.heartbeat import PauseReport

__all__ = [
    "Attempt",
    "AwaitingOrder",
    "Limits",
    "Moving",
    "Over",
    "Phase",
    "PhaseName",
    "Preparing",
    "Replicas",
    "Settled",
    "Withdrawn",
]

# A process ended by one of these signals has crashed by itself, unless another ended before: libraries then abort.
_OWN_SIGNALS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS}

PhaseName = Literal["settled", "prepare", "move", "lost", "withdrawn", "over"]
"""The names of the phases; their classes describe them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that each part of a change may take.

    `prepare`: until all joiners are ready. `boundary`: until the first of the old replicas arrives at a step's end; its
    script may run an evaluation first. `move`: between two keys that replicas write during the move, enough for the
    largest states. `leave`: until leavers have ended after the move. `order`: until the service answers a loss;
    replicas wait 30 s for that. `through`: until all replicas have ended after the first has. `regroup` and `transfer`
    are sent to the replicas.
    """

    prepare: float = 180.0
    boundary: float = 600.0
    move: float = 240.0
    leave: float = 10.0
    order: float = 25.0
    through: float = 3.0
    regroup: float = 30.0
    transfer: float = 60.0

    @property
    def door(self) -> float:
        """How long the first replica to arrive waits for the others: longer than the shim does."""
        return self.boundary + self.move


@dataclass(slots=True)
class Attempt:
    """A change that has begun, until it is complete or another one begins.

    `after_loss`: the change answers a loss. `gone`: the leavers that have ended. `handed`: the joiners have taken a
    step, so the replicas that sent them the state may end.
    """

    change: ReplicaChange
    after_loss: bool
    gone: set[int] = field(default_factory=set)
    handed: bool = False

    @property
    def senders_hold_the_state(self) -> bool:
        """Whether only the leavers hold the state."""
        return bool(self.change.senders) and not self.handed

    def dead_by_number(self, dead: set[int], ranks: Mapping[int, int]) -> list[int]:
        """The dead replicas by their number in the change's process group, in which senders follow the members."""
        senders = sorted(self.change.senders, key=lambda number: ranks[number])
        there = [*(seat.number for seat in self.change.seats), *senders]
        return [place for place, number in enumerate(there) if number in dead]


class Replicas(Protocol):
    """The part of `Transition` that phases use: what they know of the replicas, and the transitions they ask for."""

    ranks: dict[int, int]
    dead: set[int]
    limits: Limits

    def commit_change(self, attempt: Attempt, now: float) -> list[Action]:
        """Tell all replicas to move to the new generation: all joiners are ready."""

    def complete_change(self, change: ReplicaChange, pauses: Mapping[int, PauseReport]) -> list[Action]:
        """Note that the change is complete."""

    def withdraw_change(self, why: str) -> list[Action]:
        """Give up a change for which no replica has paused."""

    def leave_dead_behind(self, why: str, now: float) -> list[Action]:
        """Let the other replicas go on without the dead ones."""

    def note_early_leaver(self, attempt: Attempt, number: int) -> list[Action]:
        """Note that a leaver has ended although its change was not completed."""

    def give_up_generation(self, why: str) -> list[Action]:
        """End the generation: it cannot go on."""

    def end_job(self) -> list[Action]:
        """Make no more changes: the job ends."""


class Phase:
    """Handles the events of one phase. By default only the end of a replica matters: it is a loss, or ends the job."""

    name: ClassVar[PhaseName]

    def __init__(self, machine: Replicas, due: float | None = None) -> None:
        self.machine = machine
        self.due = due

    def key_found(self, kind: str, rank: int, text: str, now: float) -> list[Action]:
        """Handle a key of the change that a replica has written."""
        return []

    def tick(self, now: float) -> list[Action]:
        """Act on the deadline `due`, which has passed."""
        return []

    def process_ended(self, number: int, code: int, now: float, hung: str) -> list[Action] | None:
        """See `Transition.process_ended`."""
        machine = self.machine
        if number not in machine.ranks:
            # A joiner of a change that was withdrawn.
            return []
        rank = machine.ranks[number]
        if code == exit_codes.RESTART:
            return machine.give_up_generation(f"replica {rank} could not go on by itself")
        if code >= 0:
            return self.process_exited(number, code, now)
        if not self.is_loss(code, hung):
            return None
        machine.dead.add(number)
        return machine.leave_dead_behind(hung or f"replica {rank} was killed by signal {-code}", now)

    def process_exited(self, number: int, code: int, now: float) -> list[Action] | None:
        """Handle the end of a replica that exited by itself."""
        return None

    def is_loss(self, code: int, hung: str) -> bool:
        """Whether the end of a replica by a signal counts as a loss; otherwise the job has crashed."""
        return bool(hung) or -code not in _OWN_SIGNALS


class Settled(Phase):
    """No change is under way."""

    name = "settled"

    def is_loss(self, code: int, hung: str) -> bool:
        """See `Phase.is_loss`."""
        return bool(hung) or (len(self.machine.ranks) > 1 and -code not in _OWN_SIGNALS)


class Preparing(Phase):
    """Joiners are starting; the other replicas do not know of the change yet."""

    name = "prepare"

    def __init__(self, machine: Replicas, due: float, attempt: Attempt) -> None:
        super().__init__(machine, due)
        self.attempt = attempt
        self.ready: set[int] = set()

    def key_found(self, kind: str, rank: int, text: str, now: float) -> list[Action]:
        """See `Phase.key_found`."""
        if kind != keys.READY:
            return []
        self.ready.add(rank)
        are_ready = self.ready >= self.attempt.change.joiners.keys()
        return self.machine.commit_change(self.attempt, now) if are_ready else []

    def process_ended(self, number: int, code: int, now: float, hung: str) -> list[Action] | None:
        """See `Transition.process_ended`."""
        attempt, change = self.attempt, self.attempt.change
        if number in change.joiners.values():
            self.machine.dead.add(number)
            why = f"joining replica {change.rank_of(number)} ended, exit code {code}, before it was ready"
            return self.machine.withdraw_change(why)
        if number in change.leavers and attempt.after_loss and not attempt.senders_hold_the_state:
            # The change before this one told the leaver to end.
            attempt.gone.add(number)
            return []
        return super().process_ended(number, code, now, hung)

    def tick(self, now: float) -> list[Action]:
        """See `Phase.tick`."""
        late = ", ".join(map(str, sorted(self.attempt.change.joiners.keys() - self.ready)))
        limit = self.machine.limits.prepare
        return self.machine.withdraw_change(f"joining replicas {late} were not ready after {limit:g} s")


class Moving(Phase):
    """All replicas have been told to move to the new generation.

    `came`: one of the old replicas has arrived at the meeting point, or has ended. `through`: one has exited with 0
    instead, since the job is finished; `doubt` says why that may not be so.
    """

    name = "move"

    def __init__(self, machine: Replicas, due: float, attempt: Attempt) -> None:
        super().__init__(machine, due)
        self.attempt = attempt
        self.came = False
        self.through = False
        self.doubt = ""
        self.pauses: dict[int, PauseReport] = {}

    def key_found(self, kind: str, rank: int, text: str, now: float) -> list[Action]:
        """See `Phase.key_found`."""
        if self.due is None or kind not in (keys.HERE, keys.DONE):
            return []
        if kind == keys.HERE and rank in self.attempt.change.joiners and not self.came:
            # A joiner arrives at once, however long the step of the others takes.
            return []
        pause = decode(PauseReport, text) if kind == keys.DONE else None
        self.came = True
        self.due = self.due if self.through else now + self.machine.limits.move
        if pause is None:
            return []
        self.pauses[rank] = pause
        return self.complete_if_all_came(now)

    def complete_if_all_came(self, now: float) -> list[Action]:
        """Complete the change once all replicas have taken their first step and the leavers have ended."""
        attempt, change = self.attempt, self.attempt.change
        if len(self.pauses) < len(change.seats):
            return []
        if attempt.gone >= set(change.leavers):
            return self.machine.complete_change(change, self.pauses)
        self.due = now + self.machine.limits.leave
        if not attempt.senders_hold_the_state:
            return []
        # From here on only the joiners hold the state.
        attempt.handed = True
        return [SetKey(keys.handed(change.generation), "")]

    def process_ended(self, number: int, code: int, now: float, hung: str) -> list[Action] | None:
        """See `Transition.process_ended`."""
        attempt, change = self.attempt, self.attempt.change
        if number in change.joiners.values():
            self.machine.dead.add(number)
            if code == 0:
                # The job is finished, and so are all other replicas.
                return None
            return self.machine.leave_dead_behind(
                f"joining replica {change.rank_of(number)} ended, exit code {code}", now
            )
        if number in change.leavers and not attempt.senders_hold_the_state:
            attempt.gone.add(number)
            if not self.came:
                self.came, self.due = True, now + self.machine.limits.move
            return self.complete_if_all_came(now)
        return super().process_ended(number, code, now, hung)

    def process_exited(self, number: int, code: int, now: float) -> list[Action] | None:
        """See `Phase.process_exited`."""
        if code != 0:
            return None
        if not self.through:
            # The replica finished before it saw the change: joiners must not wait for it.
            self.through, self.due = True, now + self.machine.limits.through
        if number not in self.attempt.change.senders:
            return None
        # Either the job is finished, which a heartbeat then says, or the state is lost with this replica.
        self.doubt = f"replica {self.machine.ranks[number]} ended without handing over what it holds"
        return [DoubtEnd(number, self.doubt)]

    def is_loss(self, code: int, hung: str) -> bool:
        """See `Phase.is_loss`."""
        return True

    def tick(self, now: float) -> list[Action]:
        """See `Phase.tick`."""
        machine, change = self.machine, self.attempt.change
        if self.doubt:
            return machine.give_up_generation(self.doubt)
        if self.through:
            return machine.end_job()
        if not self.came and not self.attempt.after_loss:
            # The old replicas are healthy, and busy with code of their own: no work is lost for a change.
            if change.joiners:
                return machine.withdraw_change(f"no replica reached the end of a step in {machine.limits.boundary:g} s")
            self.due = now + machine.limits.boundary
            return []
        missing = ", ".join(map(str, sorted(set(range(len(change.seats))) - self.pauses.keys())))
        if missing:
            return machine.give_up_generation(
                f"replicas {missing} of generation {change.generation} did not arrive in time"
            )
        # All replicas of the new generation train: a leaver that still runs is not needed.
        return [KillReplica(number) for number in change.leavers if number not in self.attempt.gone]


class AwaitingOrder(Phase):
    """Some replicas are lost, and the others wait for an order to go on without them."""

    name = "lost"

    def __init__(self, machine: Replicas, due: float, attempt: Attempt | None) -> None:
        super().__init__(machine, due)
        self.attempt = attempt

    def process_ended(self, number: int, code: int, now: float, hung: str) -> list[Action] | None:
        """See `Transition.process_ended`."""
        if self.attempt is not None and number in self.attempt.change.leavers:
            return self.machine.note_early_leaver(self.attempt, number)
        return super().process_ended(number, code, now, hung)

    def process_exited(self, number: int, code: int, now: float) -> list[Action] | None:
        """See `Phase.process_exited`."""
        if code == 0:
            return None
        rank = self.machine.ranks[number]
        return self.machine.give_up_generation(f"replica {rank} did not survive the loss of another: exit code {code}")

    def is_loss(self, code: int, hung: str) -> bool:
        """See `Phase.is_loss`."""
        return True

    def tick(self, now: float) -> list[Action]:
        """See `Phase.tick`."""
        return self.machine.give_up_generation(
            f"the service did not say within {self.machine.limits.order:g} s how to go on after a loss"
        )


class Withdrawn(Phase):
    """A change was withdrawn before any replica paused: the replicas train on until the next order."""

    name = "withdrawn"

    def __init__(self, machine: Replicas, attempt: Attempt, was_committed: bool) -> None:
        super().__init__(machine)
        self.attempt = attempt
        self.was_committed = was_committed

    def process_ended(self, number: int, code: int, now: float, hung: str) -> list[Action] | None:
        """See `Transition.process_ended`."""
        if self.was_committed and number in self.attempt.change.leavers:
            return self.machine.note_early_leaver(self.attempt, number)
        return super().process_ended(number, code, now, hung)


class Over(Phase):
    """The job ends."""

    name = "over"

    def process_ended(self, number: int, code: int, now: float, hung: str) -> list[Action] | None:
        """See `Transition.process_ended`."""
        return None
