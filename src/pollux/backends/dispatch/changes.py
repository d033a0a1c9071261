"""Carries out a live resize in the service: waits until the new slots are free, then sends the order to the shim.

`JobRecord.moves_live` chooses between live resize and restart, and `service.engine.executor` follows it. This module
has only the fallback: it restarts a job whose new slots stay busy, or are unusable while it must leave its own.
In a live resize: after `backends.dispatch.dispatcher`, before `backends.shim.process` (docs/design/0016).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pollux.backends.dispatch.job_table import DispatchedJob, HeldGeneration, JobTable
from pollux.backends.dispatch.site import Site
from pollux.backends.dispatch.worker_thread import WorkerThread
from pollux.backends.nodes.slot import Slot
from pollux.backends.protocol import Launch, ReplicasLost
from pollux.wire.live.messages import LaunchOrder, ResizeRequest

__all__ = ["JobChanges"]

# How long jobs wait for slots of one another; an engine may take seconds to hand slots over.
_DEADLOCK_SECONDS = 5.0
# How long a job waits for slots on other nodes while it holds its own: a quota may keep it from having both.
_LONGEST_WAIT_SECONDS = 300.0

_Slots = tuple[Slot, ...]


class JobChanges:
    """Sends the order for a live resize to the shims of jobs that wait for one; `order_of` makes the order."""

    def __init__(
        self, table: JobTable, thread: WorkerThread, site: Site, order_of: Callable[[Launch, _Slots], LaunchOrder]
    ) -> None:
        self._table, self._thread, self._site, self._order_of = table, thread, site, order_of

    def advance(self, job: DispatchedJob) -> None:
        """Send the order once there are slots for the joiners; refuse or restart where there will be none."""
        now, held = job.now, job.next
        assert now is not None
        assert held is not None
        assert held.launch is not None
        found = self._find_slots(job.id, held.launch, now, now.remaining)
        if found is not None:
            self._answer(job, now, held, *found)

    def _answer(self, job: DispatchedJob, now: HeldGeneration, held: HeldGeneration, why: str, target: _Slots) -> None:
        """Do what the slots of `target` allow, empty while they may still come; `why`: why some are not available."""
        kept = now.remaining
        stays = bool(set(target) & set(kept))
        if not target:
            self._end_deadlock(job, now, held, kept)
        elif stays and why and now.kept is None:
            self._refuse(job, why, target, kept)
        elif stays or not why:
            assert held.launch is not None
            assert job.link is not None
            held.begin_change(now, target)
            job.now, job.next = held, None
            job.link.send(ResizeRequest(self._order_of(held.launch, target)))
        else:
            # The job cannot have the new slots, and must leave the old ones.
            self._restart(now, held)

    def _find_slots(self, job_id: str, launch: Launch, now: HeldGeneration, kept: _Slots) -> tuple[str, _Slots] | None:
        """Why some slots of a resize are not available, and all its slots; none while they may still come.

        None: it is not known yet whether the slots can be used.
        """
        # Replicas that were to leave may still run.
        leaving = tuple(place for place in now.places if now.target and place not in now.target)
        target = self._table.slots.allocate(job_id, launch.placement, kept, (*kept, *leaving))
        return self.vet(launch, target, kept) if target else self._table.slots.refused(job_id, launch.placement, kept)

    def vet(self, launch: Launch, target: _Slots, kept: _Slots) -> tuple[str, _Slots] | None:
        """Why the new slots must not be used, and all slots, with the new ones then marked as gone.

        None: not known yet; the thread is woken once it is.
        """
        found = self._site.check(launch, [place for place in target if place not in kept])
        if found is None:
            return None
        if not found.why:
            return "", target
        return found.why, tuple(slot if slot in kept else slot.gone for slot in target)

    def _end_deadlock(self, job: DispatchedJob, now: HeldGeneration, held: HeldGeneration, kept: _Slots) -> None:
        """Restart a job that has waited for slots too long: jobs may wait for slots of one another for ever.

        Each of those is to leave some of its slots; a job that leaves none goes on, since its restart frees nothing for
        the others. A job that is to move may also wait for ever: on other nodes it gets nothing while it holds its own
        slots.
        """
        if held.waits_since is None:
            held.waits_since = time.monotonic()
            for seconds in (_DEADLOCK_SECONDS, _LONGEST_WAIT_SECONDS):
                self._thread.wake_after(seconds)
        assert held.launch is not None
        waited = time.monotonic() - held.waits_since
        here, there = dict(self._table.slots.placement(kept)), dict(held.launch.placement)
        leaves = any(count > there.get(node, 0) for node, count in here.items())
        is_long = waited >= _LONGEST_WAIT_SECONDS and not here.keys() & there.keys()
        if is_long or (leaves and waited >= _DEADLOCK_SECONDS and self._jobs_wait_for_each_other(job)):
            self._restart(now, held)

    def _jobs_wait_for_each_other(self, job: DispatchedJob) -> bool:
        """Whether other jobs wait for slots, too, and no job is about to free some."""
        jobs = self._table.jobs.values()
        return any(other.awaits_change for other in jobs if other is not job) and not any(j.is_moving for j in jobs)

    def _restart(self, now: HeldGeneration, held: HeldGeneration) -> None:
        """Have the running generation save and end; the next one then starts from the checkpoint."""
        assert held.launch is not None
        held.changes = False
        now.ask_to_stop(held.launch.grace_seconds)
        self._thread.wake()

    def _refuse(self, job: DispatchedJob, why: str, target: _Slots, kept: _Slots) -> None:
        """Report that there are no slots for the joiners; the running generation goes on, and hears nothing of it."""
        assert job.next is not None
        generation, job.next = job.next.generation, None
        self._table.keep_slots(job)
        lacking = tuple(rank for rank, place in enumerate(target) if place not in kept)
        remaining = self._table.slots.placement([place for place in target if place in kept])
        self._table.report(ReplicasLost(time.time(), job.id, generation, lacking, remaining, why, refused=True))
