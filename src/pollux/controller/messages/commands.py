"""What the controller wants done. A driver executes them; (job, generation) is the idempotent key."""

from __future__ import annotations

from dataclasses import dataclass

from pollux.core import Placement

__all__ = ["Command", "Decide", "ResizeJob", "StartJob", "StopJob"]


@dataclass(frozen=True, slots=True)
class Command:
    """Root of all commands."""


@dataclass(frozen=True, slots=True)
class StartJob(Command):
    """Start replicas where there were none."""

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
    """End a job's replicas, all generations below this one.

    `reason` is `preempted`, `paused`, `cancelled`, `node-lost`, `lost` (too few replicas are left), `refused` (what it
    was given cannot be had), `time-limit`, `failed` (given up) or `finished` (it was through before it noticed that it
    had been placed anew).
    """

    job_id: str
    generation: int
    before: Placement
    reason: str


@dataclass(frozen=True, slots=True)
class Decide(Command):
    """Ask the policy at this time, or at once when it is past; a later `Decide` replaces an earlier one."""

    at: float
