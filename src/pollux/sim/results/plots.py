"""Plots of runs as matplotlib figures: completion times, GPUs of jobs over time, one job over time.

matplotlib is an extra and imported on use; nothing here touches its global state.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pollux.core import InvalidInput
from pollux.sim.simulation.simulation import JobOutcome, RunOutcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_gpus", "plot_jct", "plot_job", "require_matplotlib", "save"]

# Okabe and Ito's colours, which stay apart for colour-blind readers; black is left out.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F")
_HOUR = 3600.0
_DOTS_PER_INCH = 130


def require_matplotlib() -> None:
    """Refuse early, with the remedy, if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidInput("plots need matplotlib, which is not installed: pip install 'pollux-scheduler[plot]'")


def _figure(width: float, height: float) -> Figure:
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save(figure: Figure, path: Any) -> None:
    """Write a PNG to a path or a binary file."""
    figure.savefig(path, format="png", dpi=_DOTS_PER_INCH)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)


def _colours(keys: Iterable[str]) -> dict[str, str]:
    return {key: _COLOURS[index % len(_COLOURS)] for index, key in enumerate(keys)}


def plot_jct(outcomes: Sequence[RunOutcome]) -> Figure:
    """Share of jobs done within a time of their submission, by policy; the runs are of one workload."""
    figure = _figure(8.0, 4.5)
    axes = figure.subplots()
    for outcome, colour in zip(outcomes, _colours(run.policy for run in outcomes).values(), strict=False):
        hours = np.sort([(job.finished - job.submitted) / _HOUR for job in outcome.jobs])
        shares = np.arange(1, len(hours) + 1) / len(hours)
        label = f"{outcome.policy}: average {np.mean(hours):.3g} h"
        axes.step(np.r_[hours[0], hours], np.r_[0.0, shares], where="post", color=colour, label=label, linewidth=1.8)
        mean = float(np.mean(hours))
        axes.plot(mean, np.mean(hours <= mean), marker="o", markersize=7, color=colour, markeredgecolor="white")
    axes.set_xscale("log")
    _duration_ticks(axes)
    axes.set_ylim(0.0, 1.01)
    axes.set_ylabel("share of jobs done")
    axes.set_xlabel("job completion time (dot: average)")
    axes.set_title(f"Job completion times, {outcomes[0].workload}")
    _plain(axes)
    axes.legend(loc="lower right", frameon=False)
    return figure


