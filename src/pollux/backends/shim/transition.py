"""How the replicas of a running job change: which keys are set, who is started and ended, and when it is given up.

Pure: what happened goes in, with the time; what is to be done comes out. Processes and the store are the shim's.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pollux.wire.live import exit_codes, keys
from pollux.wire.live.codec import decode, encode
from pollux.wire.live.heartbeat import PauseReport
from pollux.wire.live.plan import LOST, RESIZE, GenerationPlan, PlanDeadlines, PlanMember

__all__ = [
    "Action",
    "Change",
    "Doubt",
    "GiveUp",
    "Join",
    "Kill",
    "Limits",
    "Lost",
    "Phase",
    "Regroup",
    "Seat",
    "SetKey",
    "Started",
    "Watch",
    "settled_at",
]

# What a process does to itself is a crash of its job, unless it follows from the end of another: libraries abort then.
_OWN_SIGNALS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS}

Phase = Literal["settled", "prepare", "move", "lost", "withdrawn", "over"]
"""`settled`: nothing changes; `prepare`: joiners build; `move`: replicas go over; `lost`: those left wait for a plan;

`withdrawn`: the change was given up before anybody paused, and an order that says so is awaited; `over`: it ends."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: for joiners to be ready (`prepare`); until the first that stays is at the boundary; between two signs of
    the `move`; for leavers to end after it; for an `order` after a loss; for the others once one is `through`.

    `boundary` is as long as those that join wait for the script's own code between two steps, an evaluation say: where
    steps go by, their number decides. `move` is for the largest states; replicas that hang are known by their silence
    before. `order` gives a service that is away time to come back: by themselves, those left wait for 30 s. `regroup`
    and `transfer` are told to replicas, and so is how long the door may be waited at.
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
        """The longest that one who came first waits for the others: longer than anybody here waits for them."""
        return self.boundary + self.move


@dataclass(frozen=True, slots=True)
class Seat:
    """One replica of a new generation, its rank being its place in the list: `was` its rank before, None: it joins.

    `number` names its process as long as it lives.
    """

    number: int
    was: int | None


@dataclass(frozen=True, slots=True)
class Change:
    """An ordered change: the seats of the new generation, and the numbers of those that leave."""

    generation: int
    seats: tuple[Seat, ...]
    leavers: tuple[int, ...] = ()
    num_nodes: int = 1

    @property
    def joiners(self) -> dict[int, int]:
        """Rank and number of those that join."""
        return {rank: seat.number for rank, seat in enumerate(self.seats) if seat.was is None}

    @property
    def survivors(self) -> dict[int, int]:
        """Rank and number of those that stay."""
        return {rank: seat.number for rank, seat in enumerate(self.seats) if seat.was is not None}

    @property
    def senders(self) -> tuple[int, ...]:
        """Numbers of those that leave, where nobody stays: all of them hand the state over before they do."""
        return () if self.survivors else self.leavers


