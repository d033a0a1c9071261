"""The best batch of many jobs on many placements at once, in whole-array steps.

Takes the same decisions as `batch.best_batch`, in the same order; `batch` explains them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pollux.core.errors import InvalidInput
from pollux.goodput.batch import OVERLAP_EXPONENT
from pollux.goodput.corrected import CorrectedThroughput, place_factors
from pollux.goodput.model import GoodputModel
from pollux.goodput.throughput import Array, FloatArray, SyncBasis, ThroughputModel

__all__ = ["BatchTables", "batch_tables", "goodput_tables"]

_CELLS_AT_ONCE = 8192
_NEWTON_STEPS = 3
_SMALLEST_SIGNAL = 1e-30
_SMALLEST_EXTRA = 1e-30
_SMALLEST_SLOPE = 1e-30
_SMALLEST_BEND = 1e-300


@dataclass(frozen=True, slots=True, eq=False)
class BatchTables:
    """Per job and placement, shape [J, S]: useful samples per second, m and s; 0 where a job cannot run."""

    goodput: FloatArray
    local_batch: npt.NDArray[np.int64]
    accumulation: npt.NDArray[np.int64]


def goodput_tables(
    models: Sequence[GoodputModel], num_nodes: Array, num_gpus: Array, gpu_type: str = "", *, corrected: bool = True
) -> FloatArray:
    """The best goodput of every job on every placement (N[S], K[S]), shape [J, S]; 0 where it cannot run.

    Without `corrected`, models count as they were fitted, without corrections.
    """
    goodput = _tables(models, num_nodes, num_gpus, gpu_type)[0]
    times = [model.throughput_on(gpu_type) for model in models] if corrected else []
    if any(isinstance(model, CorrectedThroughput) for model in times):
        goodput /= place_factors(times, *_floats(num_nodes, num_gpus))
    return goodput


def batch_tables(models: Sequence[GoodputModel], num_nodes: Array, num_gpus: Array, gpu_type: str = "") -> BatchTables:
    """The best goodput of every job on every placement, with the batch that attains it."""
    goodput, local_batch, repeats = _tables(models, num_nodes, num_gpus, gpu_type)
    goodput /= place_factors([model.throughput_on(gpu_type) for model in models], *_floats(num_nodes, num_gpus))
    runs = goodput > 0.0
    return BatchTables(
        goodput,
        np.where(runs, local_batch, 0.0).astype(np.int64),
        np.where(runs, repeats - 1.0, 0.0).astype(np.int64),
    )


def _tables(
    models: Sequence[GoodputModel], num_nodes: Array, num_gpus: Array, gpu_type: str
) -> tuple[FloatArray, FloatArray, FloatArray]:
    nodes, gpus = _floats(num_nodes, num_gpus)
    if nodes.ndim != 1 or nodes.shape != gpus.shape:
        raise InvalidInput(
            f"num_nodes has shape {nodes.shape}, num_gpus {gpus.shape}: give two lists of the same length"
        )
    exists = (nodes >= 1.0) & (nodes <= gpus)
    gpus = np.where(exists, gpus, 1.0)
    jobs = _job_columns(models)
    times = [model.throughput_on(gpu_type) for model in models]
    compute, sync = _time_columns(times, nodes, gpus)
    results = np.zeros((3, len(models), len(gpus)))
    rows = max(1, _CELLS_AT_ONCE // max(1, len(gpus)))
    for start in range(0, len(models), rows):
        part = slice(start, start + rows)
        _Cells(jobs[:, part, None], compute[:, part, None], sync[part], gpus).solve(results[:, part])
    if not exists.all():
        results[:, :, ~exists] = 0.0
    return results[0], results[1], results[2]


def _floats(num_nodes: Array, num_gpus: Array) -> tuple[FloatArray, FloatArray]:
    return np.asarray(num_nodes, float), np.asarray(num_gpus, float)


def _job_columns(models: Sequence[GoodputModel]) -> FloatArray:
    """M0, maximum, local_min, local_max, accumulation, noise and signal of each job; shape [7, J]."""
    rows = [
        (
            limits.initial,
            limits.maximum,
            limits.local_min,
            limits.local_max,
            limits.accumulation,
            model.efficiency.noise_share,
        )
        for model in models
        for limits in (model.limits,)
    ]
    columns = np.empty((7, len(rows)))
    columns[:6] = np.array(rows, dtype=float).reshape(len(rows), 6).T
    columns[6] = np.maximum((1.0 - columns[5]) / columns[0], _SMALLEST_SIGNAL)
    return columns


def _time_columns(
    times: Sequence[ThroughputModel], nodes: FloatArray, gpus: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """αc, βc and γ of each job, shape [3, J], and T_sync of each job and placement, shape [J, S]."""
    groups: dict[SyncBasis | None, list[int]] = {}
    for index, model in enumerate(times):
        groups.setdefault(getattr(model, "sync_basis", None), []).append(index)
    compute = np.empty((3, len(times)))
    sync = np.empty((len(times), len(gpus)))
    for basis, members in groups.items():
        where: slice | list[int] = members if len(groups) > 1 else slice(None)
        if basis is not None:
            parameters = np.array([times[index].parameters for index in members])  # type: ignore[attr-defined]
            compute[:, where] = parameters[:, [0, 1, 6]].T
            sync[where] = parameters[:, 2:6] @ basis(nodes, gpus)
            continue
        for index in members:
            intercept = times[index].compute_seconds(0.0)
            compute[:, index] = intercept, times[index].compute_seconds(1.0) - intercept, times[index].overlap
            sync[index] = times[index].sync_seconds(nodes, gpus)
    return compute, sync


class _Cells:
    """Some jobs (rows) on all placements (columns). x = s + 1 throughout, as in `batch`."""

    def __init__(self, jobs: FloatArray, compute: FloatArray, sync: FloatArray, gpus: FloatArray) -> None:
        self.initial, self.maximum, self.local_min, self.local_max, accumulates, self.noise, self.signal = jobs
        self.accumulates = accumulates > 0.0
        self.intercept, slope, self.overlap = compute
        self.slope = np.maximum(slope, _SMALLEST_SLOPE)
        self.inverse_overlap = 1.0 / self.overlap
        self.sync = sync
        self.gpus = gpus
        self.single = gpus == 1.0

    def solve(self, results: FloatArray) -> None:
        """Write goodput, m and x of the best batches into `results` [3, J, S]."""
        repeats, low, high, other_local, other_repeats = self._candidates()
        local_batch = self._best_local(repeats, low, high)
        floor = np.maximum(np.floor(local_batch), low)
        best = self._goodput(floor, repeats)
        above = np.minimum(floor + 1.0, high)
        for candidate, candidate_repeats in ((above, repeats), (other_local, other_repeats)):
            goodput = self._goodput(candidate, candidate_repeats)
            better = goodput > best
            np.copyto(best, goodput, where=better)
            np.copyto(floor, candidate, where=better)
            if candidate_repeats is not repeats:
                np.copyto(repeats, candidate_repeats, where=better)
        results[0] = best
        results[1] = floor
        results[2] = repeats
        results[:, ~self._runs()] = 0.0

    def _runs(self) -> npt.NDArray[np.bool_]:
        enough = self.accumulates | (self.gpus * self.local_max >= self.initial)
        runs: npt.NDArray[np.bool_] = (self.local_min * self.gpus <= self.maximum) & enough
        return runs

    def _candidates(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        """x with the range of m to search in, and one other (m, x): full local batches, or M0 on one GPU."""
        smallest = np.maximum(self.initial, self.local_min * self.gpus)
        full_batch = self.gpus * self.local_max
        least = np.ceil(smallest / full_batch)
        np.copyto(least, np.maximum(least, 2.0), where=self.single)
        np.copyto(least, 1.0, where=~self.accumulates)
        full = np.floor(np.minimum(self._best_full_repeats(full_batch), self.maximum / full_batch))
        has_full = (full >= least) & self.accumulates & ~self.single
        repeats = np.where(has_full, full + 1.0, least)
        per_sample = self.gpus * repeats
        low = np.maximum(self.local_min, np.ceil(smallest / per_sample))
        high = np.minimum(self.local_max, np.floor(self.maximum / per_sample))
        empty = low > high
        if empty.any():
            self._fill_empty(empty, has_full, repeats, full, low, high)
        starts = self.single & (self.initial <= self.local_max)
        if starts.any():
            np.copyto(low, self.initial, where=starts & ~self.accumulates)
            np.copyto(high, self.initial, where=starts & ~self.accumulates)
        other_local = np.where(has_full, self.local_max, np.where(starts, self.initial, low))
        other_repeats = np.where(has_full, full, np.where(starts, 1.0, repeats))
        return repeats, low, high, other_local, other_repeats

    def _fill_empty(
        self,
        empty: npt.NDArray[np.bool_],
        has_full: npt.NDArray[np.bool_],
        repeats: FloatArray,
        full: FloatArray,
        low: FloatArray,
        high: FloatArray,
    ) -> None:
        """Where no m fits at x: the full batches if there are any, else the largest batch below maximum."""
        local_batch = np.minimum(self.local_max, np.floor(self.maximum / (self.gpus * repeats)))
        np.maximum(local_batch, 1.0, out=local_batch)
        fewer = np.minimum(repeats, np.floor(self.maximum / (self.gpus * local_batch)))
        np.copyto(repeats, np.where(has_full, full, np.maximum(fewer, 1.0)), where=empty)
        local_batch = np.where(has_full, self.local_max, local_batch)
        np.copyto(low, local_batch, where=empty)
        np.copyto(high, local_batch, where=empty)

    def _overlapped(self, compute: FloatArray) -> FloatArray:
        """(T_grad^γ + T_sync^γ)^(1/γ) of Eq. (G6)."""
        longer = np.maximum(compute, self.sync)
        ratio = np.minimum(compute, self.sync)
        ratio /= longer
        np.power(ratio, self.overlap, out=ratio)
        ratio += 1.0
        np.power(ratio, self.inverse_overlap, out=ratio)
        ratio *= longer
        return ratio

    def _best_full_repeats(self, full_batch: FloatArray) -> FloatArray:
        """x* of Eq. (G15)."""
        compute = self.intercept + self.slope * self.local_max
        exposed = self._overlapped(compute)
        exposed -= compute
        exposed *= self.noise / (compute * self.signal)
        exposed /= full_batch
        result: FloatArray = np.sqrt(exposed, out=exposed)
        return result

    def _goodput(self, local_batch: FloatArray, repeats: FloatArray) -> FloatArray:
        """Eq. (G11) at m and x."""
        compute = self.slope * local_batch
        compute += self.intercept
        step = self._overlapped(compute)
        step += (repeats - 1.0) * compute
        total = local_batch * repeats
        total *= self.gpus
        step *= self.noise + self.signal * total
        total /= step
        return total

    def _best_local(self, repeats: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
        """The real m in [low, high] with the highest goodput at x, Eq. (G14), by a few Newton steps in log m."""
        batch_weight = repeats * self.gpus
        batch_weight *= self.signal
        position = self._near_best_local(repeats, low, high, batch_weight)
        first, last = np.log(low), np.log(high)
        extra = repeats - 1.0
        for _ in range(_NEWTON_STEPS):
            position += self._newton_step(np.exp(position), extra, batch_weight)
            np.minimum(position, last, out=position)
            np.maximum(position, first, out=position)
        return np.exp(position, out=position)

    def _near_best_local(
        self, repeats: FloatArray, low: FloatArray, high: FloatArray, batch_weight: FloatArray
    ) -> FloatArray:
        """log m between the roots without overlap and with perfect overlap, which have closed forms; Eq. (G16)."""
        scale = self.noise / batch_weight
        ratio = self.intercept / self.slope
        hidden = self.sync / self.slope
        compute_bound = ratio * scale
        plain = hidden / repeats
        plain *= scale
        plain += compute_bound
        sync_bound = np.maximum(repeats - 1.0, _SMALLEST_EXTRA)
        np.divide(hidden, sync_bound, out=sync_bound)
        sync_bound *= scale
        sync_bound += compute_bound
        kink = np.maximum(hidden - ratio, 0.0)
        kink *= kink
        perfect = np.minimum(kink, sync_bound, out=kink)
        np.maximum(perfect, compute_bound, out=perfect)
        smallest, largest = low * low, high * high
        for squared in (plain, perfect):
            np.minimum(squared, largest, out=squared)
            np.maximum(squared, smallest, out=squared)
            np.log(squared, out=squared)
        plain -= perfect
        plain *= self.overlap**OVERLAP_EXPONENT
        plain += perfect
        plain *= 0.5
        return np.asarray(plain)

    def _newton_step(self, local_batch: FloatArray, extra: FloatArray, batch_weight: FloatArray) -> FloatArray:
        """The Newton step in log m to the root of Eq. (G14); the formulas are in `batch`."""
        grown = self.slope * local_batch
        compute = grown + self.intercept
        longer = np.maximum(compute, self.sync)
        power = np.minimum(compute, self.sync)
        power /= longer
        np.power(power, self.overlap, out=power)
        whole = power + 1.0
        overlapped = np.power(whole, self.inverse_overlap)
        overlapped *= longer
        share = np.where(compute >= self.sync, 1.0, power)
        share /= whole
        rate = share * overlapped
        rate /= compute
        cost_rate = extra + rate
        overlapped += extra * compute
        elasticity = grown * cost_rate
        elasticity /= overlapped
        bend = rate
        bend *= self.overlap - 1.0
        bend *= 1.0 - share
        bend *= grown
        compute *= cost_rate
        bend /= compute
        value = batch_weight * local_batch
        value += self.noise
        np.divide(self.noise, value, out=value)
        slope = value - elasticity
        bend += 1.0
        bend -= elasticity
        bend *= elasticity
        bend += value * (1.0 - value)
        # Negligible beside any other number; avoids 0/0 where all batches are equally good.
        bend += _SMALLEST_BEND
        slope /= bend
        return np.asarray(slope)
