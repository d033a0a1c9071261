"""What the losses of a run say about its predicted progress: at each change of batch, and against a reference run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pollux.agent.reporting.receipt_row import ReceiptRow

__all__ = ["realised_against", "realised_at_changes"]

_JUDGED_CHANGES = 20
_ROWS_ASIDE = 100
_FEWEST_ASIDE = 8
# Rows further away from a change than this part of the change's progress are left out: over a longer range a loss curve
# is no parabola, and the interval would miss the true ratio.
_SPAN_ASIDE = 0.4
_RATIOS = np.geomspace(0.2, 5.0, 81)
_COMPARED_POINTS = 20
_SMOOTHED_ROWS = 4

Floats = NDArray[np.float64]


def realised_at_changes(rows: Sequence[ReceiptRow]) -> Iterator[dict[str, Any]]:
    """How fast the loss fell after each of the last 20 changes of the total batch, relative to the prediction."""
    edges = [index for index in range(1, len(rows)) if rows[index].total_batch != rows[index - 1].total_batch]
    bounds = [0, *edges, len(rows)]
    for number, edge in list(enumerate(edges, start=1))[-_JUDGED_CHANGES:]:
        before = rows[max(bounds[number - 1], edge - _ROWS_ASIDE) : edge]
        after = rows[edge : min(bounds[number + 1], edge + _ROWS_ASIDE)]
        ratio, low, high = _realised_ratio(before, after)
        yield {
            "step": rows[edge].step,
            "progress": rows[edge].progress,
            "from_batch": rows[edge - 1].total_batch,
            "to_batch": rows[edge].total_batch,
            "realised_over_predicted": ratio,
            "low": low,
            "high": high,
        }


def _realised_ratio(
    before: Sequence[ReceiptRow], after: Sequence[ReceiptRow]
) -> tuple[float | None, float | None, float | None]:
    """The r with which loss = a + b·q + c·q² fits best, q being progress before the change and r·progress after it.

    The interval holds the r whose squared error is within the 95 % F bound of the least. Ratio and limits are None
    where there are few rows, progress was rolled back, or the interval is open at an end of [0.2, 5].
    """
    edge = after[0].progress
    used_before, used_after = _near(before, edge), _near(after, edge)
    if min(len(used_before), len(used_after)) < _FEWEST_ASIDE:
        return None, None, None
    used = used_before + used_after
    progress = np.array([row.progress - edge for row in used])
    is_after = np.arange(len(used)) >= len(used_before)
    loss = np.array([row.loss for row in used], dtype=float)
    span = float(np.abs(progress).max())
    if not (np.diff(progress) > 0.0).all():
        return None, None, None
    errors = np.array([_quadratic_error(np.where(is_after, r, 1.0) * progress / span, loss) for r in _RATIOS])
    best = int(errors.argmin())
    # 4 + 9/n is at least the 95 % quantile of F(1, n) from n = 12 on. A loss without any noise needs the last term.
    freedom = max(len(loss) - 4, 1)
    bound = errors[best] * (1.0 + (4.0 + 9.0 / freedom) / freedom) + 1e-12 * float(loss @ loss)
    inside = np.flatnonzero(errors <= bound)
    if inside[0] == 0 or inside[-1] == len(_RATIOS) - 1:
        return None, None, None
    return float(_RATIOS[best]), float(_RATIOS[inside[0]]), float(_RATIOS[inside[-1]])


def _near(rows: Sequence[ReceiptRow], edge: float) -> list[ReceiptRow]:
    """The rows with a loss that lie close enough to a change for a parabola to fit them."""
    return [row for row in rows if row.loss is not None and abs(row.progress - edge) <= _SPAN_ASIDE * edge]


def _quadratic_error(x: Floats, y: Floats) -> float:
    """The least sum of squares of y − (a + b·x + c·x²)."""
    columns = np.column_stack((np.ones_like(x), x, x * x))
    residual = y - columns @ np.linalg.lstsq(columns, y, rcond=None)[0]
    return float(residual @ residual)


def realised_against(rows: Sequence[ReceiptRow], reference: Mapping[str, Any]) -> dict[str, Any]:
    """The progress at which a reference run first had the losses of this run; `realised` is null where it had none."""
    other = [
        (float(progress), float(loss))
        for progress, loss in zip(reference["rows"]["progress"], reference["rows"]["loss"], strict=True)
        if loss is not None
    ]
    ours = [(row.progress, row.loss) for row in rows if row.loss is not None]
    if not other or not ours:
        return {"job": reference.get("job"), "points": []}
    lowest = np.minimum.accumulate(_smoothed([loss for _, loss in other]))
    losses = _smoothed([loss for _, loss in ours])
    chosen = np.unique(np.linspace(0, len(ours) - 1, _COMPARED_POINTS).round().astype(int))
    points = []
    for index in chosen.tolist():
        reached = np.flatnonzero(lowest <= losses[index])
        realised = other[int(reached[0])][0] if len(reached) else None
        points.append({"predicted": ours[index][0], "realised": realised, "loss": float(losses[index])})
    return {"job": reference.get("job"), "points": points}


def _smoothed(values: Sequence[float]) -> Floats:
    """A running median over four rows on either side."""
    reach = range(len(values))
    return np.array([np.median(values[max(index - _SMOOTHED_ROWS, 0) : index + _SMOOTHED_ROWS + 1]) for index in reach])