@dataclass(frozen=True, slots=True)
class SetKey:
    """Write a key of the job's store."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Watch:
    """Look for these keys from now on, and for no others of this kind."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Start the process of a joiner."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End a process at once; it holds nothing that is needed."""

    number: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Tell that these ranks of a generation will not be; `kept` are the numbers of those that can go on.

    `withdrawn`: they were all to join, and nobody else is gone, or has paused.
    """

    generation: int
    ranks: tuple[int, ...]
    kept: tuple[int, ...]
    why: str
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """Tell that all replicas of a generation have taken their first step; `pauses` is what they told of it, by rank."""

    generation: int
    pauses: Mapping[int, PauseReport]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End all processes, so that the job starts anew from its checkpoint."""

    why: str


@dataclass(frozen=True, slots=True)
class Doubt:
    """It ended with 0 while it held the state alone: the job counts as through only where that was said, too."""

    number: int
    why: str


Action = SetKey | Watch | Join | Kill | Lost | Started | GiveUp | Doubt
"""What is to be done."""


@dataclass(slots=True)
class Regroup:
    """The state of one job's replicas: `ranks` by number in the generation `settled`, the last one that all were in."""

    settled: int
    ranks: dict[int, int]
    limits: Limits = field(default_factory=Limits)
    phase: Phase = "settled"
    due: float | None = None
    change: Change | None = None
    dead: set[int] = field(default_factory=set)
    _lost: set[int] = field(default_factory=set)
    _through: bool = False
    _ready: set[int] = field(default_factory=set)
    _done: dict[int, PauseReport] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)
    _told: bool = False
    _came: bool = False
    _after_loss: bool = False
    _handed: bool = False
    _doubt: str = ""

    @property
    def awaits_boundary(self) -> bool:
        """Whether everybody is to go, and nobody of those that run has come."""
        return self.phase == "move" and not self._came

    @property
    def generation(self) -> int:
        """The newest one that was ordered."""
        return self.settled if self.change is None else self.change.generation

    @property
    def is_moving(self) -> bool:
        """Whether a change is under way, or awaited."""
        return self.phase in ("prepare", "move", "lost", "withdrawn")

    @property
    def takes_orders(self) -> bool:
        """Whether a change may begin now."""
        return self.phase in ("settled", "lost", "withdrawn")

    def begin(self, change: Change, now: float) -> list[Action]:
        """Carry a change out; the ranks in its seats are those of `settled`."""
        self._after_loss = self.phase == "lost"
        self.change, self._ready, self._done, self._gone = change, set(), {}, set()
        self._through = self._told = self._handed = False
        self._doubt = ""
        # Numbers of the dead are given anew.
        self.ranks = {number: rank for number, rank in self.ranks.items() if number not in self.dead}
        self.dead = set()
        generation = change.generation
        plan = GenerationPlan(
            generation,
            self.settled,
            tuple(PlanMember(rank, seat.was) for rank, seat in enumerate(change.seats)),
            change.num_nodes,
            LOST if self._after_loss else RESIZE,
            PlanDeadlines(self.limits.door, self.limits.regroup, self.limits.transfer),
            tuple(sorted(self.ranks[number] for number in change.senders)),
        )
        actions: list[Action] = [SetKey(keys.plan(generation), plan.encode())]
        if not change.joiners:
            return actions + self._commit(now)
        self.phase, self.due = "prepare", now + self.limits.prepare
        ready = [keys.ready(generation, rank) for rank in change.joiners]
        actions.append(Watch((*ready, keys.failed(generation))))
        return actions + [Join(rank, number) for rank, number in change.joiners.items()]

    def _commit(self, now: float) -> list[Action]:
        assert self.change is not None
        generation, size = self.change.generation, len(self.change.seats)
        self.phase, self.due, self._came, self._told = "move", now + self.limits.boundary, False, True
        present = [keys.here(generation, number) for number in range(size + len(self.change.senders))]
        done = [keys.done(generation, rank) for rank in range(size)]
        return [SetKey(keys.COMMITTED, str(generation)), Watch((*present, *done, keys.failed(generation)))]

    def seen(self, key: str, text: str, now: float) -> list[Action]:
        """A key that was watched for is there. `MalformedValue` where its value says nothing."""
        parts = keys.parse(key)
        if parts is None or self.phase not in ("prepare", "move") or parts.generation != self.generation:
            return []
        if parts.kind == keys.FAILED:
            return self.give_up(f"it cannot change while it runs: {text}")
        assert self.change is not None
        rank = -1 if parts.rank is None else parts.rank
        if parts.kind == keys.READY and self.phase == "prepare":
            self._ready.add(rank)
            return self._commit(now) if self._ready >= self.change.joiners.keys() else []
        if self.phase == "move" and self.due is not None and parts.kind in (keys.HERE, keys.DONE):
            if parts.kind == keys.HERE and rank in self.change.joiners and not self._came:
                # Who joins is at the door at once, however far away the others' boundary is.
                return []
            pause = decode(PauseReport, text) if parts.kind == keys.DONE else None
            self._came = True
            self.due = self.due if self._through else now + self.limits.move
            if pause is not None:
                self._done[rank] = pause
                return self._settle(now)
        return []

    def _settle(self, now: float) -> list[Action]:
        """Where everybody has taken the first step and who leaves is gone, that is the generation now."""
        change = self.change
        assert change is not None
        if len(self._done) < len(change.seats):
            return []
        if not self._gone >= set(change.leavers):
            self.due = now + self.limits.leave
            if not change.senders or self._handed:
                return []
            # From here on those that joined hold the state, and only they.
            self._handed = True
            return [SetKey(keys.handed(change.generation), "")]
        self.settled = change.generation
        self.ranks = {seat.number: rank for rank, seat in enumerate(change.seats)}
        self.dead, self._lost, self.change = set(), set(), None
        self.phase, self.due = "settled", None
        return [Watch(()), Started(self.settled, dict(self._done))]

    def ended(self, number: int, code: int, now: float, hung: str = "") -> list[Action] | None:
        """A process has ended, with an exit code or minus a signal's number; `hung` says why we ended it, if we did.

        None: its end is none of a change, and is to be judged as ever: a job that ends by itself, well or not.
        """
        change = self.change
        if change is not None and self.phase in ("prepare", "move") and number in change.joiners.values():
            return self._joiner_ended(number, code, now)
        if change is not None and number in change.leavers and self._may_leave and not self._holds_alone:
            return self._leaver_ended(number, now)
        if self.phase == "over":
            return None
        if number not in self.ranks:
            # A joiner of a change that was given up.
            return []
        if code == exit_codes.RESTART:
            return self.give_up(f"replica {self.ranks[number]} could not go on by itself")
        if code > 0 and self.phase == "lost":
            return self.give_up(f"replica {self.ranks[number]} did not outlive the loss of another: exit code {code}")
        if code == 0 and self.phase == "move" and change is not None and number in change.senders:
            return self._doubtful(number, now)
        if code == 0 and self.phase == "move" and not self._through:
            # Through with the job before it saw that it should move: who was to join waits for nobody.
            self._through, self.due = True, now + self.limits.through
        if code >= 0 or (-code in _OWN_SIGNALS and not hung and self.phase not in ("move", "lost")):
            return None
        if self.phase == "settled" and len(self.ranks) == 1 and not hung:
            return None
        self.dead.add(number)
        return self._lose(hung or f"replica {self.ranks[number]} was killed by signal {-code}", now)

    @property
    def _may_leave(self) -> bool:
        """Whether a leaver that ends does what it was told; before anybody is told it is through with the job."""
        if self.phase == "withdrawn":
            return self._told
        return self.phase in ("move", "lost") or (self.phase == "prepare" and self._after_loss)

    @property
    def _holds_alone(self) -> bool:
        """Whether those that leave hold the state still, which nobody else does."""
        return self.change is not None and bool(self.change.senders) and not self._handed

    def _leaver_ended(self, number: int, now: float) -> list[Action]:
        self._gone.add(number)
        if self.phase not in ("lost", "withdrawn"):
            if self.phase == "move" and not self._came:
                self._came, self.due = True, now + self.limits.move
            return self._settle(now) if self.phase == "move" else []
        self.dead.add(number)
        self._lost.add(self.ranks[number])
        return [SetKey(keys.lost(self.settled), encode(sorted(self._lost)))]

    def _doubtful(self, number: int, now: float) -> list[Action]:
        """Whether it was through, which it then said, or left with what nobody else has: that is known in a moment."""
        if not self._through:
            self._through, self.due = True, now + self.limits.through
        self._doubt = f"replica {self.ranks[number]} ended without handing over what it holds"
        return [Doubt(number, self._doubt)]

    def over(self) -> list[Action]:
        """The job ends, by itself or by order: no change any more, and joiners are not needed."""
        actions = self._drop_joiners("the job ends")
        self.phase, self.due = "over", None
        return [*actions, Watch(())]

    def died_at_the_end(self, numbers: Iterable[int]) -> list[Action]:
        """They were told to end and have died: those left must know which of them is the first, which saves."""
        found = {number for number in numbers if number in self.ranks}
        self.dead |= found
        self._lost |= {self.ranks[number] for number in found}
        return [SetKey(keys.lost(self.settled), encode(sorted(self._lost)))] if found else []

    def _joiner_ended(self, number: int, code: int, now: float) -> list[Action] | None:
        assert self.change is not None
        rank = next(rank for rank, other in self.change.joiners.items() if other == number)
        self.dead.add(number)
        if self.phase == "prepare":
            return self._withdraw(f"joining replica {rank} ended, exit code {code}, before it was ready")
        if code == 0:
            # Through with the job, which all then are.
            return None
        return self._lose(f"joining replica {rank} ended, exit code {code}", now)

    def cannot_join(self, rank: int, why: str) -> list[Action]:
        """The process of a joiner could not be started, and nobody has been told to go."""
        return self._withdraw(f"joining replica {rank} could not be started: {why}")

    def _drop_joiners(self, why: str, withdrawn: bool = False) -> list[Action]:
        """Joiners hold nothing yet that others do not; those of a withdrawn change must not come later."""
        if self.change is None or self.phase not in ("prepare", "move") or self._handed:
            return []
        actions: list[Action] = []
        if withdrawn or self.phase == "prepare":
            actions.append(SetKey(keys.withdrawn(self.change.generation), why))
        return actions + [Kill(number) for number in self.change.joiners.values() if number not in self.dead]

    def _withdraw(self, why: str) -> list[Action]:
        assert self.change is not None
        if self.change.senders:
            return self.give_up(why)
        actions = self._drop_joiners(why, withdrawn=True)
        kept = self._kept()
        self.phase, self.due = "withdrawn", None
        lost = tuple(self.change.joiners)
        return [*actions, Watch(()), Lost(self.change.generation, lost, kept, why, withdrawn=True)]

    def _kept(self) -> tuple[int, ...]:
        """Numbers of those that hold the state and are to stay, in the order of their ranks."""
        staying = self.ranks if self.change is None else self.change.survivors.values()
        return tuple(sorted(set(staying) - self.dead - self._gone, key=lambda number: self.ranks[number]))

    def _lose(self, why: str, now: float) -> list[Action]:
        """Some are dead: those left go on without them, once somebody has said where.

        Not on places that all were to leave, which others may be to have: then what holds the state saves it.
        """
        kept = self._kept()
        dead = {self.ranks[number] for number in self.dead if number in self.ranks}
        # Who has left is not there to save, either.
        self._lost |= dead | {self.ranks[number] for number in self._gone if number in self.ranks}
        if self.change is not None and self.change.senders:
            # Whoever is stuck with the dead is freed by this too.
            told = [SetKey(keys.lost(self.settled), encode(sorted(self._lost)))]
            told.append(SetKey(keys.lost(self.generation), encode(self._lacking(self.change))))
            return [*told, *self.give_up(why)]
        if not kept:
            # Those that were to leave are asked to end as well: the first of them must know that it is the first.
            told = [SetKey(keys.lost(self.settled), encode(sorted(self._lost)))]
            return [*told, *self.give_up(f"{why}, and no other is left")]
        actions = self._drop_joiners(why)
        actions.append(SetKey(keys.lost(self.settled), encode(sorted(self._lost))))
        if self.change is None:
            gone = tuple(sorted(dead))
        else:
            gone = tuple(rank for rank, seat in enumerate(self.change.seats) if seat.number not in kept)
            actions.append(SetKey(keys.lost(self.change.generation), encode(list(gone))))
        self.phase, self.due = "lost", now + self.limits.order
        return [*actions, Watch(()), Lost(self.generation, gone, kept, why)]

    def _lacking(self, change: Change) -> list[int]:
        """The dead by their number at the door of a change, where its senders come after those that join."""
        there = [*(seat.number for seat in change.seats), *sorted(change.senders, key=lambda each: self.ranks[each])]
        return [place for place, number in enumerate(there) if number in self.dead]

    def give_up(self, why: str) -> list[Action]:
        """Nothing comes of it: all end, and start anew from the checkpoint."""
        actions = self._drop_joiners(why)
        self.phase, self.due = "over", None
        return [*actions, Watch(()), GiveUp(why)]

    def tick(self, now: float) -> list[Action]:
        """What follows from the time, where it is `due`."""
        if self.due is None or now < self.due:
            return []
        self.due = None
        if self.phase == "prepare":
            assert self.change is not None
            late = sorted(self.change.joiners.keys() - self._ready)
            named = ", ".join(map(str, late))
            return self._withdraw(f"joining replicas {named} were not ready after {self.limits.prepare:g} s")
        if self.phase == "move":
            if self._doubt:
                return self.give_up(self._doubt)
            return self.over() if self._through else self._late(now)
        if self.phase == "lost":
            return self.give_up(f"nobody said within {self.limits.order:g} s how to go on after a loss")
        return []

    def _late(self, now: float) -> list[Action]:
        assert self.change is not None
        if not self._came and not self._after_loss:
            # All that run are well, and at something of their own, which must not be lost for a change.
            if self.change.joiners:
                return self._withdraw(f"no replica came to a step's end in {self.limits.boundary:g} s")
            self.due = now + self.limits.boundary
            return []
        missing = sorted(set(range(len(self.change.seats))) - self._done.keys())
        if missing:
            named = ", ".join(map(str, missing))
            return self.give_up(f"replicas {named} of generation {self.generation} did not come in time")
        # All that were to go on do: whoever still leaves has handed over.
        return [Kill(number) for number in self.change.leavers if number not in self._gone]


def settled_at(generation: int, numbers: Sequence[int], limits: Limits | None = None) -> Regroup:
    """The state after a start: these numbers, in the order of their ranks."""
    return Regroup(generation, {number: rank for rank, number in enumerate(numbers)}, limits or Limits())
