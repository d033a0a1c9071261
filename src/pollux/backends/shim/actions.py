"""A change of a running job's replicas, and the actions that carry it out.

`transition` decides which action is taken when; `live_generation` takes it.
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
    """One replica of a new generation. Its index in the list is its rank; `was` is its rank before, None for a joiner.

    `number` identifies its process as long as the process runs.
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
        """The rank of a replica in the new generation."""
        return next(rank for rank, seat in enumerate(self.seats) if seat.number == number)

    @property
    def survivors(self) -> dict[int, int]:
        """Rank and number of the replicas that stay."""
        return {rank: seat.number for rank, seat in enumerate(self.seats) if seat.was is not None}

    @property
    def senders(self) -> tuple[int, ...]:
        """Numbers of the leavers if no replica stays: they send the state to the joiners before they end."""
        return () if self.survivors else self.leavers


@dataclass(frozen=True, slots=True)
class SetKey:
    """Write a key of the job's store."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class WatchKeys:
    """Watch these keys, and no other keys of a change, from now on."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartJoiner:
    """Start the process of a joiner."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class KillReplica:
    """Kill a process at once; it has no state that is needed."""

    number: int


@dataclass(frozen=True, slots=True)
class ReportLoss:
    """Tell the service that these ranks of a generation are lost; `kept` are the numbers of replicas that can go on.

    `withdrawn`: all lost ranks were joiners, and no other replica has ended or paused.
    """

    generation: int
    ranks: tuple[int, ...]
    kept: tuple[int, ...]
    why: str
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class ReportStart:
    """Tell the service that all replicas of a generation have taken their first step; `pauses` by rank."""

    generation: int
    pauses: Mapping[int, PauseReport]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End all processes, so that the job restarts from its checkpoint."""

    why: str


@dataclass(frozen=True, slots=True)
class DoubtEnd:
    """Doubt the exit code 0 of a replica that had to send the state first: only a heartbeat shows that it finished."""

    number: int
    why: str


Action = SetKey | WatchKeys | StartJoiner | KillReplica | ReportLoss | ReportStart | GiveUp | DoubtEnd
"""One thing for the shim to do."""
