"""The receipt of a run as one figure: batch, replicas, learning rate, efficiency, loss and goodput over progress.

matplotlib is an extra and imported on use; nothing here touches its global state.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pollux.core.errors import InvalidInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "png"]

# Okabe and Ito's colours, which stay apart for colour-blind readers.
_BLUE, _ORANGE, _GREEN, _PURPLE, _YELLOW, _SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
_GREY, _BLACK = "#666666", "#000000"
_DOTS_PER_INCH = 130
_MARKS = {
    "resized": (_PURPLE, "s", "resized"),
    "resumed": (_GREY, ">", "resumed"),
    "out-of-memory": (_YELLOW, "X", "out of memory"),
    "rolled-back": (_ORANGE, "v", "rolled back"),
    "frozen": (_SKY, "D", "frozen"),
}
_BATCH_CHANGED = "batch changed"
_MOST_METRICS = 4
_PER_GROUP = ("lr_factors", "learning_rates")

Floats = NDArray[np.float64]


def draw(receipt: Mapping[str, Any]) -> Figure:
    """The figure of a receipt in the form of `Receipt.to_json`, over progress: in epochs where the data has a size.

    Dotted lines mark changes of the total batch, symbols along the top the other events of the run.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidInput("the picture needs matplotlib, which is not installed: pip install 'pollux-scheduler[plot]'")
    if not receipt["rows"]["step"]:
        raise InvalidInput(f"the receipt of '{receipt['job']}' has no rows yet: draw it after the first steps")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 11.0), layout="constrained", facecolor="white")
    panels = figure.subplots(5, 1, sharex=True, height_ratios=(1.2, 0.8, 1.2, 1.2, 1.0))
    unit = float(receipt["dataset_size"] or 1)
    columns = {name: _column(values) for name, values in receipt["rows"].items() if name not in _PER_GROUP}
    x = columns["progress"] / unit
    _batch(panels[0], receipt, x, columns)
    _learning_rate(panels[1], receipt, x)
    _efficiency(panels[2], x, columns)
    _loss(panels[3], receipt, x, columns, unit)
    _goodput(panels[4], x, columns)
    for axes in panels:
        _finish(axes, receipt, unit)
    _marks(panels[0], receipt, unit)
    panels[-1].set_xlabel("progress in epochs" if receipt["dataset_size"] else "progress in samples")
    panels[-1].set_xlim(0.0, max(float(np.nanmax(x)), 1e-9) * 1.005)
    figure.suptitle(_title(receipt), x=0.01, ha="left", fontsize=11)
    figure.align_ylabels(panels)
    return figure