def _duration_ticks(axes: Axes) -> None:
    """Ticks at common durations."""
    from matplotlib.ticker import FixedLocator, NullLocator

    seconds = (
        1,
        10,
        60,
        300,
        900,
        3600,
        3 * 3600,
        10 * 3600,
        24 * 3600,
        3 * 86400,
        10 * 86400,
        30 * 86400,
        100 * 86400,
    )
    names = (
        "1 s",
        "10 s",
        "1 min",
        "5 min",
        "15 min",
        "1 h",
        "3 h",
        "10 h",
        "1 d",
        "3 d",
        "10 d",
        "30 d",
        "100 d",
    )
    axes.xaxis.set_major_locator(FixedLocator([second / _HOUR for second in seconds]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(
        lambda hours, _: names[int(np.argmin([abs(hours * _HOUR / s - 1) for s in seconds]))]
    )


def plot_gpus(outcomes: Sequence[RunOutcome], num_gpus: int) -> Figure:
    """The GPUs of jobs over time, a row per policy; the runs are of one workload.

    Left, a lane per job in order of submission, coloured by its GPUs (grey: waiting). Right, the same
    stacked, a band per job, coloured by application.
    """
    rows = len(outcomes)
    require_matplotlib()
    from matplotlib.patches import Patch

    figure = _figure(13.0, 0.9 + 3.3 * rows)
    grid = figure.subplots(rows, 2, sharex="all", squeeze=False, width_ratios=(1.0, 1.0))
    applications = _colours(sorted({job.application for outcome in outcomes for job in outcome.jobs}))
    end = max(job.finished for outcome in outcomes for job in outcome.jobs) / _HOUR
    most = max((sample[1] for outcome in outcomes for job in outcome.jobs for sample in job.samples), default=1)
    for outcome, (lanes, bands) in zip(outcomes, grid, strict=True):
        scale = _lanes(lanes, outcome, max(most, 2))
        _bands(bands, outcome, applications, num_gpus)
        lanes.set_title(f"{outcome.policy}: GPUs of each job", loc="left")
        bands.set_title(f"{outcome.policy}: GPUs in use", loc="left")
        figure.colorbar(
            scale,
            ax=lanes,
            label="GPUs",
            pad=0.01,
            aspect=30,
            ticks=range(most.bit_length()),
            format=lambda value, _: f"{2**value:g}",
        )
    for axes in grid[-1]:
        axes.set_xlabel("hours")
        axes.set_xlim(0.0, end)
    figure.suptitle(f"GPUs over time, {outcomes[0].workload}", x=0.01, ha="left")
    handles = [Patch(color=colour, label=name) for name, colour in applications.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=8, frameon=False)
    return figure


def _stretches(job: JobOutcome) -> list[tuple[float, float, int]]:
    """(from, to, GPUs) in seconds, from submission to finish; adjoining stretches may have equal GPUs."""
    times = [job.submitted, *(sample[0] for sample in job.samples), job.finished]
    counts = [0, *(sample[1] for sample in job.samples)]
    return [(a, b, count) for a, b, count in zip(times, times[1:], counts, strict=False) if b > a]


def _lanes(axes: Axes, outcome: RunOutcome, most: int) -> Any:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import Normalize

    boxes, values, waiting = [], [], []
    for lane, job in enumerate(outcome.jobs):
        for begin, end, count in _stretches(job):
            left, right = begin / _HOUR, end / _HOUR
            box = ((left, lane), (right, lane), (right, lane + 1), (left, lane + 1))
            if count:
                boxes.append(box)
                values.append(math.log2(count))
            else:
                waiting.append(box)
    axes.add_collection(PolyCollection(waiting, facecolors="#d9d9d9", linewidths=0))
    filled = PolyCollection(
        boxes, array=np.array(values), cmap="viridis_r", norm=Normalize(0, math.log2(most)), linewidths=0
    )
    axes.add_collection(filled)
    axes.set_ylim(len(outcome.jobs), 0)
    axes.set_ylabel("job, by submission")
    _plain(axes)
    return filled


def _bands(axes: Axes, outcome: RunOutcome, colours: Mapping[str, str], num_gpus: int) -> None:
    from matplotlib.collections import PolyCollection

    jobs = sorted(outcome.jobs, key=lambda job: (job.application, job.submitted))
    times = np.unique([edge for job in jobs for begin, end, _ in _stretches(job) for edge in (begin, end)])
    base = np.zeros(len(times))
    outlines: list[NDArray[np.float64]] = []
    shades: list[tuple[float, ...]] = []
    for index, job in enumerate(jobs):
        top = base + _held(job, times)
        pieces = _outlines(times / _HOUR, base, top)
        outlines += pieces
        shades += [_shade(colours[job.application], index)] * len(pieces)
        base = top
    axes.add_collection(PolyCollection(outlines, facecolors=shades, linewidths=0))
    axes.axhline(num_gpus, color="#555555", linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(0, num_gpus * 1.04)
    axes.set_ylabel("GPUs")
    _plain(axes)


def _shade(colour: str, index: int) -> tuple[float, ...]:
    """One of three tints, so that neighbouring bands of one application can be told apart."""
    from matplotlib.colors import to_rgb

    white = (0.0, 0.3, 0.15)[index % 3]
    return tuple(part + (1.0 - part) * white for part in to_rgb(colour))


def _outlines(x: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Outlines of the area between two curves that hold from each x to the next, where it is not empty."""
    filled = np.flatnonzero(np.diff(np.r_[False, high[:-1] > low[:-1], False]))
    outlines = []
    for begin, end in zip(filled[::2], filled[1::2], strict=True):
        across = np.repeat(x[begin : end + 1], 2)[1:-1]
        upper, lower = np.repeat(high[begin:end], 2), np.repeat(low[begin:end], 2)
        outlines.append(np.column_stack((np.r_[across, across[::-1]], np.r_[upper, lower[::-1]])))
    return outlines


def _held(job: JobOutcome, times: NDArray[np.float64]) -> NDArray[np.float64]:
    """GPUs the job holds from each of the times on."""
    held = np.zeros(len(times))
    for begin, end, count in _stretches(job):
        held[np.searchsorted(times, begin) : np.searchsorted(times, end)] = count
    return held


def plot_job(outcomes: Sequence[RunOutcome], name: str) -> Figure:
    """GPUs, total batch and efficiency of one job over time, by policy; the runs are of one workload."""
    figure = _figure(9.0, 6.5)
    gpus, batch, efficiency = figure.subplots(3, 1, sharex=True)
    lives = {outcome.policy: next(job for job in outcome.jobs if job.name == name) for outcome in outcomes}
    for (policy, job), colour in zip(lives.items(), _colours(lives).values(), strict=True):
        samples = np.array([*job.samples, (job.finished, *job.samples[-1][1:])])
        hours = (samples[:, 0] - job.submitted) / _HOUR
        running = np.where(samples[:, 1] > 0, 1.0, np.nan)
        for axes, values in (
            (gpus, samples[:, 1]),
            (batch, samples[:, 2] * running),
            (efficiency, samples[:, 3] * running),
        ):
            axes.step(hours, values, where="post", color=colour, label=policy, linewidth=1.5)
        gpus.plot(hours[-1], samples[-1, 1], marker="o", markersize=4, color=colour)
    batches = [sample[2] for job in lives.values() for sample in job.samples if sample[2]]
    batch.set_yscale("log", base=2)
    # At least one power of two on either side, so that there are always ticks.
    batch.set_ylim(min(batches) / 2.1, max(batches) * 2.1)
    batch.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    gpus.set_ylim(bottom=0)
    efficiency.set_ylim(0.0, 1.05)
    for axes, label in ((gpus, "GPUs"), (batch, "total batch"), (efficiency, "efficiency")):
        axes.set_ylabel(label)
        _plain(axes)
    efficiency.set_xlabel("hours since submission (dot: finished)")
    efficiency.set_xlim(left=0.0)
    application = next(iter(lives.values())).application
    figure.suptitle(f"{name} ({application}), {outcomes[0].workload}", x=0.01, ha="left")
    handles, labels = gpus.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=4, frameon=False)
    return figure
