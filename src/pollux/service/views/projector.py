"""Updates the views from the facts: the board, job events, newest reports, and scores of ETAs.

The engine's thread calls it; other threads read the board.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import replace

from pollux.controller import (
    ENDED,
    HOLDING,
    Controller,
    DecisionMade,
    Event,
    JobRan,
    JobRecord,
    JobReported,
    JobRunning,
    JobsForgotten,
    JobSubmitted,
)
from pollux.core import Snapshot
from pollux.service.views.eta_scores import EtaBook
from pollux.service.views.job_board import JobBoard, JobEntry, frozen
from pollux.service.views.job_events import Feed, JobEvents
from pollux.service.views.stored_rows import newest_reports
from pollux.service.views.timeline import Timeline
from pollux.store.protocol import Telemetry, TelemetryRow
from pollux.wire.status import NodeStatus, QueueStatus

__all__ = ["Projector", "nodes_of", "queues_of"]

_SURROUNDINGS_SECONDS = 5.0


class Projector:
    """Updates all views of jobs."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.board = JobBoard()
        self.job_events = JobEvents()
        self.timeline = Timeline()
        self.feed = Feed()
        self.etas = EtaBook(telemetry)
        self._snapshot: Snapshot | None = None
        self._newest, self._faults = newest_reports(telemetry)

    def project(
        self, events: Sequence[Event], rows: Sequence[TelemetryRow], controller: Controller, now: float, revision: int
    ) -> None:
        """Update the views with durable events and rows; `revision` is that of the last event."""
        for row in rows:
            if row.kind == "report":
                self._newest[row.job_id] = row
                self._faults.pop(row.job_id, None)
        if any(isinstance(event, JobsForgotten) for event in events):
            self._forget({entry.record.spec.id for entry in self.board.entries()} - controller.jobs.keys())
        for event in events:
            self._add(event)
        touched = _touched(events, rows)
        if touched is None:
            self.show_all(controller, now)
        elif touched:
            self.show([job_id for job_id in touched if job_id in controller.jobs], controller, now)
        self.feed.publish(zip(range(revision - len(events) + 1, revision + 1), events, strict=True))

    def replay(self, revision: int, event: Event) -> None:
        """Add an event that was in the log before the service started."""
        self._add(event)
        self.feed.start_at(revision, event)

    def _add(self, event: Event) -> None:
        self.job_events.add(event)
        self.timeline.add(event)

    def _forget(self, job_ids: Set[str]) -> None:
        self.board.remove(job_ids)
        for job_id in job_ids:
            self._newest.pop(job_id, None)
            self._faults.pop(job_id, None)
            self.job_events.forget(job_id)
            self.timeline.forget(job_id)
            self.etas.forget(job_id)

    def reported_done(self, job_id: str, generation: int) -> bool:
        """Whether the job's last report was of that generation, and said that it is done."""
        row = self._newest.get(job_id)
        return row is not None and bool(row.values.get("final")) and row.values.get("generation") == generation

    def show_all(self, controller: Controller, now: float) -> None:
        """Renew the entries of all jobs that have changed."""
        changed = [job_id for job_id, record in controller.jobs.items() if not self.board.shows(record)]
        self.show(changed, controller, now)
        self.timeline.set_nodes(((node.id, node.num_gpus) for node in controller.cluster.nodes), now)

    def show(self, job_ids: Iterable[str], controller: Controller, now: float) -> None:
        """Renew the entries of these jobs."""
        for job_id in job_ids:
            record = controller.jobs[job_id]
            row = self._newest.get(job_id)
            around = None if record.state in ENDED else self._surroundings(controller, now)
            known, at = (row.values, row.at) if row else ({}, None)
            entry = JobEntry(frozen(record), known, at, around, self.board.records, self.etas.widened)
            entry.fault = self._faults.get(job_id, "")
            self.board.put(entry)
            self.timeline.set_placement(record)
            self.job_events.close(record)
            self.etas.note(record, entry.raw_eta, row, now)

    def _surroundings(self, controller: Controller, now: float) -> Snapshot:
        """The snapshot of the other jobs that an ETA depends on; it may be some seconds old."""
        known = self._snapshot
        if known is None or not 0.0 <= now - known.now < _SURROUNDINGS_SECONDS:
            known = self._snapshot = controller.snapshot(now)
        return replace(known, now=now)


def _names(event: Event) -> Collection[str] | None:
    """The jobs that an event may have changed; None: any job."""
    if isinstance(event, JobSubmitted):
        # If it must run after a job that has failed, it ends at once, and so may others.
        return None if event.spec.after else (event.spec.id,)
    if isinstance(event, JobReported | JobRan | JobRunning):
        return (event.job_id,)
    if isinstance(event, DecisionMade):
        return (*event.decision.allocation, *event.decision.reasons)
    return None


def nodes_of(controller: Controller) -> tuple[NodeStatus, ...]:
    """All nodes, with the GPUs that jobs hold on them."""
    held: dict[str, dict[str, int]] = {node.id: {} for node in controller.cluster.nodes}
    for job_id, record in _holding(controller):
        for node_id, count in record.placement:
            held.setdefault(node_id, {})[job_id] = count
    return tuple(
        NodeStatus(
            node.id,
            node.num_gpus,
            node.gpu_type,
            sum(held[node.id].values()),
            held[node.id],
            node.schedulable and node.id not in controller.set_aside,
            controller.set_aside.get(node.id, ""),
        )
        for node in controller.cluster.nodes
    )


def queues_of(controller: Controller) -> tuple[QueueStatus, ...]:
    """All queues that were set or are in use."""
    used: dict[str, int] = {}
    jobs: dict[str, int] = {}
    for record in controller.jobs.values():
        if record.state in ENDED:
            continue
        name = record.spec.queue
        jobs[name] = jobs.get(name, 0) + 1
        used[name] = used.get(name, 0) + record.placement.num_gpus
    known = dict(controller.queues)
    names = sorted({*known, *jobs})
    return tuple(
        QueueStatus(
            name,
            known[name].weight if name in known else 1.0,
            known[name].gpu_quota if name in known else None,
            used.get(name, 0),
            jobs.get(name, 0),
        )
        for name in names
    )


def _holding(controller: Controller) -> Iterable[tuple[str, JobRecord]]:
    return ((job_id, record) for job_id, record in controller.jobs.items() if record.state in HOLDING)


def _touched(events: Sequence[Event], rows: Sequence[TelemetryRow]) -> dict[str, None] | None:
    """The jobs that these events may have changed, in order of submission; None: all jobs."""
    touched = dict.fromkeys(row.job_id for row in rows)
    for event in events:
        names = _names(event)
        if names is None:
            return None
        touched |= dict.fromkeys(names)
    return touched
