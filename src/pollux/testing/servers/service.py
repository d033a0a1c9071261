"""For tests of a service: a clock that tests set, and a backend whose replicas tests start and end."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from pollux.backends.protocol import (
    BackendCapabilities,
    BackendEvent,
    Launch,
    Listener,
    LogChunk,
    NodeDown,
    NodeUp,
    Outcome,
    ReplicasEnded,
    ReplicasLost,
    ReplicasStarted,
    Running,
)
from pollux.core import Node, Placement
from pollux.core.errors import BackendFailed
from pollux.service.engine.engine import Engine
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.report import ModelReport, Report

__all__ = ["SAMPLE_MODEL", "FakeBackend", "ManualClock", "result_of", "sample_report"]

T = TypeVar("T")

SAMPLE_MODEL = ModelReport((0.1, 0.002, 0.02, 0.003, 0.01, 0.002, 1.5), "cpu", 128, 2048, 512, 1.0, 100.0)
"""A model that an agent may have learned, with diminishing returns of more GPUs and larger batches."""


def sample_report(generation: int, progress: float = 100.0, **fields: Any) -> Report:
    """A report of a job whose total work is 1,000 useful samples."""
    given: dict[str, Any] = {
        "step": 10, "samples": 1000, "epoch": 0.1, "num_replicas": 1, "num_nodes": 1, "batch_size": 128,
        "local_batch": 128, "accumulation": 1, "total_progress": 1000.0, "throughput": 50.0, "goodput": 40.0,
    }  # fmt: skip
    return Report(generation=generation, progress=progress, **{**given, **fields})


def result_of(answer: Future[T]) -> T:
    """The engine's answer, waited for."""
    return answer.result(PATIENCE_SECONDS)


class ManualClock:
    """Shows the time that it was last set to. An engine that waits for a later time waits until the clock is set."""

    def __init__(self, start: float = 0.0) -> None:
        self._time = start

    @property
    def time(self) -> float:
        """Seconds on this clock."""
        return self._time

    def now(self) -> float:
        """Seconds on this clock."""
        return self._time

    def seconds_until(self, at: float) -> float | None:
        """0 if that time has come; None if not, since it does not come by waiting."""
        return 0.0 if at <= self._time else None

    @property
    def jumping(self) -> None:
        """It never jumps."""
        return

    def set(self, time: float, engine: Engine | None = None) -> None:
        """Set the time. The `engine` that uses this clock sees the new time between two requests, never within one.

        The engine then does what is due, so that a test arranges everything else before this call.
        """

        def move() -> None:
            self._time = time

        move() if engine is None else engine.loop.move_clock(move)