def png(receipt: Mapping[str, Any]) -> bytes:
    """The figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    draw(receipt).savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
    return buffer.getvalue()


def _column(values: Sequence[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def _title(receipt: Mapping[str, Any]) -> str:
    exact = "exact" if receipt["exact"] else "not exact" if receipt["mode"] == "exact" else "adaptive"
    efficiency = receipt["progress"]["mean_efficiency"]
    work = "" if efficiency is None else f", efficiency {efficiency:.2f}"
    return f"{receipt['job']} ({exact}): {receipt['totals']['steps']:,} steps{work}"


def _pieces(x: Floats) -> list[tuple[slice, bool]]:
    """The parts of the run in which progress only grows, and whether a later roll-back undid each of them."""
    breaks = [0, *(np.flatnonzero(np.diff(x) < 0.0) + 1).tolist(), len(x)]
    pieces: list[tuple[slice, bool]] = []
    for begin, end in pairwise(breaks):
        later = float(x[end:].min()) if end < len(x) else np.inf
        kept = begin + int(np.searchsorted(x[begin:end], later, side="right"))
        # The last row before a roll-back belongs to both parts, so that their lines meet.
        pieces += [(slice(begin, kept), False), (slice(max(kept - 1, begin), end), True)]
    return [(piece, undone) for piece, undone in pieces if piece.stop - piece.start > (1 if undone else 0)]


def _line(axes: Axes, x: Floats, y: Floats, colour: str, label: str, **style: Any) -> None:
    """Draw one curve, interrupted where the run was rolled back; what was undone is pale."""
    if not np.isfinite(y).any():
        return
    pieces = _pieces(x)
    style = {"linewidth": 1.6, **style}
    if style.pop("stepped", False):
        style["drawstyle"] = "steps-post"
    named = [number for number, (_, undone) in enumerate(pieces) if not undone][-1:]
    for number, (piece, undone) in enumerate(pieces):
        # Missing values are skipped, so that the line has no gap there.
        there = np.isfinite(y[piece])
        name = label if number in named else "_nolegend_"
        alpha = 0.35 if undone else 1.0
        axes.plot(x[piece][there], y[piece][there], color=colour, label=name, alpha=alpha, **style)


def _batch(axes: Axes, receipt: Mapping[str, Any], x: Floats, columns: Mapping[str, Floats]) -> None:
    from matplotlib.ticker import MaxNLocator

    _line(axes, x, columns["total_batch"], _BLUE, "total batch", stepped=True)
    _line(axes, x, columns["local_batch"], _SKY, "local batch", stepped=True, linewidth=1.1)
    _powers(axes, min(columns["local_batch"].min(), columns["total_batch"].min()), columns["total_batch"].max())
    if receipt["max_batch"] is not None and receipt["max_batch"] <= 4.0 * columns["total_batch"].max():
        axes.axhline(receipt["max_batch"], color=_GREY, linewidth=0.8, linestyle=(0, (4, 3)), label="ceiling")
        _powers(axes, columns["local_batch"].min(), max(columns["total_batch"].max(), receipt["max_batch"]))
    axes.set_ylabel("samples")
    replicas = axes.twinx()
    _line(replicas, x, columns["num_replicas"], _GREEN, "replicas", stepped=True, linewidth=1.2)
    replicas.set_ylim(0.0, columns["num_replicas"].max() * 1.35 + 0.3)
    replicas.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    replicas.set_ylabel("replicas", color=_GREEN)
    replicas.tick_params(axis="y", colors=_GREEN)
    replicas.spines[["top", "left"]].set_visible(False)
    _legend(axes, replicas)


def _powers(axes: Axes, least: float, most: float) -> None:
    """Set a scale of powers of two, wide enough to have ticks."""
    axes.set_yscale("log", base=2)
    axes.set_ylim(max(least, 1.0) / 1.6, max(most, 1.0) * 3.0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _learning_rate(axes: Axes, receipt: Mapping[str, Any], x: Floats) -> None:
    table = receipt["rows"]["lr_factors"]
    groups = max(len(factors) for factors in table)
    colours = (_BLUE, _ORANGE, _GREEN, _PURPLE, _YELLOW, _SKY)
    for group in range(min(groups, len(colours))):
        factors = _column([factors[group] if group < len(factors) else None for factors in table])
        name = f"rule '{receipt['rule']}'" if groups == 1 else f"group {group}"
        _line(axes, x, factors, colours[group], name)
    axes.axhline(1.0, color=_GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(bottom=0.0)
    axes.margins(y=0.1)
    axes.set_ylabel("rate factor")
    _rates_of_first_group(axes, receipt, x, "learning rate" if groups == 1 else "learning rate of group 0")


def _rates_of_first_group(axes: Axes, receipt: Mapping[str, Any], x: Floats, name: str) -> None:
    table = receipt["rows"].get("learning_rates") or [[]]
    rates = _column([entry[0] if entry else None for entry in table])
    if not np.isfinite(rates).any():
        _legend(axes)
        return
    used = axes.twinx()
    _line(used, x, rates, _BLACK, name, linewidth=1.1)
    _rate_scale(used, rates[np.isfinite(rates)])
    used.set_ylabel("learning rate")
    used.spines[["top", "left"]].set_visible(False)
    _legend(axes, used)


def _rate_scale(axes: Axes, rates: Floats) -> None:
    """Set a linear scale from 0; a logarithmic one where a schedule lowers the rate by more than a factor of 20."""
    positive = rates[rates > 0.0]
    if len(positive) and positive.max() > 20.0 * positive.min():
        axes.set_yscale("log")
        axes.set_ylim(positive.min() / 2.0, positive.max() * 3.0)
    else:
        axes.set_ylim(0.0, max(float(rates.max()), 1e-12) * 1.25)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _efficiency(axes: Axes, x: Floats, columns: Mapping[str, Floats]) -> None:
    _line(axes, x, columns["efficiency"], _BLUE, "efficiency")
    axes.set_ylim(0.0, 1.08)
    axes.set_yticks([0.0, 0.25, 0.5, 0.75, 1.0])
    axes.set_ylabel("efficiency")
    if not np.isfinite(columns["noise_low"]).any() and not np.isfinite(columns["noise_scale"]).any():
        return
    noise = axes.twinx()
    _line(noise, x, columns["noise_scale"], _ORANGE, "noise scale", linewidth=1.2)
    noise.set_yscale("log")
    finite = np.concatenate([columns[name] for name in ("noise_scale", "noise_low", "noise_high")])
    finite = finite[np.isfinite(finite) & (finite > 0.0)]
    if len(finite):
        # The first intervals may be very wide, so the scale follows the middle of the values.
        low, high = np.quantile(finite, [0.02, 0.98])
        noise.set_ylim(low / 2.0, high * 2.0)
        bounds = noise.get_ylim()
        upper = np.where(np.isfinite(columns["noise_high"]), columns["noise_high"], bounds[1])
        lower = np.maximum(columns["noise_low"], bounds[0])
        known = np.isfinite(columns["noise_low"])
        noise.fill_between(
            x, lower, upper, where=known.tolist(), color=_ORANGE, alpha=0.15, linewidth=0, label="its 95 % interval"
        )
    noise.set_ylabel("noise scale (samples)", color=_ORANGE)
    noise.tick_params(axis="y", which="both", colors=_ORANGE)
    noise.spines[["top", "left"]].set_visible(False)
    _legend(axes, noise)


def _loss(axes: Axes, receipt: Mapping[str, Any], x: Floats, columns: Mapping[str, Floats], unit: float) -> None:
    _line(axes, x, columns["loss"], _BLUE, "loss", linewidth=1.2)
    axes.set_ylabel("loss")
    finite = columns["loss"][np.isfinite(columns["loss"])]
    if len(finite) and finite.min() > 0.0 and finite.max() > 20.0 * finite.min():
        axes.set_yscale("log")
    names = sorted(receipt["metrics"])[:_MOST_METRICS]
    if not names:
        _legend(axes)
        return
    metrics = axes.twinx()
    for name, colour in zip(names, (_ORANGE, _GREEN, _PURPLE, _YELLOW), strict=False):
        points = receipt["metrics"][name]
        at = _column(points["progress"]) / unit
        _line(metrics, at, _column(points["value"]), colour, name, linewidth=1.2, marker="o", markersize=3)
    metrics.set_ylabel("metrics" if len(names) > 1 else names[0])
    metrics.spines[["top", "left"]].set_visible(False)
    _legend(axes, metrics)


def _goodput(axes: Axes, x: Floats, columns: Mapping[str, Floats]) -> None:
    measured = columns["throughput"] * columns["efficiency"]
    _line(axes, x, columns["throughput"], _SKY, "throughput, measured", linewidth=0.9)
    _line(axes, x, measured, _BLUE, "goodput, measured", linewidth=1.2)
    _line(axes, x, columns["goodput"], _ORANGE, "goodput, predicted", linestyle=(0, (5, 2)))
    axes.set_ylim(bottom=0.0)
    axes.margins(y=0.1)
    axes.set_ylabel("samples per second")
    _legend(axes)


def _finish(axes: Axes, receipt: Mapping[str, Any], unit: float) -> None:
    """Draw the grid, no frame above and right, and a dotted line where the total batch changed."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="y", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    label = _BATCH_CHANGED
    for before, after in pairwise(receipt["configurations"]):
        if before["total_batch"] != after["total_batch"]:
            style: dict[str, Any] = {"color": "#888888", "linewidth": 0.8, "linestyle": ":", "zorder": 0.5}
            axes.axvline(after["progress"] / unit, label=label, **style)
            label = "_nolegend_"


