"""The commands that a driver executes; (job, generation) is the idempotent key."""

from __future__ import annotations

from dataclasses import dataclass

from pollux.core import Placement

__all__ = ["Command", "Decide", "ResizeJob", "StartJob", "StopJob"]


@dataclass(frozen=True, slots=True)
class Command:
    """Base class of all commands."""


@dataclass(frozen=True, slots=True)
class StartJob(Command):
    """Start a job that has no replicas."""

    job_id: str
    generation: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class ResizeJob(Command):
    """Move a running job from one placement to another, live or by restart."""

    job_id: str
    generation: int
    before: Placement
    placement: Placement


@dataclass(frozen=True, slots=True)
class StopJob(Command):
    """End a job's replicas of all generations below this one.

    `reason` is `preempted`, `paused`, `cancelled`, `node-lost`, `lost` (too few replicas are left), `refused` (the
    backend does not have its GPUs), `time-limit`, `failed` (no retries are left) or `finished` (it succeeded before a
    resize reached it).
    """

    job_id: str
    generation: int
    before: Placement
    reason: str


@dataclass(frozen=True, slots=True)
class Decide(Command):
    """Make a decision at this time, or at once if it is past; a later `Decide` replaces an earlier one."""

    at: float
