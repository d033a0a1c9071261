"""Scores of ETAs: intervals are kept when they are made, and compared with the true end later."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from pollux.controller import ENDED, JobRecord, JobState
from pollux.controller.explanations.eta import EtaScore, Interval, widening
from pollux.service.views.stored_rows import sound_intervals
from pollux.store.protocol import Telemetry, TelemetryRow
from pollux.wire.status import Eta

__all__ = ["EtaBook"]

_MARKS = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Shares of a job's progress at which its interval is kept."""


# Past predictions that decide how far the next is widened: enough for a quantile, few enough to follow changes.
_REMEMBERED = 60

_NONE = {"predictions": 0, "covered": None, "relative_width": None, "median_error": None}


class EtaBook:
    """Intervals by job, and the score of every job that has succeeded.

    Shown intervals are widened by how far past intervals fell short (`widening`), and by how far the job's own earlier
    ones fall short of the present expectation. Scores keep the misses of the intervals before that.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._pending: list[TelemetryRow] = []
        # Replaced, never changed, since other threads read it.
        self._misses: tuple[float, ...] = ()
        self._issued, self._scores = sound_intervals(telemetry)
        for score in self._scores.values():
            self._learn(score)

    def note(
        self, record: JobRecord, predict: Callable[[], Eta | None], report: TelemetryRow | None, now: float
    ) -> None:
        """Note the interval when the job has passed another mark; score them when it is done.

        `predict` returns the interval before it is widened.
        """
        job_id = record.spec.id
        if record.state in ENDED:
            issued = self._issued.pop(job_id, None)
            if issued and record.state is JobState.SUCCEEDED and record.ended_at is not None:
                self._scores[job_id] = _score(issued, record.ended_at)
                self._learn(self._scores[job_id])
                self._add_row(job_id, now, {"score": self._scores[job_id]})
            return
        share = _share(report)
        issued = self._issued.get(job_id, [])
        if share is None or sum(mark <= share for mark in _MARKS) <= len(issued):
            return
        raw = predict()
        if raw is not None:
            eta = self.widened(job_id, raw, now)
            noted = {"at": now, "progress": share, "low": eta.low, "high": eta.high, "current": eta.current}
            self._issued[job_id] = [*issued, {**noted, "raw_low": raw.low, "raw_high": raw.high}]
            self._add_row(job_id, now, {"issued": list(self._issued[job_id])})

    def widened(self, job_id: str, eta: Eta, now: float) -> Eta:
        """The widened interval at `now`. May be called from any thread."""
        expected = eta.current if eta.current is not None else (eta.low + eta.high) / 2
        own = [_before_widening(each).miss(expected) for each in self._issued.get(job_id, [])]
        factor = max(widening(self._misses), widening(own))
        found = Interval(now, eta.low, eta.high).widened(factor)
        return Eta(found.low, found.high, eta.current)

    def _learn(self, score: Mapping[str, Any]) -> None:
        self._misses = (*self._misses, *score.get("misses", ()))[-_REMEMBERED:]

    def _add_row(self, job_id: str, now: float, values: Mapping[str, Any]) -> None:
        self._pending.append(TelemetryRow(job_id, now, "eta", values))

    def pop_pending(self) -> list[TelemetryRow]:
        """Rows to write with the next measurements; each is returned once."""
        pending, self._pending = self._pending, []
        return pending

    def forget(self, job_id: str) -> None:
        """Drop a job's intervals and score."""
        self._issued.pop(job_id, None)
        self._scores.pop(job_id, None)

    def quality(self, job_id: str) -> dict[str, Any]:
        """Number of a job's intervals, share that held its end, and median relative error; None before its end."""
        score = self._scores.get(job_id, _NONE)
        return {name: score.get(name) for name in _NONE}

    def overall(self) -> dict[str, Any]:
        """The same over all jobs that have succeeded."""
        scores = [score for score in list(self._scores.values()) if score["predictions"]]
        count = sum(score["predictions"] for score in scores)
        errors = [score["median_error"] for score in scores if score["median_error"] is not None]
        return {
            "jobs": len(scores),
            "predictions": count,
            "covered": _mean(scores, "covered"),
            "relative_width": _mean(scores, "relative_width"),
            "median_error": statistics.median(errors) if errors else None,
            "widened_by": widening(self._misses),
        }


def _mean(scores: list[dict[str, Any]], name: str) -> float | None:
    count = sum(score["predictions"] for score in scores)
    return sum(score[name] * score["predictions"] for score in scores) / count if count else None


def _share(report: TelemetryRow | None) -> float | None:
    if report is None:
        return None
    total, done = report.values.get("total_progress"), report.values.get("progress")
    return done / total if total and done is not None else None


def _before_widening(issued: Mapping[str, Any]) -> Interval:
    """An interval before it was widened; earlier versions did not widen."""
    return Interval(issued["at"], issued.get("raw_low", issued["low"]), issued.get("raw_high", issued["high"]))


def _score(issued: list[dict[str, Any]], ended_at: float) -> dict[str, Any]:
    score = EtaScore.of([Interval(each["at"], each["low"], each["high"]) for each in issued], ended_at)
    errors = [
        abs(each["current"] - ended_at) / (ended_at - each["at"])
        for each in issued
        if each["current"] is not None and ended_at > each["at"]
    ]
    return {
        "predictions": score.count if score else 0,
        "covered": score.coverage if score else None,
        "relative_width": score.relative_width if score else None,
        "median_error": statistics.median(errors) if errors else None,
        "misses": [_before_widening(each).miss(ended_at) for each in issued],
    }