def _marks(axes: Axes, receipt: Mapping[str, Any], unit: float) -> None:
    """Draw symbols for the events of the run along the top of the first panel, with a legend of their own."""
    transform = axes.get_xaxis_transform()
    for kind, (colour, shape, label) in _MARKS.items():
        at = [event["progress"] / unit for event in receipt["events"] if event["kind"] == kind]
        if at:
            height = [0.93] * len(at)
            style: dict[str, Any] = {"linestyle": "none", "markersize": 7, "markeredgecolor": "white", "clip_on": False}
            axes.plot(at, height, marker=shape, color=colour, label=label, transform=transform, **style)
    handles, labels = axes.get_legend_handles_labels()
    known = {_BATCH_CHANGED, *(label for _, _, label in _MARKS.values())}
    pairs = [(handle, label) for handle, label in zip(handles, labels, strict=True) if label in known]
    if pairs:
        figure = axes.get_figure(root=True)
        if figure is not None:
            shown, names = zip(*pairs, strict=True)
            figure.legend(shown, names, loc="outside lower center", ncols=len(known), frameon=False, fontsize=8)


def _legend(*panels: Axes) -> None:
    """Draw one legend above the panel, where no curve runs through it."""
    pairs = [pair for axes in panels for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    if pairs:
        handles, labels = zip(*pairs, strict=True)
        panels[0].legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0.0, 0.98),
            borderaxespad=0.0,
            ncols=5,
            frameon=False,
            fontsize=8,
        )
