"""The jobs of a backend with shims: of each, the generation that has processes and the one that waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
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
    """One generation. `launch` is None for one found running; `sent`: its shim was told to start it.

    `stop_grace` is set once it was told to end, `stop_sent` is the last of it that the shim was told. `changes`: it is
    to come about in the living processes of the one before; while it does, `places` are those of both, `target` its
    own. `kept`: after a loss, the places of those that can go on. `waits_since`: a change has found no places then.
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
        """As the protocol names it."""
        if self.ended is not None:
            return "ended"
        if self.stop_grace is not None:
            return "stopping"
        return "running" if self.started else "waiting"

    @property
    def awaits_launch(self) -> bool:
        """Whether it has its slots, and its shim was not told to start it yet."""
        return self.launch is not None and not self.sent and self.ended is None

    @property
    def remaining(self) -> tuple[Slot, ...]:
        """The places of the replicas that can go on."""
        return self.places if self.kept is None else self.kept

    def begin_change(self, before: HeldGeneration, target: tuple[Slot, ...]) -> None:
        """It comes about in the processes of the one before, and is to have the places of `target`."""
        self.target, self.sent = target, True
        self.places = tuple(dict.fromkeys((*before.places, *target)))

    def ask_to_stop(self, grace_seconds: float) -> None:
        """End it; asked again, only the shorter grace counts."""
        grace = max(0.0, grace_seconds)
        self.stop_grace = grace if self.stop_grace is None else min(self.stop_grace, grace)


@dataclass(slots=True)
class DispatchedJob:
    """One job: `now` has, or had, processes; `next` waits until that has ended and its places are free."""

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
    def is_live(self) -> bool:
        """Whether what runs may change its replicas while it runs, and is not to end."""
        now = self.now
        return now is not None and now.live and now.ended is None and now.stop_grace is None

    @property
    def can_change(self) -> bool:
        """Whether the generation that runs can become another: it is live, and neither ending nor changing itself."""
        now = self.now
        if now is None or self.link is None or not self.is_live:
            return False
        return now.sent and (now.started or now.kept is not None)

    @property
    def awaits_change(self) -> bool:
        """Whether it runs, and waits for the places of a change."""
        return self.next is not None and self.next.changes and self.can_change

    @property
    def is_moving(self) -> bool:
        """Whether it is ending, starting or changing, and may leave places soon."""
        now = self.now
        if now is None or now.ended is not None or not now.sent:
            return False
        return now.stop_grace is not None or (not now.started and now.kept is None)

    def running(self) -> Running | None:
        """The newest generation, as `Backend.running` tells it; None for a job that was never given one."""
        held = self.next or self.now
        return None if held is None else Running(self.id, held.generation, held.state, held.ended)


class JobTable:
    """All jobs of a backend by id, and the slots that they hold; `tell` takes events. Used under the thread's lock."""

    def __init__(self, slots: SlotAllocator, tell: Callable[[BackendEvent], None]) -> None:
        self.jobs: dict[str, DispatchedJob] = {}
        self.slots = slots
        self.tell = tell

    def keep_slots(self, job: DispatchedJob) -> None:
        """Have the job hold what it uses, and nothing else."""
        now = job.now
        self.slots.release_except(job.id, () if now is None or now.ended is not None else now.places)

    def finish(self, job: DispatchedJob, ended: ReplicasEnded) -> None:
        """Note and tell the end of the generation that runs; what is another's, or was told before, does not matter."""
        held = job.now
        if held is None or held.ended is not None or held.generation != ended.generation:
            return
        held.ended = ended
        self.keep_slots(job)
        self.tell(ended)

    def end_unstarted(self, job: DispatchedJob, held: HeldGeneration, outcome: Outcome, detail: str) -> None:
        """An end without processes, which only this object knows of."""
        self.finish(job, ReplicasEnded(time.time(), job.id, held.generation, outcome, (), detail))

    def end_waiting(self, job: DispatchedJob, detail: str) -> HeldGeneration:
        """The generation that waits never begins: note and tell it."""
        waiting, job.next = job.next, None
        assert waiting is not None
        waiting.ended = ReplicasEnded(time.time(), job.id, waiting.generation, "stopped", (), detail)
        self.tell(waiting.ended)
        return waiting
