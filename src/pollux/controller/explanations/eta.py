"""When a job will end: an interval from its model and the GPUs that it may get, and scores of past intervals.

Pure: uses a record and a snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from pollux.controller.state.lifecycle import ENDED, JobState
from pollux.controller.state.records import JobRecord
from pollux.core import GoodputFunction, JobLimits, JobView, Placement, Snapshot
from pollux.policies.packing.empty_cluster import Whole

__all__ = ["NOMINAL", "EtaScore", "EtaSeconds", "Interval", "Uncertainty", "eta", "fair_gpus", "most_gpus", "widening"]

NOMINAL = 0.9
"""The share of intervals that should hold the true end."""


# How many jobs are followed in a chain where each waits for the next; longer chains have no useful estimate.
_MOST_LINKS = 16


# Shorter times count as this one; milliseconds do not matter here.
_LEAST_SECONDS = 1.0
# An interval ten times as wide on both sides says nothing any more.
_MOST_WIDENING = 10.0


class EtaSeconds(NamedTuple):
    """Seconds from now: on the GPUs that the job holds (None: it holds none), at best, and at worst."""

    current: float | None
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """Assumed relative error of a prediction: `least`, plus `first`, which halves every `half_life_seconds`."""

    least: float = 0.1
    first: float = 0.5
    half_life_seconds: float = 300.0

    def after(self, seconds: float) -> float:
        """The relative error once a job has trained for `seconds`."""
        return float(self.least + self.first * 0.5 ** (max(seconds, 0.0) / self.half_life_seconds))


def fair_gpus(snapshot: Snapshot, record: JobRecord) -> int:
    """The cluster's GPUs per job, rounded up, as in Eq. (G23); counts `record` even if the snapshot lacks it."""
    num_jobs = len(snapshot.jobs) + (not record.is_ready)
    return max(math.ceil(snapshot.cluster.num_gpus / max(num_jobs, 1)), 1)


def most_gpus(snapshot: Snapshot, limits: JobLimits, queue: str = "") -> int:
    """The most GPUs that a job could get alone, by its limits, the suitable nodes and its queue's quota."""
    found = Whole(snapshot.cluster).most(limits)
    known = snapshot.queues.get(queue)
    quota = math.inf if known is None or known.gpu_quota is None else known.gpu_quota
    most = int(min(found, limits.max_gpus, quota))
    return most if most >= limits.min_gpus else 0


def eta(
    record: JobRecord,
    snapshot: Snapshot,
    jobs: Mapping[str, JobRecord] | None = None,
    uncertainty: Uncertainty | None = None,
) -> EtaSeconds | None:
    """When the job ends, in seconds from the snapshot; None if it has ended, is paused, or this is unknown.

    `low` is the remaining work at the best goodput that the job could have alone; `high` at the goodput of its fair
    share or of what it holds, whichever is smaller; both are widened by the uncertainty. A job that holds no GPUs waits
    first: until the first job that its reason names ends, or until the last job that it must run after ends. The
    latter needs all `jobs`.
    """
    model, left = record.goodput, record.remaining
    if record.state in (*ENDED, JobState.PAUSED) or model is None or left is None:
        return None
    wait = _waiting_seconds(record, snapshot, jobs or {})
    best, worst = _rates(record, model, snapshot)
    if wait is None or best <= 0.0 or worst <= 0.0:
        return None
    error = (uncertainty or Uncertainty()).after(record.running_seconds(snapshot.now))
    low, high = (wait + left / best) * (1.0 - min(error, 1.0)), (wait + left / worst) * (1.0 + error)
    if not record.placement:
        return EtaSeconds(None, low, high + record.resize_cost_seconds)
    now = _rate(model, record.placement, snapshot)
    if now <= 0.0:
        return EtaSeconds(None, low, high)
    return EtaSeconds(left / now, min(low, left / now), max(high, left / now))


def _rates(record: JobRecord, model: GoodputFunction, snapshot: Snapshot) -> tuple[float, float]:
    """Goodput of the best placement alone, and of the fair share or the present placement, whichever is smaller."""
    limits, held = record.spec.limits, record.placement.num_gpus
    most = max(most_gpus(snapshot, limits, record.spec.queue), held)
    counts = {limits.min_gpus, most} | {2**i for i in range(most.bit_length()) if limits.min_gpus <= 2**i <= most}
    small = min(max(fair_gpus(snapshot, record), limits.min_gpus), max(most, 1))
    small = min(small, held) if held else small
    largest = _largest_nodes(snapshot, limits)
    best = max(_packed(model, count, largest) for count in counts)
    return best, min(_packed(model, small, largest), best)


@lru_cache(maxsize=100_000)
def _known_goodput(model: GoodputFunction, num_nodes: int, num_gpus: int, gpu_type: str) -> float:
    return model.goodput(num_nodes, num_gpus, gpu_type)


def _goodput(model: GoodputFunction, num_nodes: int, num_gpus: int, gpu_type: str) -> float:
    """Cached, since ETAs are read far more often than models change; not cached if a model has no hash."""
    try:
        return _known_goodput(model, num_nodes, num_gpus, gpu_type)  # type: ignore[arg-type]
    except TypeError:
        return model.goodput(num_nodes, num_gpus, gpu_type)


def _largest_nodes(snapshot: Snapshot, limits: JobLimits) -> dict[str, int]:
    """GPUs of the largest node of each suitable type."""
    largest: dict[str, int] = {}
    for node in snapshot.cluster.nodes:
        if node.num_gpus > largest.get(node.gpu_type, 0):
            largest[node.gpu_type] = node.num_gpus
    return {kind: gpus for kind, gpus in largest.items() if limits.takes_type(kind)}


