"""Chooses the measurements of a series that are kept as they age."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_ROWS = 2000
"""The most rows of one job and kind."""

BETWEEN_THINNINGS = 64
"""Rows that a series gains before it is thinned again; a balance of time and size."""

# Pairs: the largest age, and the seconds between two rows up to that age. Each width divides the next, so that the
# first row of a wide interval is also the first of a narrow one, and is still there when it ages.
_TIERS = ((3600.0, 30.0), (86_400.0, 300.0), (math.inf, 3600.0))


def rows_to_keep(times: Sequence[float], most: int = MOST_ROWS) -> list[int]:
    """Indices of the rows to keep, for a series in order of time: the first of each interval, and the newest."""
    if not times:
        return []
    newest, stay, last = times[-1], [], None
    for index, at in enumerate(times):
        width = next(width for age, width in _TIERS if newest - at <= age)
        interval = (width, math.floor(at / width))
        if interval != last or index == len(times) - 1:
            stay.append(index)
        last = interval
    while len(stay) > most:
        half = len(stay) // 2
        stay = stay[:half:2] + stay[half:] if half > 1 else stay[-most:]
    return stay


def evenly(count: int, limit: int) -> list[int]:
    """At most `limit` of `count` indices at even distances, with the first and the last; for 1 only the last."""
    if limit < 1:
        return []
    if count <= limit:
        return list(range(count))
    if limit == 1:
        return [count - 1]
    return [round(index * (count - 1) / (limit - 1)) for index in range(limit)]
