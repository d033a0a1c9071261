"""The board: one entry for each job, written by the engine's thread and read by any thread.

Entries hold copies, so that readers never see a record in the middle of a change.
"""

from __future__ import annotations

import copy
import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pollux.controller import ENDED, HOLDING, JobRecord, JobState
from pollux.controller.explanations.explain import explain_cost
from pollux.controller.state.costs import medians
from pollux.core import Snapshot
from pollux.core.errors import InvalidInput, UnknownName
from pollux.service.views.estimates import estimate, explained
from pollux.wire import codec
from pollux.wire.status import Eta, JobStatus

__all__ = ["Explained", "JobBoard", "JobEntry", "frozen"]

# During a resize, its earlier replicas may still report.
_STARTED = (JobState.STARTING, JobState.RUNNING)
_ACTIVE = "active"
# What working out one job's figures from numbers that do not fit may raise.
_MISFITS = (ArithmeticError, ValueError, TypeError, LookupError, AttributeError, InvalidInput)
_T = TypeVar("_T")
_log = logging.getLogger("pollux.service")


@dataclass(frozen=True, slots=True)
class Explained:
    """The part of an explanation that depends on the job's record alone; `explanations` makes the whole text."""

    cause: str
    next_step: str
    jobs: tuple[str, ...]
    cost: str


@dataclass(slots=True)
class JobEntry:
    """A copy of one job's record, its newest report, and its encoded status."""

    record: JobRecord
    report: Mapping[str, Any]
    reported_at: float | None
    around: Snapshot | None
    others: Mapping[str, JobRecord] = field(default_factory=dict)
    widened: Callable[[str, Eta, float], Eta] | None = None
    rendered: bytes = b""
    fault: str = ""
    _explained: Explained | None = None

    def work_out(self, figure: str, work: Callable[[], _T]) -> _T | None:
        """The result of `work`; None if it fails for this job's numbers, which is noted in the entry."""
        try:
            return work()
        except _MISFITS as error:
            if not self.fault:
                _log.exception("job '%s': its %s cannot be computed", self.record.spec.id, figure)
            self.fault = f"its {figure} cannot be computed ({error}); the service's log has the details"
            return None

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.record.state in ENDED

    def eta(self) -> Eta | None:
        """The expected end at its last change, as an interval widened by the errors of past ones."""
        eta = self.raw_eta()
        if eta is None or self.around is None or self.widened is None:
            return eta
        return self.widened(self.record.spec.id, eta, self.around.now)

    def raw_eta(self) -> Eta | None:
        """The expected end by the job's model alone; computed on demand, since that takes a while."""
        known = self.record.goodput is not None and self.record.remaining is not None
        if self.around is None or self.ended or not known:
            return None
        around = self.around
        return self.work_out("ETA", lambda: estimate(self.record, around, self.others))

    def status(self, now: float, fairness: float | None = None) -> JobStatus:
        """The whole status at `now`; `fairness` is separate, since it depends on all other jobs.

        Where it cannot be made of the job's report, it is made without that, and says so.
        """
        return self._encoded(now, fairness)[0]

    def _encoded(self, now: float, fairness: float | None) -> tuple[JobStatus, dict[str, Any]]:
        """The status, and the same as JSON values."""

        def made(report: Mapping[str, Any]) -> tuple[JobStatus, dict[str, Any]]:
            status = self._status(now, report, fairness)
            return status, codec.encode(status)

        return self.work_out("status", lambda: made(self.report)) or made({})

    def _status(self, now: float, report: Mapping[str, Any], fairness: float | None) -> JobStatus:
        record = self.record
        spec, request = record.spec, record.spec.request
        total, done = report.get("total_progress"), report.get("progress")
        progress = min(max(done / total, 0.0), 1.0) if total and done is not None else None
        if record.state is JobState.SUCCEEDED:
            progress = 1.0
        noise = report.get("noise")
        holds, eta = record.state in HOLDING, self.eta()
        return JobStatus(
            id=spec.id, name=request.name if request else spec.id, state=str(record.state), queue=spec.queue,
            priority=request.priority if request else "normal", submitted_at=record.submitted_at,
            min_gpus=spec.limits.min_gpus, max_gpus=spec.limits.max_gpus, gpus=record.placement.num_gpus,
            placement=dict(record.placement.shares), generation=record.generation, started_at=record.started_at,
            ended_at=record.ended_at, restarts=record.num_restarts, crashes=record.crashes, retries=spec.retries,
            rigid=request.is_rigid if request else spec.limits.pinned, after=spec.after,
            detail=record.detail or self.fault,
            batch_size=report.get("batch_size"), local_batch=report.get("local_batch"),
            accumulation=report.get("accumulation"), learning_rate_factor=report.get("learning_rate_factor"),
            throughput=report.get("throughput") if holds else None, efficiency=report.get("efficiency"),
            goodput=report.get("goodput") if holds else None, noise_scale=noise["scale"] if noise else None,
            loss=report.get("loss"), epoch=report.get("epoch"), progress=progress,
            eta=eta, reason=explained(record),
            resize_seconds=record.resize_cost_seconds, resize_kind=record.likely_kind,
            resize_costs=medians(record.costs), checkpoint_age_seconds=report.get("checkpoint_age_seconds"),
            checkpoint_error=report.get("checkpoint_error", ""),
            gpu_seconds=record.attained(now), reported_at=self.reported_at,
            outdated=self.outdated,
            fairness=fairness,
        )  # fmt: skip

    def explained(self) -> Explained:
        """The reason and the cost of a resize as sentences; made once for each entry."""
        if self._explained is None:
            reason, cost = explained(self.record), explain_cost(self.record)
            if reason is None:
                self._explained = Explained(self.record.detail or "no decision was made about it yet", "", (), cost)
            else:
                self._explained = Explained(reason.text, reason.next_step, reason.jobs, cost)
        return self._explained

    @property
    def outdated(self) -> bool:
        """Whether its newest report is from before it got its present GPUs."""
        at = self.reported_at
        return self.record.state in _STARTED and at is not None and at < self.record.held_since

    def json(self, now: float, fairness: float | None = None) -> bytes:
        """The encoded status; cached except for GPU-seconds and fairness, which change with time."""
        if not self.rendered:
            values = self._encoded(now, None)[1]
            del values["gpu_seconds"], values["fairness"]
            self.rendered = json.dumps(values, separators=(",", ":")).encode()[:-1]
        rho = b"null" if fairness is None else repr(fairness).encode()
        return b'%b,"gpu_seconds":%.3f,"fairness":%b}' % (self.rendered, self.record.attained(now), rho)


