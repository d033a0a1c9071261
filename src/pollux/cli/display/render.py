"""How results look in a terminal: tables and the progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from pollux.cli.printing.console import SafeConsole

__all__ = ["classes_table", "policies_table", "print_table", "progress_bar", "results_table", "standard_output"]

_PIPE_WIDTH = 160
_WIDE_WIDTH = 110
_NARROW_WIDTH = 80
_WORST = ("worst_ftf", "decision_ms_max")

_Columns = tuple[tuple[str, str], ...]

_WIDE: _Columns = (
    ("avg\nJCT h", "{avg_jct_hours:.3f}"),
    ("p50\nJCT h", "{p50_jct_hours:.3f}"),
    ("p99\nJCT h", "{p99_jct_hours:.2f}"),
    ("make-\nspan h", "{makespan_hours:.2f}"),
    ("restarts\nper job", "{restarts_per_job:.2f}"),
    ("GPUs\nin use", "{utilization:.0%}"),
    ("worst\nFTF", "{ftf}"),
    ("unfair\njobs", "{unfair_fraction:.0%}"),
    ("decision ms\nmean / max", "{decision_ms_mean:.1f} / {decision_ms_max:.0f}"),
    ("avg JCT\nvs {first}", "{ratio:.2f}×"),
)
_NARROW: _Columns = (
    ("avg\nJCT h", "{avg_jct_hours:.3f}"),
    ("p50\nJCT h", "{p50_jct_hours:.3f}"),
    ("p99\nJCT h", "{p99_jct_hours:.2f}"),
    ("make-\nspan", "{makespan_hours:.2f}"),
    ("re-\nstarts", "{restarts_per_job:.2f}"),
    ("GPU\nuse", "{utilization:.0%}"),
    ("worst\nFTF", "{ftf}"),
    ("ms to\ndecide", "{decision_ms_mean:.1f}"),
    ("vs\n{short}", "{ratio:.2f}×"),
)


def standard_output() -> SafeConsole:
    """The console for tables; a narrower terminal wraps lines, so that nothing is cut off."""
    console = SafeConsole()
    console.width = max(console.width, _NARROW_WIDTH) if console.is_terminal else _PIPE_WIDTH
    return console


def print_table(console: SafeConsole, table: Table) -> None:
    """Print with a blank line before and after."""
    console.print()
    console.print(table)
    console.print()


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """`update(done, total)` for a bar on standard error; nothing is shown unless that is a terminal."""
    console = SafeConsole(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("jobs"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def results_table(
    results: Sequence[Mapping[str, Any]],
    width: int,
    means: bool = True,
    bounds: Mapping[str, float | None] | None = None,
) -> Table:
    """A line for each workload, and below it one for each policy; ratios are to the first policy's average JCT.

    With several workloads, their means follow (of worst values, the worst). Without `means` the workloads are the same
    jobs on other clusters: no means, and every ratio is to the first line of all. `bounds` has, by workload, the
    average in hours that no schedule can beat.
    """
    columns = _WIDE if width >= _WIDE_WIDTH else _NARROW
    table = _headed(columns, results[0]["policy"])
    for name, runs in _by_workload(results, means).items():
        table.add_section()
        table.add_row(Text(name, style="bold"))
        base = (runs if means else results)[0]["avg_jct_hours"]
        for run in runs:
            table.add_row(Text(f"  {run['policy']}"), *_result_cells(columns, run, base))
        least = (bounds or {}).get(name)
        if least is not None:
            cells = _bound_cells(columns, least, runs[0]["avg_jct_hours"])
            table.add_row(Text("  lower bound"), *cells, style="dim")
    return table


def _headed(columns: _Columns, first: str) -> Table:
    """The table without rows; ratios are to the policy `first`."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("\npolicy", min_width=16, overflow="fold")
    short = first if len(first) <= len("pollux") else "first"
    for heading, _ in columns:
        table.add_column(heading.format(first=first, short=short), justify="right", no_wrap=True)
    return table


def _by_workload(results: Sequence[Mapping[str, Any]], means: bool) -> dict[str, Sequence[Mapping[str, Any]]]:
    """The results of each workload; with `means`, those over all workloads follow if there are several."""
    groups: dict[str, Sequence[Mapping[str, Any]]] = {
        name: list(runs) for name, runs in groupby(results, key=lambda result: result["workload"])
    }
    if len(groups) > 1 and means:
        groups[f"mean of {len(groups)} workloads"] = _means(results)
    return groups


def _result_cells(columns: _Columns, run: Mapping[str, Any], base_hours: float) -> list[str]:
    """One policy's results; its ratio is to `base_hours`."""
    ratio = run["avg_jct_hours"] / base_hours
    ftf = f"{run['worst_ftf']:.{2 if run['worst_ftf'] < 100 else 0}f}"
    return [form.format(ratio=ratio, ftf=ftf, **run) for _, form in columns]


def _bound_cells(columns: _Columns, least_hours: float, base_hours: float) -> list[str]:
    """A lower bound, which has an average and a ratio only: the first and the last column."""
    shown = {columns[0][0]: f"{least_hours:.3f}", columns[-1][0]: f"{least_hours / base_hours:.2f}×"}
    return [shown.get(heading, "") for heading, _ in columns]


def classes_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Average completion times in hours by class of job, one line per policy under a line per workload."""
    names = list(dict.fromkeys(name for result in results for name in result["classes"]))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("avg JCT h of jobs that are", min_width=16, overflow="fold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for workload, runs in groupby(results, key=lambda result: result["workload"]):
        group = list(runs)
        table.add_section()
        counts = [str(int(group[0]["classes"].get(name, {}).get("jobs", 0))) + " jobs" for name in names]
        table.add_row(Text(workload, style="bold"), *counts)
        for run in group:
            cells = [f"{run['classes'][name]['avg_jct_hours']:.3f}" if name in run["classes"] else "" for name in names]
            table.add_row(Text(f"  {run['policy']}"), *cells)
    return table


def _means(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    policies = list(dict.fromkeys(result["policy"] for result in results))
    means: list[dict[str, Any]] = []
    for policy in policies:
        runs = [result for result in results if result["policy"] == policy]
        mean: dict[str, Any] = {"policy": policy}
        for key, value in runs[0].items():
            if isinstance(value, float):
                values = [run[key] for run in runs]
                mean[key] = max(values) if key in _WORST else sum(values) / len(values)
        means.append(mean)
    return means


def policies_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """Name, batch mode, needs, where it runs, summary."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("policy", no_wrap=True)
    table.add_column("batch", no_wrap=True)
    table.add_column("needs")
    table.add_column("runs in", no_wrap=True)
    table.add_column("what it is")
    for entry in entries:
        needs, places = ", ".join(entry["needs"]) or "–", ", ".join(entry["runs_in"])
        table.add_row(entry["name"], entry["batch"], needs, places, Text(entry["summary"]))
    return table
