"""The phases of a change of a running job's replicas: one class for each says what may happen there, and how long.

Each method takes an event with its time, and returns what is to be done. `transition` leads from phase to phase.
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

# A process that one of these ends has crashed by itself, unless that follows from the end of another: libraries abort.
_OWN_SIGNALS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS}

PhaseName = Literal["settled", "prepare", "move", "lost", "withdrawn", "over"]
"""The phases; each is described by its class."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that each part of a change may take.

    `prepare`: until all joiners are ready. `boundary`: until the first replica that stays has come; it may be at code
    of its own between two steps, such as an evaluation. `move`: between two signs of the move, with the largest states
    in mind. `leave`: until leavers have ended after it. `order`: until the service says how to go on after a loss; by
    themselves, replicas wait for 30 s. `through`: until the others have ended once one replica has. `regroup` and
    `transfer` are told to replicas.
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
        """The longest that the first replica to come waits for the others: longer than the supervisor waits."""
        return self.boundary + self.move


@dataclass(slots=True)
class Attempt:
    """A change that was begun, until it has come about or another one begins.

    `after_loss`: it is the answer to a loss. `gone`: the leavers that have ended. `handed`: the joiners have stepped,
    so that the senders of the state may end.
    """

    change: ReplicaChange
    after_loss: bool
    gone: set[int] = field(default_factory=set)
    handed: bool = False

    @property
    def senders_hold_the_state(self) -> bool:
        """Whether the leavers hold the state, and nobody else does."""
        return bool(self.change.senders) and not self.handed

    def dead_by_number(self, dead: set[int], ranks: Mapping[int, int]) -> list[int]:
        """The dead among all that meet for the change, where senders are numbered after the members."""
        senders = sorted(self.change.senders, key=lambda number: ranks[number])
        there = [*(seat.number for seat in self.change.seats), *senders]
        return [place for place, number in enumerate(there) if number in dead]


class Replicas(Protocol):
    """What a phase knows of the state machine that it is in, and the transitions it may ask for: see `Transition`."""

    ranks: dict[int, int]
    dead: set[int]
    limits: Limits

    def commit_change(self, attempt: Attempt, now: float) -> list[Action]:
        """All joiners are ready: all replicas are to go."""

    def complete_change(self, change: ReplicaChange, pauses: Mapping[int, PauseReport]) -> list[Action]:
        """The change has come about."""

    def withdraw_change(self, why: str) -> list[Action]:
        """Give up a change for which no replica has paused."""

    def leave_dead_behind(self, why: str, now: float) -> list[Action]:
        """Some replicas are dead: the others go on without them."""

    def note_early_leaver(self, attempt: Attempt, number: int) -> list[Action]:
        """A leaver has ended though its change did not come about."""

    def give_up_generation(self, why: str) -> list[Action]:
        """The generation cannot go on."""

    def end_job(self) -> list[Action]:
        """The job ends."""


class Phase:
    """What may happen in one phase. By default only replicas end, which is a loss or is judged as ever."""

    name: ClassVar[PhaseName]

    def __init__(self, machine: Replicas, due: float | None = None) -> None:
        self.machine = machine
        self.due = due

    def key_found(self, kind: str, rank: int, text: str, now: float) -> list[Action]:
        """A key of the change is there."""
        return []

    def tick(self, now: float) -> list[Action]:
        """The time `due` has come."""
        return []

    def process_ended(self, number: int, code: int, now: float, hung: str) -> list[Action] | None:
        """See `Transition.process_ended`."""
        machine = self.machine
        if number not in machine.ranks:
            # A joiner of a change that was given up.
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
        """A replica has ended by itself."""
        return None

    def is_loss(self, code: int, hung: str) -> bool:
        """Whether a replica that a signal ended is lost to the others; if not, its job has crashed."""
        return bool(hung) or -code not in _OWN_SIGNALS


class Settled(Phase):
    """Nothing changes."""

    name = "settled"

    def is_loss(self, code: int, hung: str) -> bool:
        """See `Phase.is_loss`."""
        return bool(hung) or (len(self.machine.ranks) > 1 and -code not in _OWN_SIGNALS)


class Preparing(Phase):
    """Joiners are being built, and no other replica knows of the change."""

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
            # It was told to leave by the change before.
            attempt.gone.add(number)
            return []
        return super().process_ended(number, code, now, hung)

    def tick(self, now: float) -> list[Action]:
        """See `Phase.tick`."""
        late = ", ".join(map(str, sorted(self.attempt.change.joiners.keys() - self.ready)))
        limit = self.machine.limits.prepare
        return self.machine.withdraw_change(f"joining replicas {late} were not ready after {limit:g} s")


class Moving(Phase):
    """All replicas are told to go.

    `came`: a replica that stays or leaves has come, or has ended. `through`: one has ended with 0 instead, since the
    job was done; `doubt` says why that may not be so.
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
            # A joiner is at the door at once, however far away the others' boundary is.
            return []
        pause = decode(PauseReport, text) if kind == keys.DONE else None
        self.came = True
        self.due = self.due if self.through else now + self.machine.limits.move
        if pause is None:
            return []
        self.pauses[rank] = pause
        return self.complete_if_all_came(now)

    def complete_if_all_came(self, now: float) -> list[Action]:
        """Once all have taken the first step and the leavers have ended, the generation has come about."""
        attempt, change = self.attempt, self.attempt.change
        if len(self.pauses) < len(change.seats):
            return []
        if attempt.gone >= set(change.leavers):
            return self.machine.complete_change(change, self.pauses)
        self.due = now + self.machine.limits.leave
        if not attempt.senders_hold_the_state:
            return []
        # From here on the joiners hold the state, and only they.
        attempt.handed = True
        return [SetKey(keys.handed(change.generation), "")]

    def process_ended(self, number: int, code: int, now: float, hung: str) -> list[Action] | None:
        """See `Transition.process_ended`."""
        attempt, change = self.attempt, self.attempt.change
        if number in change.joiners.values():
            self.machine.dead.add(number)
            if code == 0:
                # The job is done, and so are all other replicas.
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
            # The replica was done before it saw the change: joiners must not wait for it.
            self.through, self.due = True, now + self.machine.limits.through
        if number not in self.attempt.change.senders:
            return None
        # Either the job is done, which a heartbeat then says, or the state went with this replica.
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
            # All that run are well, and at something of their own, which must not be lost for a change.
            if change.joiners:
                return machine.withdraw_change(f"no replica came to a step's end in {machine.limits.boundary:g} s")
            self.due = now + machine.limits.boundary
            return []
        missing = ", ".join(map(str, sorted(set(range(len(change.seats))) - self.pauses.keys())))
        if missing:
            return machine.give_up_generation(
                f"replicas {missing} of generation {change.generation} did not come in time"
            )
        # All that were to go on do so: a leaver that is still there is not needed.
        return [KillReplica(number) for number in change.leavers if number not in self.attempt.gone]


class AwaitingOrder(Phase):
    """Some replicas are lost, and the others wait for a plan without them."""

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
        return self.machine.give_up_generation(f"replica {rank} did not outlive the loss of another: exit code {code}")

    def is_loss(self, code: int, hung: str) -> bool:
        """See `Phase.is_loss`."""
        return True

    def tick(self, now: float) -> list[Action]:
        """See `Phase.tick`."""
        return self.machine.give_up_generation(
            f"nobody said within {self.machine.limits.order:g} s how to go on after a loss"
        )


class Withdrawn(Phase):
    """A change was given up before any replica paused, and an order is awaited; what runs goes on."""

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