class _Records(Mapping[str, JobRecord]):
    """The entries as a mapping from job ids to records."""

    def __init__(self, entries: Mapping[str, JobEntry]) -> None:
        self._entries = entries

    def __getitem__(self, job_id: str) -> JobRecord:
        return self._entries[job_id].record

    def __iter__(self) -> Iterator[str]:
        # A copy made in one operation, since the engine's thread may add an entry meanwhile.
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)


class JobBoard:
    """The entries of all jobs in order of submission. One writer, any number of readers."""

    def __init__(self) -> None:
        self._entries: dict[str, JobEntry] = {}
        self._order: list[str] = []
        self._position: dict[str, int] = {}
        self.forgotten_gpu_seconds = 0.0
        # Jobs by state, so that a reader of a few waiting jobs need not visit all that have ended.
        self._groups: dict[str, set[str]] = {group: set() for group in (*JobState, _ACTIVE)}
        self._changes = 0
        self._sorted: dict[str, tuple[int, tuple[str, ...]]] = {}

    def put(self, entry: JobEntry) -> None:
        """Add a job, or replace its entry."""
        job_id, state = entry.record.spec.id, entry.record.state
        before = self._entries.get(job_id)
        self._entries[job_id] = entry
        if job_id not in self._position:
            self._position[job_id] = len(self._order)
            self._order.append(job_id)
        if before is None or before.record.state is not state:
            if before is not None:
                self._groups[before.record.state].discard(job_id)
            self._groups[state].add(job_id)
            (self._groups[_ACTIVE].discard if entry.ended else self._groups[_ACTIVE].add)(job_id)
            self._changes += 1

    def remove(self, job_ids: Set[str]) -> None:
        """Remove these jobs; a reader in the middle of the list goes on with those that are left."""
        order = [job_id for job_id in self._order if job_id not in job_ids]
        self._order, self._position = order, {job_id: index for index, job_id in enumerate(order)}
        for job_id in job_ids:
            entry = self._entries.pop(job_id, None)
            if entry is not None:
                self.forgotten_gpu_seconds += entry.record.attained(entry.record.ended_at or 0.0)
        for members in self._groups.values():
            members -= job_ids
        self._changes += 1

    def get(self, job_id: str) -> JobEntry:
        """A job's entry; UnknownName with similar names if there is none."""
        entry = self._entries.get(job_id)
        if entry is None:
            raise UnknownName("job", job_id[:80], self._near(job_id))
        return entry

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._entries

    @property
    def num_active(self) -> int:
        """How many jobs have not ended."""
        return len(self._groups[_ACTIVE])

    @property
    def records(self) -> Mapping[str, JobRecord]:
        """Every job's record in its newest entry."""
        return _Records(self._entries)

    def check(self, after: str | None) -> None:
        """Raise UnknownName for a page that starts after an unknown job."""
        if after is not None:
            self.get(after)

    def entries(
        self, after: str | None = None, state: str | None = None, active: bool | None = None
    ) -> Iterator[JobEntry]:
        """Entries in order of submission: those after the job `after`, in one state, not ended or ended only."""
        self.check(after)
        order: Sequence[str] = self._order
        begin = 0 if after is None else self._position.get(after, -1) + 1
        if state is not None or active:
            order = self._group(_ACTIVE if state is None else state)
            begin = bisect_right(order, begin - 1, key=self._place) if begin else 0
        for index in range(begin, len(order)):
            entry = self._entries.get(order[index])
            # It may have changed since the order was made, or be asked for by two filters at once.
            if entry is not None and _passes(entry, state, active):
                yield entry

    def _place(self, job_id: str) -> int:
        return self._position.get(job_id, len(self._order))

    def _group(self, name: str) -> Sequence[str]:
        """The jobs in a state, or all that have not ended, in order of submission; sorted again only after a change."""
        changes = self._changes
        known = self._sorted.get(name)
        if known is None or known[0] != changes:
            known = self._sorted[name] = changes, tuple(sorted(self._groups[name].copy(), key=self._place))
        return known[1]

    def shows(self, record: JobRecord) -> bool:
        """Whether a job's entry is current."""
        entry = self._entries.get(record.spec.id)
        return entry is not None and entry.record == record

    def _near(self, job_id: str) -> list[str]:
        # With thousands of jobs, an error with all names would be long, and slow to make.
        alike = [known for known in self._order if known[:3] == job_id[:3]]
        return (alike or self._order)[-8:]


def frozen(record: JobRecord) -> JobRecord:
    """A copy of the record, which later changes do not affect."""
    return copy.copy(record)


def _passes(entry: JobEntry, state: str | None, active: bool | None) -> bool:
    return state in (None, entry.record.state) and (active is None or entry.ended is not active)
