"""Carries out orders for jobs: gives them slots, and starts, changes and ends their generations.

The jobs' shims own the processes; the allocator owns the slots. `shim_backend` and the backends check orders.
In a live resize: after `service.engine.executor`, before `backends.dispatch.changes` (docs/design/0016).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pollux.backends.dispatch.changes import JobChanges
from pollux.backends.dispatch.job_table import DispatchedJob, HeldGeneration, JobTable
from pollux.backends.dispatch.shim_client import ForkserverClient, ShimClient, find_shim, start_shim
from pollux.backends.dispatch.shim_events import ShimEvents
from pollux.backends.dispatch.site import Site
from pollux.backends.dispatch.slots import SlotAllocator
from pollux.backends.dispatch.worker_thread import WorkerThread
from pollux.backends.nodes.slot import Slot, read_slots
from pollux.backends.process import replica_env
from pollux.backends.process.log_file import DEFAULT_CAP_BYTES
from pollux.backends.process.records import (
    is_job_id,
    log_folder,
    newest_generation,
    read_ended,
    read_order,
    remove_records,
    run_folder,
)
from pollux.backends.protocol import Launch, Listener, Running
from pollux.core.errors import BackendFailed, Conflict
from pollux.storage.state_file import open_plain
from pollux.wire.live.messages import LaunchOrder, LaunchRequest, ReleaseRequest, StopRequest

__all__ = ["Dispatcher", "ShimSettings"]

_RETRY_SECONDS = 0.05
_MAX_FORKSERVERS = 5


@dataclass(frozen=True, slots=True)
class ShimSettings:
    """How shims are started. `environ`: their environment; `warm`: forked from a process that has imported everything.

    `hang_seconds`: silence after which a replica of a live job is killed as hung. `orphan_seconds`: how long jobs go on
    without a service; None for ever.
    """

    environ: Mapping[str, str]
    warm: bool
    hang_seconds: float
    orphan_seconds: float | None = None
    log_cap_bytes: int = DEFAULT_CAP_BYTES


class Dispatcher:
    """Starts, follows and ends the generations of jobs at `home`; all methods may be called from any thread."""

    def __init__(self, home: Path, slots: SlotAllocator, settings: ShimSettings, site: Site | None = None) -> None:
        self.home = home
        self.slots = slots
        self.thread = WorkerThread(self.advance)
        self.table = JobTable(slots, self.thread.report)
        self.site = site or Site()
        self.site.attach(self.thread, self.table)
        self.shims = ShimEvents(self.table, self.thread, self.site)
        self.changes = JobChanges(self.table, self.thread, self.site, self.order_of)
        self.forkserver: ForkserverClient | None = None
        self._settings = settings
        self._num_forkservers = 0
        self._children: set[int] = set()
        self._num_orders = 0
        self._home_lock = -1

    def start(self, listener: Listener) -> None:
        """Find running jobs, and report the jobs that ended meanwhile; only one object at a time may work in a home."""
        if self.thread.was_started:
            raise BackendFailed("this backend was started already; make a new one")
        self._lock_home()
        self.site.start()
        self.thread.listener = listener
        with self.thread.lock:
            with os.scandir(self.home / "run") as found:
                names = sorted(each.name for each in found if each.is_dir(follow_symlinks=False))
            for name in filter(is_job_id, names):
                self._find(self.home / "run" / name)
            self.shims.await_hellos()
            for job in self.table.jobs.values():
                job.to_forget = job.now is None
            if self._settings.warm:
                self._start_forkserver()
        self.thread.start("pollux-backend")

    def submit(self, launch: Launch) -> None:
        """Start the job as soon as slots are free; ignore a generation unless it is newer than all known ones."""
        with self.thread.lock:
            job = self.table.jobs.get(launch.job_id)
            if job is None:
                job = DispatchedJob(launch.job_id, run_folder(self.home, launch.job_id))
                self.table.jobs[launch.job_id] = job
            if job.to_forget and job.is_free:
                # The job's id is used again before the shim of the earlier job has ended.
                job.now, job.newest = None, 0
                _release(job)
            if launch.generation <= job.newest:
                return
            if job.next is not None:
                self.table.end_waiting(job, "a newer generation replaced it before it was started")
            self._num_orders += 1
            job.next = HeldGeneration(launch.generation, launch, order=self._num_orders, live=launch.live)
            job.newest = launch.generation
            job.to_forget = False
        self.thread.wake()

    def resize(self, launch: Launch) -> None:
        """Carry out a resize that the controller wants live.

        If the running generation cannot be resized live after all, stop it and start the launch.
        """
        with self.thread.lock:
            job = self.table.jobs.get(launch.job_id)
            if job is not None and launch.generation <= job.newest:
                return
            changes = launch.live and job is not None and job.has_live_generation
            if job is not None and job.now is not None and not changes:
                self.stop(job.id, job.newest, launch.grace_seconds)
            self.submit(launch)
            waiting = self.table.jobs[launch.job_id].next
            if waiting is not None:
                waiting.changes = changes
        self.thread.wake()

    def stop(self, job_id: str, generation: int, grace_seconds: float) -> None:
        """End the job's generations up to that one; a generation that still waits ends at once."""
        with self.thread.lock:
            job = self.table.jobs.get(job_id)
            if job is None:
                return
            if job.next is not None and job.next.generation <= generation:
                waited = self.table.end_waiting(job, "stopped before it was started")
                self.table.keep_slots(job)
                if job.is_free:
                    job.now = waited
            if job.now is not None and job.now.ended is None and job.now.generation <= generation:
                job.now.ask_to_stop(grace_seconds)
        self.thread.wake()

    def running(self) -> tuple[Running, ...]:
        """Every job that was not forgotten, with its newest generation."""
        with self.thread.lock:
            found = (job.running() for job in self.table.jobs.values() if not (job.to_forget and job.is_free))
            return tuple(each for each in found if each is not None)

    def forget(self, job_id: str) -> None:
        """Remove the job's records, now or once it has ended; its logs stay."""
        with self.thread.lock:
            job = self.table.jobs.get(job_id)
            if job is not None and job.next is None:
                job.to_forget = True
                if job.is_free:
                    remove_records(job.folder)
        self.thread.wake()

    def close(self) -> None:
        """Stop the thread and close all connections; shims and replicas go on, and a new object finds them."""
        self.thread.stop()
        with self.thread.lock:
            for job in [*self.table.jobs.values()]:
                self._drop(job)
                if job.link is not None:
                    if job.is_free and job.next is None:
                        # This shim has nothing left to do: how its job ended is on disk.
                        _release(job)
                    job.link.close()
                    job.link = None
            if self.forkserver is not None:
                self.forkserver.close()
                self.forkserver = None
            self.thread.close()
            if self._home_lock >= 0:
                # A process that another thread is just starting has the lock, too, until it executes its program.
                fcntl.flock(self._home_lock, fcntl.LOCK_UN)
                os.close(self._home_lock)
                self._home_lock = -1
        self.site.close()

    # Starting

    def _lock_home(self) -> None:
        try:
            for name in ("run", "logs"):
                (self.home / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._home_lock = open_plain(self.home / "run" / "backend.lock")
            fcntl.flock(self._home_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"another service works in {self.home}: end it, or set POLLUX_HOME to another folder"
            ) from None
        except OSError as error:
            raise BackendFailed(f"cannot work in {self.home}: {error.strerror}; set POLLUX_HOME elsewhere") from error

    def _find(self, folder: Path) -> None:
        """Take up a job of an earlier service: it still runs, or has ended, or was lost with its shim."""
        generation = newest_generation(folder)
        link = find_shim(folder.name, folder)
        job = DispatchedJob(folder.name, folder, newest=generation or 0)
        if link is not None:
            self.shims.follow(job, link)
        if generation is None:
            if link is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                self.table.jobs[job.id] = job
            return
        self.table.jobs[job.id] = job
        record, ended = read_order(folder, generation), read_ended(folder, generation)
        job.now = HeldGeneration(generation, started=True, sent=True, live=bool(record.get("live")))
        if ended is not None:
            self.table.finish(job, ended)
            return
        job.now.places = read_slots(record.get("places", ()))
        self.slots.mark_held(job.id, job.now.places)
        if link is None:
            self.shims.lose(job)

    def _start_forkserver(self) -> None:
        self._num_forkservers += 1
        with contextlib.suppress(BackendFailed):
            self.forkserver = ForkserverClient(self.home / "run", self._settings.environ)
            self.thread.watch(self.forkserver.control, self._hear_forkserver)

    def _hear_forkserver(self) -> None:
        if self.forkserver is not None and not self.forkserver.read_message():
            self.thread.unwatch(self.forkserver.control)
            self.forkserver.close()
            self.forkserver = None
            if self._num_forkservers < _MAX_FORKSERVERS:
                self._start_forkserver()

    # What the thread does

    def advance(self) -> None:
        """Do for every job what can be done now; cheap where nothing has changed."""
        step, jobs = self.thread.step, self.table.jobs
        step(self.site.step)
        step(self._reap)
        for job in [*jobs.values()]:
            step(partial(self._forward_stop, job))
        waiting = [job for job in jobs.values() if job.next is not None and not job.sweeping]
        for job in sorted(waiting, key=lambda job: job.next.order if job.next else 0):
            if job.is_free:
                step(partial(self._give_slots, job))
            elif job.awaits_change:
                step(partial(self.changes.advance, job))
        for job in [*jobs.values()]:
            step(partial(self._launch, job))
            step(partial(self._drop, job))

    def _reap(self) -> None:
        for pid in [*self._children]:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            self._children.discard(pid)

    def _forward_stop(self, job: DispatchedJob) -> None:
        held = job.now
        if held is None or held.ended is not None or held.stop_grace is None:
            return
        if not held.sent:
            self.table.end_unstarted(job, held, "stopped", "stopped before it was started")
        elif job.link is not None and held.stop_sent != held.stop_grace:
            held.stop_sent = held.stop_grace
            job.link.send(StopRequest(held.generation, held.stop_grace))

    def _give_slots(self, job: DispatchedJob) -> None:
        held = job.next
        if held is None or held.launch is None:
            return
        places = self.slots.allocate(job.id, held.launch.placement, (), ())
        why = "" if places else self.slots.refused(job.id, held.launch.placement, ())[0]
        if places or why:
            job.now, job.next = held, None
            held.places = places
        if why:
            self.table.end_unstarted(job, held, "refused", why)

    def _launch(self, job: DispatchedJob) -> None:
        """Send the launch to the job's shim, once its slots can be used and the job has a shim."""
        held = job.now
        if held is None or held.launch is None or not held.awaits_launch:
            return
        found = self.site.check(held.launch, held.places)
        if found is not None and found.why:
            # If other nodes share the folders, this node is at fault; otherwise the job is.
            self.table.end_unstarted(job, held, "refused" if found.elsewhere else "crashed", found.why)
        elif found is not None:
            link = self._shim_for(job, held)
            if link is not None and not link.leaving:
                held.sent = True
                link.send(LaunchRequest(self.order_of(held.launch, held.places)))

    def _shim_for(self, job: DispatchedJob, held: HeldGeneration) -> ShimClient | None:
        """The job's shim, which is started if there is none; None where that is not possible now."""
        self._release_cold_shim(job)
        return job.link or self._connect(job, held)

    def _release_cold_shim(self, job: DispatchedJob) -> None:
        """Release a shim that was started before the fork server was ready: the next one starts replicas faster."""
        if self.forkserver is not None and self.forkserver.is_ready and job.link is not None and job.link.warm is False:
            _release(job)

    def _connect(self, job: DispatchedJob, held: HeldGeneration) -> ShimClient | None:
        try:
            link, child = start_shim(job.id, job.folder, self.forkserver, self._settings.environ)
        except BlockingIOError:
            self.thread.wake_after(_RETRY_SECONDS)
            return None
        except (OSError, BackendFailed) as error:
            why = f"its shim could not be started on this machine: {error}: check its limits (ulimit -a) and disk"
            self.table.end_unstarted(job, held, "refused", why)
            return None
        if child:
            self._children.add(child)
        self.shims.follow(job, link)
        return link

    def order_of(self, launch: Launch, places: tuple[Slot, ...]) -> LaunchOrder:
        """The order to a shim for a launch at these slots."""
        identity = replica_env.run_id(self.home, launch.job_id, launch.generation)
        slots = self.slots.details(launch, places, identity)
        return LaunchOrder(
            job_id=launch.job_id,
            generation=launch.generation,
            argv=tuple(launch.argv),
            workdir=launch.workdir,
            run_id=identity,
            path_was_set="PATH" in launch.env,
            grace_seconds=launch.grace_seconds,
            memory_bytes=launch.memory_bytes_per_gpu,
            logs=str(log_folder(self.home, launch.job_id)),
            log_cap_bytes=self._settings.log_cap_bytes,
            live=launch.live,
            hang_seconds=self._settings.hang_seconds,
            orphan_seconds=self._settings.orphan_seconds,
            environ=slots.environ,
            replicas=slots.replicas,
            cores=slots.cores,
            places=slots.places,
            gpus=slots.gpus,
            fleet=slots.fleet,
        )

    def _drop(self, job: DispatchedJob) -> None:
        """Carry out `forget` once the job has ended: release its shim first, then remove its records."""
        if not job.to_forget or job.next is not None or not job.is_free or job.sweeping:
            return
        if job.link is not None:
            remove_records(job.folder)
            _release(job)
            return
        shutil.rmtree(job.folder, ignore_errors=True)
        del self.table.jobs[job.id]


def _release(job: DispatchedJob) -> None:
    """Tell the job's shim to end: it has nothing left to do."""
    if job.link is not None and not job.link.leaving:
        job.link.leaving = True
        job.link.send(ReleaseRequest())
