"""The timeline for a page: the jobs with most GPU-time one by one, all others together, with few points each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pollux.service.views.timeline import Changes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]

__all__ = ["MOST_INTERVALS", "MOST_JOBS", "view_of"]

MOST_JOBS = 200
"""The most jobs that are shown one by one."""

MOST_INTERVALS = 3000
"""The most intervals of all these jobs together."""

_MOST_REALLOCATIONS = 300
_MOST_CAPACITIES = 200
_BINS = 240
# Pictures are hardly wider; shorter intervals would not be visible.
_COLUMNS = 2000


def view_of(changes: Changes, since: float, until: float, limit: int) -> dict[str, Any]:
    """GPUs over time between two times, thinned to a bounded size; merged intervals keep their area."""
    import numpy as np

    who, start, end, gpus = _intervals(changes, since, until)
    spent: Floats = np.zeros(len(changes.jobs))
    np.add.at(spent, who, (end - start) * gpus)
    ranked = np.argsort(-spent, kind="stable")[: min(limit, MOST_JOBS)]
    top = ranked[spent[ranked] > 0.0]
    shown = np.isin(who, top)
    rows = _rows(changes, top, spent, _thinned(who[shown], start[shown], end[shown], gpus[shown], since, until))
    rest = ~shown
    if rest.any():
        intervals = _summed(start[rest], end[rest], gpus[rest], since, until)
        rows.append({"id": None, "name": "other", "gpu_seconds": _short(spent.sum() - spent[top].sum()),
                     "intervals": intervals})  # fmt: skip
    return {
        "since": since,
        "until": until,
        "jobs": rows,
        "num_jobs": int((spent > 0.0).sum()),
        "capacity": _capacity(changes, since, until),
        "reallocations": _reallocations(changes, {changes.jobs[number] for number in top.tolist()}, since, until),
    }


def _intervals(changes: Changes, since: float, until: float) -> tuple[Counts, Floats, Floats, Counts]:
    """Job number, begin, end and GPUs of every interval in the window in which a job held GPUs."""
    import numpy as np

    at = np.array(changes.at, dtype=np.float64)
    known = at < until
    at = at[known]
    who = np.array(changes.who, dtype=np.int64)[known]
    gpus = np.array(changes.gpus, dtype=np.int64)[known]
    order = np.argsort(who, kind="stable")
    at, who, gpus = at[order], who[order], gpus[order]
    end = np.full(len(at), until)
    follows = who[1:] == who[:-1]
    end[:-1][follows] = at[1:][follows]
    start, end = np.maximum(at, since), np.minimum(end, until)
    kept = (gpus > 0) & (end > start)
    return who[kept], start[kept], end[kept], gpus[kept]


def _thinned(
    who: Counts, start: Floats, end: Floats, gpus: Counts, since: float, until: float
) -> tuple[Counts, Floats, Floats, Floats]:
    """Merge neighbours that begin in the same column of the picture into one with their mean height."""
    import numpy as np

    width = max(until - since, 1e-9) / _COLUMNS
    while True:
        column = np.floor((start - since) / width)
        new = np.ones(len(who), dtype=bool)
        new[1:] = (who[1:] != who[:-1]) | (column[1:] != column[:-1])
        first = np.flatnonzero(new)
        if len(first) <= MOST_INTERVALS or width > until - since:
            break
        width *= 1.5
    if not len(first):
        return who, start, end, gpus.astype(np.float64)
    last = np.append(first[1:], len(who)) - 1
    area = np.add.reduceat((end - start) * gpus, first)
    begin, finish = start[first], end[last]
    mean = area / (finish - begin)
    return who[first], begin, finish, np.where(first == last, gpus[first], mean)


def _rows(
    changes: Changes, top: Counts, spent: Floats, thinned: tuple[Counts, Floats, Floats, Floats]
) -> list[dict[str, Any]]:
    found: dict[int, list[list[float]]] = {number: [] for number in top.tolist()}
    for number, start, end, gpus in zip(*(column.tolist() for column in thinned), strict=True):
        found[number].append([round(start, 1), round(end, 1), _short(gpus)])
    rows = []
    for number, intervals in found.items():
        job_id = changes.jobs[number]
        rows.append({"id": job_id, "name": changes.names.get(job_id, job_id), "gpu_seconds": _short(spent[number]),
                     "intervals": intervals})  # fmt: skip
    return rows


def _summed(start: Floats, end: Floats, gpus: Counts, since: float, until: float) -> list[list[float]]:
    """The mean number of GPUs of many intervals together, in equal parts of the window."""
    import numpy as np

    edges = np.linspace(since, until, _BINS + 1)
    held = np.diff(_area_before(start, gpus, edges) - _area_before(end, gpus, edges)) / (edges[1] - edges[0])
    rows: list[list[float]] = []
    for left, right, value in zip(edges[:-1].tolist(), edges[1:].tolist(), np.round(held, 1).tolist(), strict=True):
        if rows and rows[-1][2] == value:
            rows[-1][1] = round(right, 1)
        else:
            rows.append([round(left, 1), round(right, 1), value])
    return [[left, right, _short(value)] for left, right, value in rows if value > 0.0]


def _area_before(marks: Floats, gpus: Counts, edges: Floats) -> Floats:
    """Σ of gpus·max(edge − mark, 0) for every edge."""
    import numpy as np

    order = np.argsort(marks)
    marks, weights = marks[order], gpus[order].astype(np.float64)
    count = np.searchsorted(marks, edges)
    total = np.concatenate(([0.0], np.cumsum(weights)))
    moment = np.concatenate(([0.0], np.cumsum(weights * (marks - edges[0]))))
    found: Floats = (edges - edges[0]) * total[count] - moment[count]
    return found


def _capacity(changes: Changes, since: float, until: float) -> list[list[float]]:
    before = [entry for entry in changes.capacity if entry[0] <= since]
    inside = [entry for entry in changes.capacity if since < entry[0] <= until]
    step = max(-(-len(inside) // _MOST_CAPACITIES), 1)
    # The last of each group, so that the newest is always there.
    thinned = inside[(len(inside) - 1) % step :: step] if inside else []
    first = [[since, before[-1][1]]] if before else []
    return [*first, *([round(at, 1), total] for at, total in thinned)]


def _reallocations(changes: Changes, shown: set[str], since: float, until: float) -> list[dict[str, Any]]:
    """The newest re-allocations of the jobs that are shown."""
    found = [
        {"at": round(each.at, 1), "job": each.job_id, "from": each.before, "to": each.after, "reason": each.reason}
        for each in changes.reallocations
        if since <= each.at <= until and each.job_id in shown
    ]
    return found[-_MOST_REALLOCATIONS:]


def _short(value: float) -> float:
    """A number with few digits; whole numbers as such."""
    rounded = round(float(value), 2)
    return int(rounded) if rounded == int(rounded) else rounded
