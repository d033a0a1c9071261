"""The events of each job as lines for people, and their stream; made of the logged facts only."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pollux.controller import (
    DecisionMade,
    Event,
    GenerationEnded,
    GenerationShrunk,
    JobCancelled,
    JobFinished,
    JobLimitsChanged,
    JobPaused,
    JobRan,
    JobRecord,
    JobReported,
    JobResumed,
    JobRunning,
    JobsForgotten,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
    NodeSetAside,
    NodeTakenBack,
    QueueChanged,
    TimerFired,
    TimeSkipped,
)
from pollux.controller.explanations.explain import explain, gpus
from pollux.core import JobLimits, Placement, Reason

__all__ = ["Feed", "JobEvent", "JobEvents", "kind_of", "lines_of", "message"]

_KEPT_LINES = 100
_KEPT_MESSAGES = 4096
_ENDS = ("ended", "finished", "cancelled")


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One event of a job, or of the cluster (`job_id` None). `jobs` are the other jobs that it names."""

    at: float
    kind: str
    text: str
    job_id: str | None = None
    jobs: tuple[str, ...] = ()


_KINDS: dict[type[Event], str] = {
    JobSubmitted: "submitted",
    JobRunning: "running",
    JobReported: "reported",
    GenerationEnded: "ended",
    GenerationShrunk: "shrunk",
    TimerFired: "timer",
    JobFinished: "finished",
    JobCancelled: "cancelled",
    JobPaused: "paused",
    JobResumed: "resumed",
    JobLimitsChanged: "limits",
    JobsForgotten: "forgotten",
    NodeAdded: "node-added",
    NodeRemoved: "node-removed",
    NodeSetAside: "node-set-aside",
    NodeTakenBack: "node-taken-back",
    QueueChanged: "queue",
    DecisionMade: "decision",
}


def kind_of(event: Event) -> str:
    """The kind of an event, as streams and lists name it."""
    return _KINDS.get(type(event), "other")


def lines_of(event: Event) -> list[JobEvent]:
    """The lines of an event: one, or for a decision one for each job that it names."""
    if isinstance(event, DecisionMade):
        return [
            _line_of(event.at, job_id, placement, event.decision.reasons.get(job_id))
            for job_id, placement in event.decision.allocation.items()
        ]
    return [JobEvent(event.at, kind_of(event), _text(event), _job_of(event))]


def _line_of(at: float, job_id: str, placement: Placement, reason: Reason | None) -> JobEvent:
    text = f"given {gpus(placement.num_gpus)}: {placement}" if placement else "all GPUs taken back"
    if reason is None:
        return JobEvent(at, "placed", text, job_id)
    return JobEvent(at, "placed", f"{text}; {explain(reason, job_id)[0]}", job_id, reason.jobs)


def _span(limits: JobLimits) -> str:
    most = gpus(limits.max_gpus)
    return most if limits.min_gpus == limits.max_gpus else f"{limits.min_gpus} to {most}"


def _replicas(count: int) -> str:
    return f"{count} replica goes" if count == 1 else f"{count} replicas go"


def _job_of(event: Event) -> str | None:
    if isinstance(event, JobSubmitted):
        return event.spec.id
    job_id: str | None = getattr(event, "job_id", None)
    return job_id


def _with_detail(text: str, detail: str) -> str:
    return f"{text}: {detail}" if detail else text


def _text_of_start(event: JobRunning) -> str:
    paused = "" if event.pause_seconds is None else f", {event.pause_seconds:.2g} s after their last step"
    again = " again" if event.generation > 1 and not paused else ""
    return f"replicas of generation {event.generation} started{again}{paused}"


def _text_of_loss(event: GenerationShrunk) -> str:
    left = f"{_replicas(event.placement.num_gpus)} of generation {event.generation} on without the others"
    return _with_detail(left, event.detail)


