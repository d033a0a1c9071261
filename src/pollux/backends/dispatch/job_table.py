"""The jobs of a backend with shims: the generation of each that has processes, and the one that waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pollux.backends.dispatch.shim_client import ShimClient
from pollux.backends.dispatch.slots import SlotAllocator
from pollux.backends.nodes.slot import Slot
from pollux.backends.protocol import (
    BackendEvent,
    Launch,
    Outcome,
    ReplicasEnded,
    Running,
)

__all__ = ["DispatchedJob", "HeldGeneration", "JobTable"]


@dataclass(slots=True)
class HeldGeneration:
    """One generation. `launch`: None for a generation found running. `sent`: its shim was told to start it.

    `stop_grace`: the grace once it was told to end; `stop_sent`: the last grace sent to the shim. `changes`: a live
    resize of the generation before starts it; during the resize `places` are the slots of both, `target` those
    of this one. `kept`: after a loss, the slots of the replicas that can go on. `waits_since`: since when its resize
    waits for slots.
    """

    generation: int
    launch: Launch | None = None
    places: tuple[Slot, ...] = ()
    order: int = 0
    started: bool = False
    sent: bool = False
    stop_grace: float | None = None
    stop_sent: float | None = None
    ended: ReplicasEnded | None = None
    attempts: int = 0
    changes: bool = False
    live: bool = False
    target: tuple[Slot, ...] = ()
    kept: tuple[Slot, ...] | None = None
    waits_since: float | None = None

    @property
    def state(self) -> Literal["waiting", "running", "stopping", "ended"]:
        """The state, as in `Running`."""
        if self.ended is not None:
            return "ended"
        if self.stop_grace is not None:
            return "stopping"
        return "running" if self.started else "waiting"

    @property
    def awaits_launch(self) -> bool:
        """Whether it has its slots, but its shim was not told to start it yet."""
        return self.launch is not None and not self.sent and self.ended is None

    @property
    def remaining(self) -> tuple[Slot, ...]:
        """The slots of the replicas that can go on."""
        return self.places if self.kept is None else self.kept

    def begin_change(self, before: HeldGeneration, target: tuple[Slot, ...]) -> None:
        """Start this generation by a live resize of the one `before`, to the slots of `target`."""
        self.target, self.sent = target, True
        self.places = tuple(dict.fromkeys((*before.places, *target)))

    def ask_to_stop(self, grace_seconds: float) -> None:
        """Note that it has to end within this grace; of several graces the shortest counts."""
        grace = max(0.0, grace_seconds)
        self.stop_grace = grace if self.stop_grace is None else min(self.stop_grace, grace)


@dataclass(slots=True)
class DispatchedJob:
    """One job. `now`: the generation that has, or had, processes; `next`: the one that waits to replace it."""

    id: str
    folder: Path
    newest: int = 0
    now: HeldGeneration | None = None
    next: HeldGeneration | None = None
    link: ShimClient | None = None
    to_forget: bool = False
    sweeping: bool = False

    @property
    def is_free(self) -> bool:
        """Whether the next generation need not wait for an earlier one."""
        return self.now is None or self.now.ended is not None

    @property
    def has_live_generation(self) -> bool:
        """Whether the running generation lets replicas join and leave, and was not told to end.

        The controller chooses between live resize and restart by another rule: `JobRecord.moves_live`.
        """
        now = self.now
        return now is not None and now.live and now.ended is None and now.stop_grace is None

    @property
    def can_change(self) -> bool:
        """Whether the running generation can be resized live now: it is neither ending nor being resized already."""
        now = self.now
        if now is None or self.link is None or not self.has_live_generation:
            return False
        return now.sent and (now.started or now.kept is not None)

    @property
    def awaits_change(self) -> bool:
        """Whether the job runs, and waits for the slots of a live resize."""
        return self.next is not None and self.next.changes and self.can_change

    @property
    def is_moving(self) -> bool:
        """Whether the job is ending, starting or being resized, and may free slots soon."""
        now = self.now
        if now is None or now.ended is not None or not now.sent:
            return False
        return now.stop_grace is not None or (not now.started and now.kept is None)

    def running(self) -> Running | None:
        """The newest generation, for `Backend.running`; None for a job that has none."""
        held = self.next or self.now
        return None if held is None else Running(self.id, held.generation, held.state, held.ended)


class JobTable:
    """All jobs of a backend by id, and the slots they hold; `report` takes events. Used under the thread's lock."""

    def __init__(self, slots: SlotAllocator, report: Callable[[BackendEvent], None]) -> None:
        self.jobs: dict[str, DispatchedJob] = {}
        self.slots = slots
        self.report = report

    def keep_slots(self, job: DispatchedJob) -> None:
        """Free all slots of the job but those of its running generation."""
        now = job.now
        self.slots.release_except(job.id, () if now is None or now.ended is not None else now.places)

    def finish(self, job: DispatchedJob, ended: ReplicasEnded) -> None:
        """Note and report the end of the running generation, once; the ends of other generations are ignored."""
        held = job.now
        if held is None or held.ended is not None or held.generation != ended.generation:
            return
        hint = "" if held.launch is None else self.slots.note_end(held.launch, held.places, ended.outcome)
        held.ended = ended = replace(ended, detail="; ".join(filter(None, (ended.detail, hint))))
        self.keep_slots(job)
        self.report(ended)

    def end_unstarted(self, job: DispatchedJob, held: HeldGeneration, outcome: Outcome, detail: str) -> None:
        """Note and report the end of a generation that never had processes."""
        self.finish(job, ReplicasEnded(time.time(), job.id, held.generation, outcome, (), detail))

    def end_waiting(self, job: DispatchedJob, detail: str) -> HeldGeneration:
        """Note and report that the waiting generation never starts; returns that generation."""
        waiting, job.next = job.next, None
        assert waiting is not None
        waiting.ended = ReplicasEnded(time.time(), job.id, waiting.generation, "stopped", (), detail)
        self.report(waiting.ended)
        return waiting
