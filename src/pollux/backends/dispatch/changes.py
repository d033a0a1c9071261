"""How a running job is brought to other slots: when there are slots for it, and what is done where there are none."""

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

# So long changes wait for places that nobody seems to leave; an engine may take seconds to hand some over.
_TANGLED_SECONDS = 5.0
# So long one waits for places elsewhere that nobody seems to give while it holds those that it has, by a quota say.
_LONGEST_WAIT_SECONDS = 300.0

_Slots = tuple[Slot, ...]


class JobChanges:
    """Sends orders to change to the shims of jobs that await one; `order_of` makes the order for slots."""

    def __init__(
        self, table: JobTable, thread: WorkerThread, site: Site, order_of: Callable[[Launch, _Slots], LaunchOrder]
    ) -> None:
        self._table, self._thread, self._site, self._order_of = table, thread, site, order_of

    def advance(self, job: DispatchedJob) -> None:
        """Send the order to change, once there are slots for those that join, or it is known that none will be."""
        now, held = job.now, job.next
        assert now is not None
        assert held is not None
        assert held.launch is not None
        found = self._find_slots(job.id, held.launch, now, now.remaining)
        if found is not None:
            self._answer(job, now, held, *found)

    def _answer(self, job: DispatchedJob, now: HeldGeneration, held: HeldGeneration, why: str, target: _Slots) -> None:
        """Do what these slots allow; `why` some of them will not be had, and none may come yet."""
        kept = now.remaining
        stays = bool(set(target) & set(kept))
        if not target:
            self._untangle(job, now, held, kept)
        elif stays and why and now.kept is None:
            self._refuse(job, why, target, kept)
        elif stays or not why:
            assert held.launch is not None
            assert job.link is not None
            held.begin_change(now, target)
            job.now, job.next = held, None
            job.link.send(ResizeRequest(self._order_of(held.launch, target)))
        else:
            # It cannot be there, and must not be here any more.
            self._restart(now, held)

    def _find_slots(self, job_id: str, launch: Launch, now: HeldGeneration, kept: _Slots) -> tuple[str, _Slots] | None:
        """The slots of a change, none where they may come yet; with why some of them will not be had.

        None: it is not known yet whether they can be used.
        """
        # Who was to leave may still be there.
        leaving = tuple(place for place in now.places if now.target and place not in now.target)
        target = self._table.slots.allocate(job_id, launch.placement, kept, (*kept, *leaving))
        return self.vet(launch, target, kept) if target else self._table.slots.refused(job_id, launch.placement, kept)

    def vet(self, launch: Launch, target: _Slots, kept: _Slots) -> tuple[str, _Slots] | None:
        """Why slots that were taken must not be used, and which are left then, as `SlotAllocator.refused` has it.

        None: not known yet, and the thread is woken once it is.
        """
        found = self._site.check(launch, [place for place in target if place not in kept])
        if found is None:
            return None
        if not found.why:
            return "", target
        return found.why, tuple(slot if slot in kept else slot.gone for slot in target)

    def _untangle(self, job: DispatchedJob, now: HeldGeneration, held: HeldGeneration, kept: _Slots) -> None:
        """JobChanges that wait for slots of one another would wait for ever: the first saves, ends and starts again.

        So does a job that is to go elsewhere, and to which nobody gives anything while it holds what it has.
        """
        if held.waits_since is None:
            held.waits_since = time.monotonic()
            for seconds in (_TANGLED_SECONDS, _LONGEST_WAIT_SECONDS):
                self._thread.wake_after(seconds)
        assert held.launch is not None
        waited = time.monotonic() - held.waits_since
        elsewhere = not dict(self._table.slots.placement(kept)).keys() & dict(held.launch.placement).keys()
        is_long = waited >= _LONGEST_WAIT_SECONDS and elsewhere
        if is_long or (waited >= _TANGLED_SECONDS and self._jobs_wait_for_each_other(job)):
            self._restart(now, held)

    def _jobs_wait_for_each_other(self, job: DispatchedJob) -> bool:
        """Whether other jobs wait for places, too, and none of all jobs is about to leave some."""
        jobs = self._table.jobs.values()
        return any(other.awaits_change for other in jobs if other is not job) and not any(j.is_moving for j in jobs)

    def _restart(self, now: HeldGeneration, held: HeldGeneration) -> None:
        """What runs saves its state and ends, and what it was to become starts from there."""
        assert held.launch is not None
        held.changes = False
        now.ask_to_stop(held.launch.grace_seconds)
        self._thread.wake()

    def _refuse(self, job: DispatchedJob, why: str, target: _Slots, kept: _Slots) -> None:
        """Those that were to join have no slots: what runs goes on, and nobody in it hears of the change."""
        assert job.next is not None
        generation, job.next = job.next.generation, None
        self._table.keep_slots(job)
        lacking = tuple(rank for rank, place in enumerate(target) if place not in kept)
        remaining = self._table.slots.placement([place for place in target if place in kept])
        self._table.tell(ReplicasLost(time.time(), job.id, generation, lacking, remaining, why, refused=True))
