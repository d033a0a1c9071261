"""Requests from outside of the training loop (a signal, the clock), and the step at which all replicas serve them.

No replica acts alone: a request is written to the job's store, every replica becomes armed, and replica 0 then names a
step that no replica has passed. Without a request a step only reads a flag.
In a live resize: after `backends.shim.transition`, before `agent.elastic.member` (docs/design/0016).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist

from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.wire.live import keys

__all__ = ["CHECKPOINT", "RESIZE", "STOP", "ResizeSource", "StepRequests"]

STOP = "stop"
CHECKPOINT = "checkpoint"
RESIZE = "resize"
_POLL_SECONDS = 0.2
_LIVE_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 5.0
_log = logging.getLogger("pollux")


class ResizeSource(Protocol):
    """Where requests to resize come from: `pollux.agent.elastic.member.ElasticMember`, and others in tests."""

    def send_heartbeat(self) -> None:
        """Send a heartbeat to the shim, if one is due."""

    def free_from_lost(self) -> None:
        """Free the training thread from waiting for lost replicas."""

    def wanted_generation(self) -> int | None:
        """The generation to move to; None for none."""

    def can_move(self, generation: int) -> bool:
        """Whether the job can move there while it runs; asked at a step boundary."""


class StepRequests:
    """Collects requests to this replica, and agrees with the others on the step boundary to serve them at.

    A step reads `armed` only. `signals` request a stop; the clock of replica 0 requests a checkpoint every
    `checkpoint_every` seconds, None for never. A `mover` requests a resize; `target` is the generation that was agreed
    on last.
    """

    def __init__(
        self,
        replicas: ReplicaGroup,
        checkpoint_every: float | None,
        signals: tuple[int, ...] = (signal.SIGTERM,),
        clock: Callable[[], float] = time.monotonic,
        mover: ResizeSource | None = None,
    ) -> None:
        self.armed = False
        self.target = -1
        self._mover = mover
        self._replicas = replicas
        self._every = self._asked_every = checkpoint_every
        self._clock = clock
        self._saved_at = clock()
        self._due = self._saved_at + checkpoint_every if checkpoint_every is not None else float("inf")
        self._wanted: set[str] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._round = 0
        self._acknowledged = False
        self._previous: dict[int, object] = {}
        self._asked_at: float | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._listen(signals)
        self._start()

    def _start(self) -> None:
        if self._thread is None and (self._replicas.num_replicas > 1 or self._mover is not None):
            if self._mover is not None:
                # Before all else: the hang of a replica that never sent a heartbeat would go unnoticed.
                with contextlib.suppress(dist.DistError, RuntimeError):
                    self._mover.send_heartbeat()
            self._thread = threading.Thread(target=self._poll, name="pollux-watch", daemon=True)
            self._thread.start()

    def _listen(self, signals: tuple[int, ...]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signals:
            self._previous[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A data-loading worker that was forked from this process has the handler, but not the job.
            os._exit(128 + number)
        if self._stopping:
            # The job is saving. The sender of the signal kills the process when the grace period is over.
            return
        now = self._clock()
        if self._asked_at is not None and now - self._asked_at > _PATIENCE_SECONDS:
            # A second request after a while: no step ends, so the signal gets its earlier effect.
            self.give_back_signals()
            os.kill(os.getpid(), number)
            return
        self._asked_at = now if self._asked_at is None else self._asked_at
        self.request(STOP)

    def save_ahead(self, every: float | None) -> None:
        """Save every so many seconds, if that is more often than the user's option; None: as the option says."""
        asked = self._asked_every
        if asked is not None:
            self._every = asked if every is None else min(asked, every)
            self._due = self._saved_at + self._every

    def save_again(self, seconds: float) -> None:
        """The last save has failed: the next one is due after so many seconds, if that is earlier; from any thread."""
        if self._every is not None:
            self._due = min(self._due, self._clock() + seconds)

    def request(self, what: str) -> None:
        """Request `what` from all replicas at the next step that they agree on; safe in a signal handler."""
        self._wanted.add(what)
        self.armed = True

    def wants(self, what: str) -> bool:
        """Whether a request was made here and is not served yet; a stop counts until the process ends."""
        return what in self._wanted or (what == STOP and self._stopping)

    def mark_stopping(self) -> None:
        """Note that the job saves and ends; further requests to stop change nothing."""
        self._stopping = True

    def start_among_new_replicas(self) -> None:
        """Forget the agreements of the old replicas, and a resize; keep other requests that were not served."""
        with self._lock:
            self._round = 0
            self._acknowledged = False
            self._wanted.discard(RESIZE)
            self._disarm()
        self._start()

    def _key(self, name: str) -> str:
        return keys.step_request(self._round, name)

    def _poll(self) -> None:
        while not self._closed.wait(_POLL_SECONDS if self._mover is None else _LIVE_POLL_SECONDS):
            self._check_once()

    def _check_once(self) -> None:
        """Look for requests of other replicas and of the clock; the main thread serves them at step boundaries."""
        with contextlib.suppress(dist.DistError, RuntimeError), self._lock:
            store = self._replicas.store
            if store is not None and not self.armed and store.check([self._key("request")]):
                self.armed = True
        if self._mover is not None:
            with contextlib.suppress(dist.DistError, RuntimeError):
                self._mover.send_heartbeat()
                self._mover.free_from_lost()
                if RESIZE not in self._wanted and self._mover.wanted_generation() is not None:
                    self.request(RESIZE)
        if self._is_due():
            self.request(CHECKPOINT)

    def _is_due(self) -> bool:
        return self._replicas.is_first and self._clock() >= self._due

    def at_boundary(self, step: int) -> set[str]:
        """After `step` steps: the requests to serve now, equal on all replicas; usually none."""
        if self._replicas.num_replicas == 1:
            if self._is_due():
                self.request(CHECKPOINT)
            return self._serve_alone() if self.armed else set()
        if not self.armed:
            return set()
        if self._replicas.device.type == "cuda":
            # The host runs ahead of the GPU, and only the GPU waits for the other replicas at a boundary.
            torch.cuda.synchronize(self._replicas.device)
        try:
            return self._agree(step)
        except (dist.DistError, RuntimeError) as error:
            # Without the store replicas cannot agree; if other replicas are lost too, training will notice.
            _log.debug("the job's store does not answer: %s", error)
            if self._mover is not None and STOP in self._wanted:
                # Nobody can name a step at which all stop. As after a loss, the first replica saves its state.
                raise dist.DistError(f"asked to stop, and the job's store does not answer: {error}") from error
            return set()

    def _serve_alone(self) -> set[str]:
        served = self._clear_wanted()
        try:
            return self._without_refused_resize(served)
        except (dist.DistError, RuntimeError) as error:
            _log.debug("the job's store does not answer: %s", error)
            return served - {RESIZE}

    def _without_refused_resize(self, served: set[str]) -> set[str]:
        """The requests without the resize, where there is also a stop, or no plan, or the job cannot move."""
        if RESIZE not in served or self._mover is None:
            return served
        target = self._mover.wanted_generation()
        if STOP in served or target is None or not self._mover.can_move(target):
            return served - {RESIZE}
        self.target = target
        return served

    def _agree(self, step: int) -> set[str]:
        """Take part in the agreement at a boundary, as an armed replica.

        A replica writes its requests, and that it checks every boundary from now on. When all replicas do, replica 0
        names the next boundary: the gradients of that step need replica 0, so no replica has passed it.
        """
        store = self._replicas.store
        assert store is not None
        with self._lock:
            for what in sorted(self._wanted):
                store.set(self._key(what), "1")
                store.set(self._key("request"), "1")
            if not self._acknowledged:
                self._acknowledged = True
                store.add(self._key("armed"), 1)
            if not store.check([self._key("step")]):
                if not self._replicas.is_first or store.add(self._key("armed"), 0) < self._replicas.num_replicas:
                    return set()
                agreed = {what for what in (STOP, CHECKPOINT, RESIZE) if store.check([self._key(what)])}
                agreed = self._without_refused_resize(agreed)
                store.set(self._key("target"), str(self.target))
                store.set(self._key("agreed"), ",".join(sorted(agreed)))
                store.set(self._key("step"), str(step + 1))
                return set()
            if step < int(store.get(self._key("step"))):
                return set()
            agreed = {what for what in store.get(self._key("agreed")).decode().split(",") if what}
            self.target = int(store.get(self._key("target")))
            # The watching thread requests a resize again if it is still wanted.
            self._wanted -= agreed | {RESIZE}
            self._round += 1
            self._acknowledged = False
            self._disarm()
            self._note_served(agreed)
            return agreed

    def _clear_wanted(self) -> set[str]:
        served, self._wanted = self._wanted, set()
        self._disarm()
        self._note_served(served)
        return served

    def _disarm(self) -> None:
        # In this order, so that a signal between the two lines is not lost.
        self.armed = False
        if self._wanted:
            self.armed = True

    def _note_served(self, served: set[str]) -> None:
        self._stopping = self._stopping or STOP in served
        if self._every is not None and served:
            self._saved_at = self._clock()
            self._due = self._saved_at + self._every

    def give_back_signals(self) -> None:
        """Restore the signal handlers that were there before."""
        for number, previous in self._previous.items():
            if previous is not None:
                signal.signal(number, previous)  # type: ignore[arg-type]
        self._previous = {}

    def close(self) -> None:
        """Stop watching, and restore the signal handlers that were there before."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self.give_back_signals()
