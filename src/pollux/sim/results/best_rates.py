"""The most progress that a job can make in a second, and in a GPU-second, in any configuration; bounds rest on it.

Every even split over nodes, and every measured placement, with every local batch and accumulation. Boxes of batches
are split until what they may hold is at most `TOLERANCE` above what was found; the answer has that much added.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from pollux.core import InvalidInput
from pollux.sim.applications.application import Application
from pollux.sim.simulation.jobs import split_or_singles

__all__ = ["TOLERANCE", "best_rates"]

FloatArray = npt.NDArray[np.float64]

TOLERANCE = 0.02
"""By what share the rates may be too high."""

_PER_OCTAVE = 1
# Up to so many nodes, all orders of GPUs per node are looked at for one that was not measured.
_ORDERED_NODES = 4

_Box = tuple[int, int, int, int]
"""Least and largest local batch, fewest and most local batches for each step."""


def best_rates(
    application: Application, num_nodes: int, gpus_per_node: int, requests: Sequence[tuple[int, int]]
) -> tuple[FloatArray, FloatArray]:
    """Progress per second, and per GPU-second, in each epoch; `requests` are (GPUs, total batch) that users asked for.

    No schedule runs faster, elastic or rigid, if step times do not dip between neighbouring batches that were
    tried: measured times are linear between measurements, which are all tried.
    """
    limits, fixed = application.limits, application.fixed
    asked = max((num_gpus for num_gpus, _ in requests), default=1)
    most = max(asked, limits.maximum // limits.local_min if fixed is None else fixed.num_gpus)
    nodes = min(num_nodes, application.max_nodes)
    search = _Search(application)
    most = min(most, nodes * gpus_per_node, limits.maximum)
    # One GPU and all of them first: what is good there rules out most of the others at once.
    for num_gpus in dict.fromkeys((1, most, *range(2, most))):
        for used in range(-(-num_gpus // gpus_per_node), min(nodes, num_gpus) + 1):
            for counts in _placements(application, used, num_gpus, gpus_per_node):
                if fixed is None:
                    search.boxes(counts)
                    continue
                for total in {fixed.batch_size, *(batch for _, batch in requests)}:
                    search.total(counts, total)
    return search.per_second * (1.0 + TOLERANCE), search.per_gpu_second * (1.0 + TOLERANCE)


def _placements(
    application: Application, num_nodes: int, num_gpus: int, gpus_per_node: int
) -> Iterator[tuple[int, ...]]:
    """The even split, all measured placements, and one that was not measured: it is interpolated."""
    few, more = divmod(num_gpus, num_nodes)
    yield (few,) * (num_nodes - more) + (few + 1,) * more
    known: Sequence[tuple[int, ...]] = getattr(application, "placements", ())
    alike = {p for p in known if (len(p), sum(p)) == (num_nodes, num_gpus) and max(p) <= gpus_per_node}
    yield from sorted(alike)
    if alike and num_nodes <= _ORDERED_NODES:
        every = product(range(1, gpus_per_node + 1), repeat=num_nodes)
        yield from [p for p in every if sum(p) == num_gpus and not alike & _rotations(p)][:1]


def _rotations(counts: tuple[int, ...]) -> set[tuple[int, ...]]:
    return {counts[i:] + counts[:i] for i in range(len(counts))}


def _split(box: _Box) -> list[_Box]:
    """Two parts of a box that cover it, by the longer side; none of a point."""
    low, high, fewest, most = box
    if low == high and fewest == most:
        return []
    if most * low > high * fewest or low == high:
        middle = math.isqrt(fewest * most)
        return [(low, high, fewest, middle), (low, high, middle + 1, most)]
    if high - low == 1:
        return [(low, low, fewest, most), (high, high, fewest, most)]
    middle = min(max(math.isqrt(low * high), low + 1), high - 1)
    return [(low, middle, fewest, most), (middle, high, fewest, most)]


class _Search:
    """The best rates so far, by epoch."""

    def __init__(self, application: Application) -> None:
        self.application, self.limits = application, application.limits
        self.per_second = np.zeros(len(application.progress))
        self.per_gpu_second = self.per_second.copy()
        self._known: dict[tuple[tuple[int, ...], int], tuple[float, float] | None] = {}
        limits = self.limits
        self._sizes = sorted({float(size) for size in (limits.initial, *application.batch_sizes, limits.maximum)})
        epochs = range(len(application.progress))
        table = [[application.gradient_statistics(size, epoch) for epoch in epochs] for size in self._sizes]
        self._sqr, self._var = np.moveaxis(np.array(table), 2, 0)
        count = max(math.ceil(_PER_OCTAVE * math.log2(limits.local_max)), 1) + 1
        tried = {round(batch) for batch in np.geomspace(1, limits.local_max, count).tolist()}
        measured: Sequence[int] = getattr(application, "local_batches", ())
        self._batches = sorted({b for b in tried | {limits.local_min, *measured} if b <= limits.local_max})

    def total(self, counts: tuple[int, ...], total: int) -> None:
        """Try one total batch."""
        with contextlib.suppress(InvalidInput):
            batch = split_or_singles(total, sum(counts), self.limits)
            self._point(counts, batch.local_batch, batch.accumulation + 1)

    def boxes(self, counts: tuple[int, ...]) -> None:
        """Try every local batch and accumulation on a placement."""
        most = self.limits.maximum // sum(counts) if self.limits.accumulation else 1
        repeats = [1 << i for i in range(most.bit_length())]
        boxes: list[_Box] = [
            (low, high, first, min(2 * first - 1, most))
            for low, high in zip(self._batches, [*self._batches[1:], self._batches[-1]], strict=True)
            for first in repeats
        ]
        while boxes:
            boxes += self._parts(counts, boxes.pop())

    def _parts(self, counts: tuple[int, ...], box: _Box) -> list[_Box]:
        """The parts of a box that may hold something better; tries its corner."""
        low, high, fewest, most = box
        num_gpus = sum(counts)
        times = [times for batch in {low, high} if (times := self._times(counts, batch)) is not None]
        if num_gpus * low * fewest > self.limits.maximum or not times:
            return []
        if len(times) == len({low, high}):
            step, grad = (min(each) for each in zip(*times, strict=True))
            gains = self._most_gains(num_gpus * low * fewest, min(num_gpus * high * most, self.limits.maximum))
            bound = gains / (step + (fewest - 1) * grad)
            if not self._is_better(bound, num_gpus, 1.0 + TOLERANCE):
                return []
            self._point(counts, low, fewest)
        return _split(box)

    def _times(self, counts: tuple[int, ...], local_batch: int) -> tuple[float, float] | None:
        """A step, and the part of it without synchronisation; None where that cannot run."""
        key = counts, local_batch
        if key not in self._known:
            self._known[key] = None
            with contextlib.suppress(InvalidInput):
                step, sync = self.application.step_and_sync_seconds(counts, local_batch)
                self._known[key] = step, step - sync
        return self._known[key]

    def _point(self, counts: tuple[int, ...], local_batch: int, repeats: int) -> None:
        times, num_gpus = self._times(counts, local_batch), sum(counts)
        if times is None:
            return
        total = num_gpus * local_batch * repeats
        rates = self._gains(total, total) / (times[0] + (repeats - 1) * times[1])
        np.maximum(self.per_second, rates, out=self.per_second)
        np.maximum(self.per_gpu_second, rates / num_gpus, out=self.per_gpu_second)

    def _is_better(self, rates: FloatArray, num_gpus: int, by: float) -> bool:
        return bool((rates > by * self.per_second).any() or (rates > by * num_gpus * self.per_gpu_second).any())

    def _gains(self, at: float, total: float) -> FloatArray:
        """Gains of a total batch in every epoch, by the gradient noise at the batch `at`."""
        low = max(bisect_left(self._sizes, at) - 1, 0)
        high = min(low + 1, len(self._sizes) - 1)
        width = self._sizes[high] - self._sizes[low]
        part = min(max((at - self._sizes[low]) / width, 0.0), 1.0) if width else 0.0
        sqr = (1.0 - part) * self._sqr[low] + part * self._sqr[high]
        var = (1.0 - part) * self._var[low] + part * self._var[high]
        scale = total / self.limits.initial
        found: FloatArray = (var + sqr) / (var / scale + sqr)
        return found

    def _most_gains(self, low: float, high: float) -> FloatArray:
        """Gains that no total batch between two exceeds: they grow with the batch and with var / sqr.

        That ratio rises or falls throughout between two recorded batches, where both are linear.
        """
        if high < self.limits.initial:
            return np.ones_like(self.per_second)
        found = self._gains(low, high)
        for at in (*(size for size in self._sizes if low < size < high), high):
            np.maximum(found, self._gains(at, high), out=found)
        return found
