"""A backend at work: its table of jobs, and the thread that moves them on.

Processes belong to the jobs' shims, places to the ground they are on; what may be asked of the backend, and what is
refused, is in `local` and `backend`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import selectors
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pollux.backends.dispatch.job_table import DispatchedJob, HeldGeneration, loss_of, start_of
from pollux.backends.dispatch.shim_client import ForkserverClient, ShimClient, find_shim, start_shim
from pollux.backends.dispatch.slots import SlotAllocator
from pollux.backends.dispatch.worker_thread import WorkerThread
from pollux.backends.process import replica_env
from pollux.backends.process.records import (
    ended_from,
    ended_to,
    log_folder,
    newest_generation,
    read_record,
    record_path,
    remove_records,
    run_folder,
    write_record,
)
from pollux.backends.protocol import (
    Launch,
    Listener,
    Outcome,
    ReplicasEnded,
    ReplicasLost,
    ReplicasStarted,
    Running,
)
from pollux.core.errors import BackendFailed, Conflict
from pollux.wire.live.messages import LaunchOrder

__all__ = ["Dispatcher"]

_log = logging.getLogger("pollux.backends")

_HELLO_SECONDS = 5.0
_SWEEP_SECONDS = 0.05
_RETRY_SECONDS = 0.05
_MAX_ATTEMPTS = 3
_MAX_NURSERIES = 5
# So long changes wait for places that nobody seems to leave; an engine may take seconds to hand some over.
_TANGLED_SECONDS = 5.0
# So long one waits for places elsewhere that nobody seems to give while it holds those that it has, by a quota say.
_LONGEST_WAIT_SECONDS = 300.0


class Dispatcher(WorkerThread):
    """Starts, follows and ends the generations of jobs at `home`; all methods may be called from any thread."""

    def __init__(
        self,
        home: Path,
        ground: SlotAllocator,
        environ: Mapping[str, str],
        warm: bool,
        log_cap_bytes: int,
        hang_seconds: float,
        orphan_seconds: float | None = None,
    ) -> None:
        super().__init__()
        self._home = home
        self._ground = ground
        self._environ = environ
        self._warm = warm
        self._log_cap_bytes = log_cap_bytes
        self._hang_seconds = hang_seconds
        self._orphan_seconds = orphan_seconds
        self._jobs: dict[str, DispatchedJob] = {}
        self._nurseries = 0
        self._children: set[int] = set()
        self._orders = 0
        self._home_lock = -1
        self.false_alarms = 0
        self.nursery: ForkserverClient | None = None

    def start(self, listener: Listener) -> None:
        """Find what runs from before and tell how what ended meanwhile did; one object at a time works in a home."""
        if self._thread is not None or self._closing:
            raise BackendFailed("this backend was started already; make a new one")
        self._prepare_home()
        self._listener = listener
        with self._lock:
            for folder in sorted((self._home / "run").iterdir()):
                if folder.is_dir():
                    self._find(folder)
            self._await_hellos()
            for job in self._jobs.values():
                job.to_forget = job.now is None
            if self._warm:
                self._start_nursery()
        self._begin("pollux-backend")

    def submit(self, launch: Launch) -> None:
        """Start it as soon as its places are free; a generation that is not newer than the newest known is ignored."""
        with self._lock:
            job = self._jobs.get(launch.job_id)
            if job is None:
                job = self._jobs[launch.job_id] = DispatchedJob(launch.job_id, run_folder(self._home, launch.job_id))
            if job.to_forget and job.is_free:
                self._begin_anew(job)
            if launch.generation <= job.newest:
                return
            if job.next is not None:
                self._tell_end(job, job.next, "stopped", "a newer generation took its place before it was started")
            self._orders += 1
            job.next = HeldGeneration(launch.generation, launch, order=self._orders, live=launch.live)
            job.newest = launch.generation
            job.to_forget = False
        self._rouse()

    def resize(self, launch: Launch) -> None:
        """Change what runs where that can be; end it and start anew where not."""
        with self._lock:
            job = self._jobs.get(launch.job_id)
            if job is not None and launch.generation <= job.newest:
                return
            now = None if job is None else job.now
            lives = now is not None and now.live and now.ended is None and now.stop_grace is None
            if job is not None and now is not None and not (lives and launch.live):
                self.stop(job.id, job.newest, launch.grace_seconds)
            self.submit(launch)
            job = self._jobs[launch.job_id]
            if job.next is not None:
                job.next.changes = lives and launch.live
        self._rouse()

    def stop(self, job_id: str, generation: int, grace_seconds: float) -> None:
        """End what the job has up to that generation; what still waits ends at once."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:
                return
            if job.next is not None and job.next.generation <= generation:
                waited, job.next = job.next, None
                self._tell_end(job, waited, "stopped", "stopped before it was started")
                self._keep_places(job)
                if job.is_free:
                    job.now = waited
            if job.now is not None and job.now.ended is None and job.now.generation <= generation:
                job.now.ask_to_stop(grace_seconds)
        self._rouse()

    def running(self) -> tuple[Running, ...]:
        """Every job that was not forgotten, with its newest generation."""
        with self._lock:
            found = (job.running() for job in self._jobs.values() if not (job.to_forget and job.is_free))
            return tuple(each for each in found if each is not None)

    def forget(self, job_id: str) -> None:
        """Remove its records, now or, where it still runs, when it has ended; its logs stay."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is not None and job.next is None:
                job.to_forget = True
                if job.is_free:
                    remove_records(job.folder)
        self._rouse()

    def close(self) -> None:
        """Let go of everything; shims and replicas go on, and a new object with the same home finds them."""
        super()._end()
        with self._lock:
            for job in [*self._jobs.values()]:
                self._drop(job)
                if job.link is not None:
                    if job.is_free and job.next is None:
                        # Nothing is left for this shim to do; how its job ended is on disk.
                        self._release(job)
                    job.link.close()
                    job.link = None
            if self.nursery is not None:
                self.nursery.close()
                self.nursery = None
            self._selector.close()
            if self._home_lock >= 0:
                # A process that another thread is just starting has it, too, until it is another program.
                fcntl.flock(self._home_lock, fcntl.LOCK_UN)
            for fd in (*self._wake, self._home_lock):
                if fd >= 0:
                    os.close(fd)
            self._wake, self._home_lock = (-1, -1), -1

    def _begin_anew(self, job: DispatchedJob) -> None:
        """The name is used again before the shim of the job that had it is gone."""
        job.now, job.newest = None, 0
        self._release(job)

    # Starting

    def _prepare_home(self) -> None:
        try:
            for name in ("run", "logs"):
                (self._home / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._home_lock = os.open(self._home / "run" / "backend.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._home_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"another service works in {self._home}: end it, or set POLLUX_HOME to another folder"
            ) from None
        except OSError as error:
            raise BackendFailed(f"cannot work in {self._home}: {error.strerror}; set POLLUX_HOME elsewhere") from error

    def _find(self, folder: Path) -> None:
        """One job of a time before: still running, ended, or lost with its shim."""
        generation = newest_generation(folder)
        link = find_shim(folder.name, folder)
        job = DispatchedJob(folder.name, folder, newest=generation or 0)
        if link is not None:
            self._follow(job, link)
        if generation is None:
            if link is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                self._jobs[job.id] = job
            return
        self._jobs[job.id] = job
        record = read_record(record_path(folder, "generation", generation)) or {}
        ended = read_record(record_path(folder, "ended", generation))
        job.now = HeldGeneration(generation, started=True, sent=True, live=bool(record.get("live")))
        if ended is not None:
            self._finish(job, ended_from(ended))
            return
        job.now.places = tuple(str(place) for place in record.get("places", ()))
        self._ground.hold(job.id, job.now.places)
        if link is None:
            self._lose(job)

    def _await_hellos(self) -> None:
        """Hear from every shim what it has, since a launch may have reached it that is not on disk yet."""
        waiting = {job.id: job.link for job in self._jobs.values() if job.link is not None}
        for link in waiting.values():
            link.send(op="status")
        deadline = time.monotonic() + _HELLO_SECONDS
        for job_id, link in waiting.items():
            while link.warm is None and self._jobs[job_id].link is link and time.monotonic() < deadline:
                link.peer.settimeout(max(0.01, deadline - time.monotonic()))
                self._hear(self._jobs[job_id])
            if self._jobs[job_id].link is link:
                link.peer.settimeout(_HELLO_SECONDS)

    def _start_nursery(self) -> None:
        self._nurseries += 1
        with contextlib.suppress(BackendFailed):
            self.nursery = ForkserverClient(self._home / "run", self._environ)
            self._selector.register(self.nursery.control, selectors.EVENT_READ, self._hear_nursery)

    def _hear_nursery(self) -> None:
        if self.nursery is not None and not self.nursery.hear():
            self._selector.unregister(self.nursery.control)
            self.nursery.close()
            self.nursery = None
            if self._nurseries < _MAX_NURSERIES:
                self._start_nursery()

    # The thread

    def _work(self) -> None:
        """Move every job as far as it can go; cheap where nothing changed."""
        self._stumbles.step(self._collect)
        for job in [*self._jobs.values()]:
            self._stumbles.step(partial(self._forward_stop, job))
        waiting = [job for job in self._jobs.values() if job.next is not None and not job.sweeping]
        for job in sorted(waiting, key=lambda job: job.next.order if job.next else 0):
            if job.is_free:
                self._stumbles.step(partial(self._give_places, job))
            elif job.awaits_change:
                self._stumbles.step(partial(self._change, job))
        for job in [*self._jobs.values()]:
            self._stumbles.step(partial(self._launch, job))
            self._stumbles.step(partial(self._drop, job))

    def _collect(self) -> None:
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
            self._close(job, held, "stopped", "stopped before it was started")
        elif job.link is not None and held.stop_sent != held.stop_grace:
            held.stop_sent = held.stop_grace
            job.link.send(op="stop", generation=held.generation, grace_seconds=held.stop_grace)

    def _give_places(self, job: DispatchedJob) -> None:
        held = job.next
        if held is None or held.launch is None:
            return
        places = self._ground.take(job.id, held.launch.placement, (), ())
        why = "" if places else self._ground.refused(job.id, held.launch.placement, ())[0]
        if places or why:
            job.now, job.next = held, None
            held.places = places
        if why:
            self._close(job, held, "refused", why)

    def _change(self, job: DispatchedJob) -> None:
        """Send the order to change, once there are places for those that join, or it is known that none will be."""
        now, held = job.now, job.next
        assert now is not None
        assert held is not None
        assert held.launch is not None
        assert job.link is not None
        kept = now.places if now.kept is None else now.kept
        placement = held.launch.placement
        # Who was to leave may still be there.
        leaving = tuple(place for place in now.places if now.target and place not in now.target)
        target, why = self._ground.take(job.id, placement, kept, (*kept, *leaving)), ""
        if not target:
            why, target = self._ground.refused(job.id, placement, kept)
        elif (found := self._vet(held.launch, target, kept)) is None:
            return
        else:
            why, target = found
        if not target:
            self._untangle(job, now, held, kept)
            return
        if why and now.kept is None and set(target) & set(kept):
            self._refuse_change(job, why, target, kept)
            return
        if not set(target) & set(kept):
            if not why and job.link.hands_over is None:
                # It says so any moment.
                return
            if why or not job.link.hands_over:
                # It cannot be there, or not get there while it runs, and must not be here any more.
                self._restart(now, held)
                return
        held.target = target
        held.places = (*now.places, *(place for place in target if place not in now.places))
        held.sent = True
        job.now, job.next = held, None
        job.link.send(op="resize", order=asdict(self._order(held.launch, held.target)))

    def _untangle(self, job: DispatchedJob, now: HeldGeneration, held: HeldGeneration, kept: tuple[str, ...]) -> None:
        """Changes that wait for places of one another would do so for ever: the first saves, ends and starts anew.

        So does one that is to go elsewhere, and to which nobody gives anything while it holds what it has.
        """
        if held.waits_since is None:
            held.waits_since = time.monotonic()
            for seconds in (_TANGLED_SECONDS, _LONGEST_WAIT_SECONDS):
                self._after(seconds, lambda: None)
        assert held.launch is not None
        waited, jobs = time.monotonic() - held.waits_since, self._jobs.values()
        others_wait = any(other.awaits_change for other in jobs if other is not job)
        tangled = waited >= _TANGLED_SECONDS and others_wait and not any(other.is_moving for other in jobs)
        elsewhere = not dict(self._ground.placement(kept)).keys() & dict(held.launch.placement).keys()
        if tangled or (waited >= _LONGEST_WAIT_SECONDS and elsewhere):
            self._restart(now, held)

    def _restart(self, now: HeldGeneration, held: HeldGeneration) -> None:
        """What runs saves its state and ends, and what it was to become starts from there."""
        assert held.launch is not None
        held.changes = False
        now.ask_to_stop(held.launch.grace_seconds)
        self._rouse()

    def _vet(
        self, launch: Launch, target: tuple[str, ...], kept: tuple[str, ...]
    ) -> tuple[str, tuple[str, ...]] | None:
        """Why places that were taken must not be used, and which are left then, as `SlotAllocator.refused` has it.

        None: not known yet, and the thread is roused once it is.
        """
        return "", target

    def _refuse_change(self, job: DispatchedJob, why: str, target: tuple[str, ...], kept: tuple[str, ...]) -> None:
        """Those that were to join have no places: what runs goes on, and nobody in it hears of the change."""
        assert job.next is not None
        generation, job.next = job.next.generation, None
        self._keep_places(job)
        lacking = tuple(rank for rank, place in enumerate(target) if place not in kept)
        remaining = self._ground.placement([place for place in target if place in kept])
        self._events.append(ReplicasLost(time.time(), job.id, generation, lacking, remaining, why, refused=True))

    def _launch(self, job: DispatchedJob) -> None:
        held = job.now
        if held is None or held.sent or held.ended is not None or held.launch is None:
            return
        if job.link is not None and job.link.warm is False and self.nursery is not None and self.nursery.is_ready:
            # Its shim was started before the nursery was ready: from now on it can have a better one.
            self._release(job)
        if job.link is not None and job.link.leaving:
            return
        if job.link is None and not self._connect(job, held):
            return
        assert job.link is not None
        held.sent = True
        job.link.send(op="launch", order=asdict(self._order(held.launch, held.places)))

    def _release(self, job: DispatchedJob) -> None:
        if job.link is not None and not job.link.leaving:
            job.link.leaving = True
            job.link.send(op="release")

    def _connect(self, job: DispatchedJob, held: HeldGeneration) -> bool:
        try:
            link, child = start_shim(job.id, job.folder, self.nursery, self._environ)
        except BlockingIOError:
            self._after(_RETRY_SECONDS, lambda: None)
            return False
        except (OSError, BackendFailed) as error:
            why = f"its shim could not be started on this machine: {error}: check its limits (ulimit -a) and disk"
            self._close(job, held, "refused", why)
            return False
        if child:
            self._children.add(child)
        self._follow(job, link)
        return True

    def _order(self, launch: Launch, places: tuple[str, ...]) -> LaunchOrder:
        identity = replica_env.run_id(self._home, launch.job_id, launch.generation)
        return LaunchOrder(
            job_id=launch.job_id,
            generation=launch.generation,
            argv=tuple(launch.argv),
            workdir=launch.workdir,
            run_id=identity,
            path_was_set="PATH" in launch.env,
            grace_seconds=launch.grace_seconds,
            memory_bytes=launch.memory_bytes_per_gpu,
            logs=str(log_folder(self._home, launch.job_id)),
            log_cap_bytes=self._log_cap_bytes,
            live=launch.live,
            hang_seconds=self._hang_seconds,
            orphan_seconds=self._orphan_seconds,
            **self._ground.details(launch, places, identity),
        )

    def _follow(self, job: DispatchedJob, link: ShimClient) -> None:
        job.link = link
        self._selector.register(link.peer, selectors.EVENT_READ, lambda: self._hear(job))

    def _hear(self, job: DispatchedJob) -> None:
        if job.link is None:
            return
        messages = job.link.receive()
        if messages is None:
            self._selector.unregister(job.link.peer)
            job.link.close()
            job.link = None
            self._shim_ended(job)
            return
        for message in messages:
            self._take(job, job.link, message)

    def _take(self, job: DispatchedJob, link: ShimClient, message: Mapping[str, Any]) -> None:
        held = job.now
        if self._take_aside(job, message):
            return
        if message["event"] == "status":
            link.warm, link.hands_over = bool(message["warm"]), bool(message.get("hands_over"))
            if held is None and message["generation"] is not None:
                self._learn(job, int(message["generation"]))
                held = job.now
            if held is not None and held.launch is None and message.get("moving"):
                # From a time before this service: its end is told when it comes.
                held.started = False
            elif held is not None and held.launch is None and held.live and held.started and not held.ended:
                # Its change may have come about while nobody listened.
                self._events.append(ReplicasStarted(time.time(), job.id, held.generation))
        if held is None or held.ended is not None:
            return
        ended = message.get("ended")
        if ended is not None and ended["generation"] == held.generation:
            self._finish(job, ended_from(ended))
        elif message.get("lost") is not None:
            self._take_loss(job, held, message["lost"])
        elif message["event"] == "lost":
            self._take_loss(job, held, message)
        elif message.get("generation") == held.generation and not held.started and not message.get("moving"):
            self._take_start(job, held, message)

    def _take_aside(self, job: DispatchedJob, message: Mapping[str, Any]) -> bool:
        """Whether a shim's word is about something else than how its job stands."""
        if message["event"] != "alarm":
            return False
        self.false_alarms += 1
        _log.warning("false alarm %d: %s (job '%s')", self.false_alarms, message["text"], job.id)
        return True

    def _take_start(self, job: DispatchedJob, held: HeldGeneration, message: Mapping[str, Any]) -> None:
        target = tuple(str(place) for place in message.get("places") or held.target or held.places)
        held.started, held.places, held.kept = True, target, None
        self._keep_places(job)
        self._events.append(start_of(job.id, held.generation, message))

    def _take_loss(self, job: DispatchedJob, held: HeldGeneration, message: Mapping[str, Any]) -> None:
        """Some replicas are gone: told once, and what is left is what an order may keep."""
        if message["generation"] != held.generation or held.stop_grace is not None:
            return
        kept = tuple(str(place) for place in message["kept"])
        if held.kept == kept:
            return
        held.kept = kept
        self._events.append(loss_of(job.id, message, self._ground.placement(kept)))

    def _learn(self, job: DispatchedJob, generation: int) -> None:
        """A generation that reached its shim just before the service before this one ended."""
        record = read_record(record_path(job.folder, "generation", generation)) or {}
        job.newest = max(job.newest, generation)
        places, live = tuple(str(place) for place in record.get("places", ())), bool(record.get("live"))
        job.now = HeldGeneration(generation, started=True, sent=True, places=places, live=live)
        self._ground.hold(job.id, places)

    def _keep_places(self, job: DispatchedJob) -> None:
        """The job holds what it uses, and nothing else."""
        now = job.now
        self._ground.keep(job.id, () if now is None or now.ended is not None else now.places)

    # Ends

    def _shim_ended(self, job: DispatchedJob) -> None:
        held = job.now
        if held is None or held.ended is not None or not held.sent:
            return
        link = find_shim(job.id, job.folder)
        if link is not None:
            # It lives, and only the connection broke.
            self._follow(job, link)
            link.send(op="status")
            return
        ended = read_record(record_path(job.folder, "ended", held.generation))
        if ended is not None:
            self._finish(job, ended_from(ended))
        elif newest_generation(job.folder) == held.generation:
            self._lose(job)
        elif held.attempts + 1 < _MAX_ATTEMPTS:
            # It ended before it read the launch, so nothing was started.
            held.attempts += 1
            held.sent = False
        else:
            why = f"its shim ended before it could start anything: see {job.folder}/shim.log"
            self._close(job, held, "crashed", why)

    def _lose(self, job: DispatchedJob) -> None:
        """The shim is gone, and its replicas with it: make sure of that, then say so."""
        job.sweeping = True
        held = job.now
        assert held is not None
        record = read_record(record_path(job.folder, "generation", held.generation)) or {}
        if not self._ground.ends_all(record):
            self._after(_SWEEP_SECONDS, lambda: self._lose(job))
            return
        job.sweeping = False
        why = "its shim ended, and its replicas with it"
        ended = ReplicasEnded(time.time(), job.id, held.generation, "lost", (), why)
        with contextlib.suppress(BackendFailed):
            write_record(record_path(job.folder, "ended", held.generation), ended_to(ended))
        self._finish(job, ended)

    def _finish(self, job: DispatchedJob, ended: ReplicasEnded) -> None:
        held = job.now
        if held is None or held.ended is not None or held.generation != ended.generation:
            return
        held.ended = ended
        self._keep_places(job)
        self._events.append(ended)

    def _close(self, job: DispatchedJob, held: HeldGeneration, outcome: Outcome, detail: str) -> None:
        """An end without processes: only this object knows of it."""
        self._finish(job, ReplicasEnded(time.time(), job.id, held.generation, outcome, (), detail))

    def _tell_end(self, job: DispatchedJob, held: HeldGeneration, outcome: Outcome, detail: str) -> None:
        held.ended = ReplicasEnded(time.time(), job.id, held.generation, outcome, (), detail)
        self._events.append(held.ended)

    def _drop(self, job: DispatchedJob) -> None:
        """Carry out `forget` once nothing of the job is left: first its shim goes, then its records."""
        if not job.to_forget or job.next is not None or not job.is_free or job.sweeping:
            return
        if job.link is not None:
            remove_records(job.folder)
            self._release(job)
            return
        shutil.rmtree(job.folder, ignore_errors=True)
        del self._jobs[job.id]