def _packed(model: GoodputFunction, count: int, largest: Mapping[str, int]) -> float:
    """Goodput on as few nodes as can hold `count` GPUs, on the best type."""
    found = (_goodput(model, math.ceil(count / gpus), count, gpu_type) for gpu_type, gpus in largest.items())
    return max(found, default=0.0)


def _rate(model: GoodputFunction, placement: Placement, snapshot: Snapshot) -> float:
    node = snapshot.cluster.by_id.get(placement.shares[0][0])
    return _goodput(model, placement.num_nodes, placement.num_gpus, "" if node is None else node.gpu_type)


def _waiting_seconds(
    record: JobRecord, snapshot: Snapshot, jobs: Mapping[str, JobRecord], links: int = _MOST_LINKS
) -> float | None:
    """How long a job without GPUs is expected to wait; None if that depends on something unknown."""
    if record.placement:
        return 0.0
    if record.waiting_for:
        ends = [_follows(jobs.get(job_id), snapshot, jobs, links - 1) for job_id in record.waiting_for]
        known = [end for end in ends if end is not None]
        return max(known) if len(known) == len(ends) else None
    ends = [_ends_in(other, snapshot) for other in _in_the_way(record, snapshot, jobs)]
    pause = 0.0 if record.eligible_at is None else max(record.eligible_at - snapshot.now, 0.0)
    return pause + min((end for end in ends if end is not None), default=0.0)


def _in_the_way(
    record: JobRecord, snapshot: Snapshot, jobs: Mapping[str, JobRecord]
) -> Sequence[JobRecord] | Sequence[JobView]:
    """The jobs that a job's reason names: their records, or without `jobs` their views in the snapshot."""
    names = () if record.reason is None else record.reason.jobs
    if jobs or not names:
        return [jobs[job_id] for job_id in names if job_id in jobs]
    return [view for view in snapshot.jobs if view.id in names]


def _follows(record: JobRecord | None, snapshot: Snapshot, jobs: Mapping[str, JobRecord], links: int) -> float | None:
    """When a predecessor of another job ends; at its fair share if it holds no GPUs."""
    if record is None or not links or record.goodput is None or record.remaining is None:
        return None
    wait, worst = _waiting_seconds(record, snapshot, jobs, links), _rates(record, record.goodput, snapshot)[1]
    return None if wait is None or worst <= 0.0 else wait + record.remaining / worst


def _ends_in(other: JobRecord | JobView, snapshot: Snapshot) -> float | None:
    """When a job ends if it keeps its GPUs."""
    placement = other.placement if isinstance(other, JobRecord) else snapshot.placement(other.id)
    if not placement or other.goodput is None or other.remaining is None:
        return None
    rate = _rate(other.goodput, placement, snapshot)
    return other.remaining / rate if rate > 0.0 else None


@dataclass(frozen=True, slots=True)
class Interval:
    """A past prediction: when it was made, and the times between which the job was to end."""

    issued_at: float
    low: float
    high: float

    def miss(self, ended_at: float) -> float:
        """The logarithm of the factor by which the interval was too narrow for that end.

        max(log(low/t), log(t/high)) in times since the issue, t being the end; below 0 if the end lies inside.
        """
        left = max(ended_at - self.issued_at, _LEAST_SECONDS)
        low = max(self.low - self.issued_at, _LEAST_SECONDS)
        high = max(self.high - self.issued_at, _LEAST_SECONDS)
        return max(math.log(low / left), math.log(left / high))

    def widened(self, factor: float) -> Interval:
        """With `low` nearer and `high` farther by that factor, both counted from the issue."""
        at = self.issued_at
        return Interval(at, at + (self.low - at) / factor, at + (self.high - at) * factor)


def widening(misses: Iterable[float]) -> float:
    """The factor, at least 1, by which past intervals must be widened so that `NOMINAL` of them hold their ends.

    exp of the ⌈(n+1)·NOMINAL⌉-th smallest of n misses, or of the largest: split conformal prediction, which holds for
    the next interval if its error is like those before.
    """
    found = sorted(misses)
    if not found:
        return 1.0
    rank = min(math.ceil((len(found) + 1) * NOMINAL), len(found))
    return min(math.exp(max(found[rank - 1], 0.0)), _MOST_WIDENING)


@dataclass(frozen=True, slots=True)
class EtaScore:
    """How good intervals were: how many, the share that held the true end, and their mean width.

    The width is relative to the true time left when they were made.
    """

    count: int
    coverage: float
    relative_width: float

    @classmethod
    def of(cls, intervals: Iterable[Interval], ended_at: float) -> EtaScore | None:
        """The score of one job's intervals; None if none was made before its end."""
        judged = [interval for interval in intervals if interval.issued_at < ended_at]
        if not judged:
            return None
        hits = sum(interval.low <= ended_at <= interval.high for interval in judged)
        widths = [(interval.high - interval.low) / (ended_at - interval.issued_at) for interval in judged]
        return cls(len(judged), hits / len(judged), sum(widths) / len(judged))

    @classmethod
    def together(cls, scores: Iterable[EtaScore]) -> EtaScore | None:
        """The score of several jobs' intervals as one; None for no scores."""
        found = list(scores)
        count = sum(score.count for score in found)
        if not count:
            return None
        coverage = sum(score.count * score.coverage for score in found) / count
        return cls(count, coverage, sum(score.count * score.relative_width for score in found) / count)