class FakeBackend(BackendCapabilities):
    """Records its calls; replicas start and end when a test says so, or at once with `by_itself`.

    `launches`, `resizes` and `stops` have the calls in order. The next launch raises `refuse`, if it is set. `ran` has
    the seconds for which it says that jobs have run. One object may serve several engines one after the other, as
    processes outlive a service.
    """

    name = "fake"
    healthy = True
    restart_seconds = 30.0
    live_seconds = 30.0
    # Attributes instead of properties, so that tests can set them.
    head: str | None = None
    false_alarms: int | None = None
    refusals: int | None = None
    notice_seconds: float | None = None
    taken_back_seconds: float | None = None

    def __init__(self, nodes: Iterable[Node], clock: ManualClock | None = None, by_itself: bool = False) -> None:
        self.nodes = {node.id: node for node in nodes}
        self.launches: list[Launch] = []
        self.stops: list[tuple[str, int]] = []
        self.resizes: list[Launch] = []
        self.forgotten: list[str] = []
        self.refuse: str | None = None
        self.log_text = ""
        self.ran: dict[str, float] = {}
        self._clock = clock or ManualClock()
        self._by_itself = by_itself
        self._entries: dict[str, Running] = {}
        self._listener: Listener | None = None
        self._lock = threading.RLock()

    def start(self, listener: Listener) -> None:
        """Send events to this listener from now on."""
        self._listener = listener

    def inventory(self) -> tuple[Node, ...]:
        """All nodes."""
        return tuple(self.nodes.values())

    def submit(self, launch: Launch) -> None:
        """Record a launch, once for each job and generation."""
        with self._lock:
            if self.refuse is not None:
                why, self.refuse = self.refuse, None
                raise BackendFailed(why)
            known = self._entries.get(launch.job_id)
            if known is not None and known.generation >= launch.generation:
                return
            self.launches.append(launch)
            self._entries[launch.job_id] = Running(launch.job_id, launch.generation, "running")
        if self._by_itself:
            self.started(launch.job_id)

    def resize(self, launch: Launch) -> None:
        """Record a resize, once for each job and generation."""
        with self._lock:
            known = self._entries.get(launch.job_id)
            if known is not None and known.generation >= launch.generation:
                return
            self.resizes.append(launch)
            self._entries[launch.job_id] = Running(launch.job_id, launch.generation, "running")
        if self._by_itself:
            self.started(launch.job_id)

    def stop(self, job_id: str, generation: int, grace_seconds: float) -> None:
        """Mark a job as stopping."""
        with self._lock:
            self.stops.append((job_id, generation))
            known = self._entries.get(job_id)
            if known is None or known.state == "ended" or known.generation > generation:
                return
            self._entries[job_id] = replace(known, state="stopping")
        if self._by_itself:
            self.ended(job_id, "stopped")

    def running(self) -> tuple[Running, ...]:
        """All jobs that were not forgotten."""
        return tuple(self._entries.values())

    def logs(self, job_id: str, replica: int = 0, offset: int = 0, limit: int = 65536) -> LogChunk:
        """A piece of `log_text`, which is the log of every replica."""
        size = len(self.log_text)
        begin = max(size + offset, 0) if offset < 0 else min(offset, size)
        end = min(begin + limit, size)
        return LogChunk(self.log_text[begin:end], end, end == size)

    def forget(self, job_id: str) -> None:
        """Forget a job."""
        with self._lock:
            self.forgotten.append(job_id)
            self._entries.pop(job_id, None)

    def close(self) -> None:
        """Send no more events."""
        self._listener = None

    # What tests make happen

    def send(self, event: BackendEvent) -> None:
        """Send an event to the listener, if there is one."""
        if (listener := self._listener) is not None:
            listener(event)

    def ran_seconds(self, job_id: str, generation: int) -> float | None:
        """The value that the test has set."""
        return self.ran.get(job_id)

    def started(self, job_id: str) -> None:
        """Report that the newest replicas of a job run."""
        self.send(ReplicasStarted(self._clock.now(), job_id, self._entries[job_id].generation))

    def lost(self, job_id: str, replicas: tuple[int, ...], remaining: Placement, detail: str = "") -> None:
        """Report that some of the newest replicas of a job are lost, and the others wait."""
        generation = self._entries[job_id].generation
        self.send(ReplicasLost(self._clock.now(), job_id, generation, replicas, remaining, detail))

    def ended(self, job_id: str, outcome: Outcome, detail: str = "") -> None:
        """Report that the newest replicas of a job have ended."""
        with self._lock:
            known = self._entries[job_id]
            end = ReplicasEnded(self._clock.now(), job_id, known.generation, outcome, detail=detail)
            self._entries[job_id] = Running(job_id, known.generation, "ended", end)
        self.send(end)

    def node_up(self, node: Node) -> None:
        """Add or change a node, and report it."""
        self.nodes[node.id] = node
        self.send(NodeUp(self._clock.now(), node))

    def node_down(self, node_id: str) -> None:
        """Remove a node, and report it."""
        self.nodes.pop(node_id, None)
        self.send(NodeDown(self._clock.now(), node_id))
