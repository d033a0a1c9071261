"""How results look in a terminal: tables, the line that says which world was simulated, the progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

__all__ = ["policies_table", "progress_bar", "results_table", "standard_output", "world_lines"]

_PIPE_WIDTH = 160


def standard_output() -> Console:
    """Where tables go; wide enough for any of them when it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """`update(done, total)` for a bar on standard error; nothing is shown unless that is a terminal."""
    console = Console(stderr=True)
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
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def results_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """One line per policy under a line per workload; the ratio is of average JCT, to the first policy's."""
    first = results[0]["policy"]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for heading in (
        "avg\nJCT h", "p50\nJCT h", "p99\nJCT h", "make-\nspan h", "restarts\nper job", "GPUs\nin use",
        "worst\nFTF", "unfair\njobs", "decision ms\nmean / max", "avg JCT\nvs first",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    table.columns[-1].header = f"avg JCT\nvs {first}"
    baseline = 1.0
    last = None
    for result in results:
        if result["workload"] != last:
            if last is not None:
                table.add_section()
            last = result["workload"]
            baseline = result["avg_jct_hours"]
            table.add_row(f"[bold]{last}[/bold]")
        table.add_row(*_cells(result, baseline))
    return table


def _cells(result: Mapping[str, Any], baseline: float) -> list[str]:
    return [
        f"  {result['policy']}",
        f"{result['avg_jct_hours']:.3f}",
        f"{result['p50_jct_hours']:.3f}",
        f"{result['p99_jct_hours']:.2f}",
        f"{result['makespan_hours']:.2f}",
        f"{result['restarts_per_job']:.2f}",
        f"{result['utilization']:.0%}",
        f"{result['worst_ftf']:.2f}",
        f"{result['unfair_fraction']:.0%}",
        f"{result['decision_ms_mean']:.1f} / {result['decision_ms_max']:.0f}",
        f"{result['avg_jct_hours'] / baseline:.2f}×",
    ]


def world_lines(config: Mapping[str, Any]) -> list[str]:
    """What was simulated, in a few lines."""
    if config["trigger"] == "rounds":
        clock = f"rounds of {config['interval_seconds']:g} s"
    else:
        clock = "decisions on events"
    world = [
        f"{config['num_nodes']} nodes × {config['gpus_per_node']} GPUs",
        clock,
        f"{config['resize_seconds']:g} s to resize",
        f"at most {config['max_gpus_per_job']} GPUs per adaptive job, doubling at most",
        f"seed {config['seed']}",
    ]
    if config["interference"]:
        world.insert(3, f"interference {config['interference']:.0%}")
    lines = [", ".join(world)]
    used = config["applications"]
    fixed = [
        f"{name} ({settings['fixed']['num_gpus']} GPU, batch {settings['fixed']['batch_size']})"
        for name, settings in used.items()
        if settings["fixed"]
    ]
    lines.append(f"applications: {config['profiles']}; fixed: {', '.join(fixed) or 'none'}")
    for policy in config["policies"]:
        if policy["options"]:
            options = ", ".join(f"{key} {value}" for key, value in policy["options"].items())
            lines.append(f"{policy['name']}: {options}")
    return lines


def policies_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """Name, batch mode, needs, summary."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    table.add_column("batch", no_wrap=True)
    table.add_column("needs")
    table.add_column("what it is")
    for entry in entries:
        table.add_row(entry["name"], entry["batch"], ", ".join(entry["needs"]) or "–", entry["summary"])
    return table
