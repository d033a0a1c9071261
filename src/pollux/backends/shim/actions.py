"""What a change of a running job's replicas is made of: the change itself, and the actions that carry it out.

`transition` decides which action comes when; `live_generation` carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pollux.wire.live.heartbeat import PauseReport

__all__ = [
    "Action",
    "DoubtEnd",
    "GiveUp",
    "KillReplica",
    "ReplicaChange",
    "ReportLoss",
    "ReportStart",
    "Seat",
    "SetKey",
    "StartJoiner",
    "WatchKeys",
]


@dataclass(frozen=True, slots=True)
class Seat:
    """One replica of a new generation. Its place in the list is its rank; `was` is its rank before, None: it joins.

    `number` names its process as long as the process lives.
    """

    number: int
    was: int | None


@dataclass(frozen=True, slots=True)
class ReplicaChange:
    """An ordered change: the seats of the new generation, and the numbers of the replicas that leave."""

    generation: int
    seats: tuple[Seat, ...]
    leavers: tuple[int, ...] = ()
    num_nodes: int = 1

    @property
    def joiners(self) -> dict[int, int]:
        """Rank and number of the replicas that join."""
        return {rank: seat.number for rank, seat in enumerate(self.seats) if seat.was is None}

    def rank_of(self, number: int) -> int:
        """The rank that a replica is to have."""
        return next(rank for rank, seat in enumerate(self.seats) if seat.number == number)

    @property
    def survivors(self) -> dict[int, int]:
        """Rank and number of the replicas that stay."""
        return {rank: seat.number for rank, seat in enumerate(self.seats) if seat.was is not None}

    @property
    def senders(self) -> tuple[int, ...]:
        """Numbers of the leavers, where no replica stays: they send the state to the joiners before they end."""
        return () if self.survivors else self.leavers


@dataclass(frozen=True, slots=True)
class SetKey:
    """Write a key of the job's store."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class WatchKeys:
    """From now on look for these keys, and for no other keys of a change."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartJoiner:
    """Start the process of a joiner."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class KillReplica:
    """Kill a process at once; it holds nothing that is needed."""

    number: int


@dataclass(frozen=True, slots=True)
class ReportLoss:
    """Tell the service that these ranks of a generation are lost; `kept` are the numbers of those that can go on.

    `withdrawn`: all of them were to join, no other replica is gone, and none has paused.
    """

    generation: int
    ranks: tuple[int, ...]
    kept: tuple[int, ...]
    why: str
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class ReportStart:
    """Tell the service that all replicas of a generation have taken their first step; `pauses` are theirs, by rank."""

    generation: int
    pauses: Mapping[int, PauseReport]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End all processes, so that the job starts again from its checkpoint."""

    why: str


@dataclass(frozen=True, slots=True)
class DoubtEnd:
    """A replica ended with 0 while only it and its peers held the state: the job is done only if it has said so."""

    number: int
    why: str


Action = SetKey | WatchKeys | StartJoiner | KillReplica | ReportLoss | ReportStart | GiveUp | DoubtEnd
"""What is to be done."""