_TEXTS: Mapping[type[Event], Callable[[Any], str]] = {
    JobSubmitted: lambda event: f"submitted for {_span(event.spec.limits)}",
    JobRunning: _text_of_start,
    JobReported: lambda event: "its agent reported a change",
    GenerationEnded: lambda event: _with_detail(f"generation {event.generation} {event.outcome}", event.detail),
    GenerationShrunk: _text_of_loss,
    JobFinished: lambda event: _with_detail(event.outcome, event.detail),
    JobLimitsChanged: lambda event: f"may now hold {_span(event.limits)}",
    NodeAdded: lambda event: f"node '{event.node.id}' with {gpus(event.node.num_gpus)}",
    NodeRemoved: lambda event: f"node '{event.node_id}' is gone",
    NodeSetAside: lambda event: _with_detail(f"node '{event.node_id}' is set aside", event.why),
    NodeTakenBack: lambda event: f"node '{event.node_id}' is used again",
    QueueChanged: lambda event: (
        f"queue '{event.queue.name}' has weight {event.queue.weight:g}, quota {event.queue.gpu_quota}"
    ),
    TimeSkipped: lambda event: (
        f"the service was away for {event.seconds:.0f} s: jobs that have ended are kept for longer by as much"
        if event.away
        else f"the machine's clock went forward by {event.seconds:.0f} s that are not counted"
    ),
    JobRan: lambda event: f"its replicas have run for {event.seconds:.0f} s",
    JobsForgotten: lambda event: "jobs that ended long ago are forgotten",
    TimerFired: lambda event: "a pause or a time limit is over",
}


def _text(event: Event) -> str:
    text_of = _TEXTS.get(type(event))
    return f"{kind_of(event)} by its user" if text_of is None else text_of(event)


class JobEvents:
    """The last lines of each job; reports are left out, since a job has thousands."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[JobEvent]] = {}
        self._closed: set[str] = set()

    def add(self, event: Event) -> None:
        """Add an event."""
        if isinstance(event, JobReported | JobRan | TimerFired):
            return
        for line in lines_of(event):
            if line.job_id is not None:
                self._lines.setdefault(line.job_id, deque(maxlen=_KEPT_LINES)).append(line)

    def close(self, record: JobRecord) -> None:
        """Add an end that no fact states: by a time limit, or by the failure of a job that it must run after."""
        job_id, at = record.spec.id, record.ended_at
        if at is None or job_id in self._closed:
            return
        self._closed.add(job_id)
        lines = self._lines.setdefault(job_id, deque(maxlen=_KEPT_LINES))
        if any(line.kind in _ENDS and line.at == at for line in lines):
            return
        later = [line for line in lines if line.at > at]
        for _ in later:
            lines.pop()
        said = str(record.state) + (f": {record.detail}" if record.detail else "")
        lines.extend((JobEvent(at, "finished", said, job_id, record.spec.after), *later))

    def forget(self, job_id: str) -> None:
        """Drop a job's lines."""
        self._lines.pop(job_id, None)
        self._closed.discard(job_id)

    def of(self, job_id: str) -> tuple[JobEvent, ...]:
        """A job's last lines, oldest first."""
        return tuple(self._lines.get(job_id, ()))


def message(revision: int, event: Event) -> bytes:
    """An event as a server-sent message; the revision is its id."""
    data = {
        "revision": revision,
        "at": event.at,
        "kind": kind_of(event),
        "lines": [
            {"job_id": line.job_id, "kind": line.kind, "text": line.text, "jobs": line.jobs} for line in lines_of(event)
        ],
    }
    return f"id: {revision}\nevent: {kind_of(event)}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()


class Feed:
    """The newest messages, and listeners for new ones. Thread-safe; listeners must return at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=_KEPT_MESSAGES)
        self._listeners: dict[int, Callable[[bytes], None]] = {}
        self._next = 0

    def publish(self, entries: Iterable[tuple[int, Event]]) -> None:
        """Send messages to all listeners; called by the engine's thread once the facts are durable."""
        messages = [(revision, message(revision, event)) for revision, event in entries]
        with self._lock:
            self._recent.extend(messages)
            listeners = list(self._listeners.values())
        for listener in listeners:
            for _, text in messages:
                listener(text)

    def subscribe(self, listener: Callable[[bytes], None], after: int | None) -> tuple[int, list[bytes] | None]:
        """A number to unsubscribe with, and the messages since `after`; None if they are no longer kept.

        No message is missing or repeated between the returned ones and those that the listener gets.
        """
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._listeners[number] = listener
            if after is None:
                return number, []
            missed = [text for revision, text in self._recent if revision > after]
            newest = self._recent[-1][0] if self._recent else 0
            oldest = self._recent[0][0] if self._recent else newest + 1
            return number, None if after + 1 < oldest else missed

    @property
    def num_listeners(self) -> int:
        """How many listeners there are."""
        return len(self._listeners)

    def start_at(self, revision: int, event: Event) -> None:
        """Add an event that was in the log before the service started, so that streams can resume after a restart."""
        with self._lock:
            self._recent.append((revision, message(revision, event)))

    def unsubscribe(self, number: int) -> None:
        """Remove a listener."""
        with self._lock:
            self._listeners.pop(number, None)
