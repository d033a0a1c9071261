"""Jobs, nodes and queues as tables for a terminal; the values come from the service as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from pollux.cli.display.number_format import compact, eta_range, share

__all__ = ["STATE_STYLES", "job_line", "jobs_table", "nodes_table", "plain_table", "short_reason"]

STATE_STYLES: Mapping[str, str] = {
    "running": "green",
    "starting": "cyan",
    "resizing": "cyan",
    "paused": "yellow",
    "failed": "red",
    "cancelled": "dim",
    "succeeded": "bright_black",
}
"""Colours of states; other states are plain."""

WIDE_COLUMNS = 110
_BAR = 24


def plain_table(*headings: str, right: Iterable[str] = ()) -> Table:
    """A table in the common style; columns named in `right` are aligned to the right."""
    numbers = set(right)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left", no_wrap=heading in numbers)
    return table


def short_reason(job: Mapping[str, Any]) -> str:
    """The reason for a job's state, in one line."""
    if job["state"] in ("failed", "cancelled") or (job["state"] == "queued" and job.get("crashes")):
        said = job.get("detail") or ""
        if said:
            return str(said).splitlines()[0]
    reason = job.get("reason")
    if not reason or job["state"] == "succeeded":
        return ""
    return str(reason.get("text") or reason["code"]).splitlines()[0].partition("; ")[0]


def jobs_table(jobs: Sequence[Mapping[str, Any]], now: float, width: int) -> Table:
    """One line per job; terminals narrower than 110 columns get fewer columns."""
    wide = width >= WIDE_COLUMNS
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, width=width)
    table.add_column("job", no_wrap=True, overflow="ellipsis", min_width=8, max_width=28 if wide else 18)
    table.add_column("state", no_wrap=True)
    headings = ["GPUs", "batch", "goodput", "eff.", "done", "ETA"] if wide else ["GPUs", "goodput", "done", "ETA"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why", no_wrap=True, overflow="ellipsis", ratio=1)
    for job in jobs:
        table.add_row(*_cells(job, now, wide))
    return table


def _cells(job: Mapping[str, Any], now: float, wide: bool) -> list[Text]:
    state = str(job["state"])
    finished = state == "succeeded"
    gpus = Text(f"{job['gpus']}/{job['max_gpus']}", style="" if job["gpus"] else "dim")
    cells = [Text(str(job["id"])), Text(state, style=STATE_STYLES.get(state, "")), gpus]
    live = bool(job["gpus"])
    if wide:
        cells.append(Text(compact(job.get("batch_size"))))
    cells.append(Text(compact(job.get("goodput")) if live else "–"))
    if wide:
        cells.append(Text(share(job.get("efficiency"))))
    # These numbers are of earlier replicas; the present ones have not reported yet.
    about = "~" if job.get("outdated") and job.get("progress") is not None else ""
    cells.append(Text("100%" if finished else about + share(job.get("progress"))))
    cells.append(Text("–" if job.get("ended_at") else about + eta_range(job, now)))
    cells.append(Text(short_reason(job), style="dim"))
    return cells


def nodes_table(nodes: Sequence[Mapping[str, Any]]) -> Table:
    """A bar for each node, with its jobs; a block is a GPU or a CPU slot, or several of them on a big node."""
    table = plain_table("node", "in use", "", "held by", right=("in use",))
    for node in nodes:
        kind = "CPU slots" if node["gpu_type"] == "cpu" else node["gpu_type"]
        note = (
            kind
            if node.get("schedulable", True)
            else f"{kind}, {'set aside' if node.get('set_aside') else 'closed for new jobs'}"
        )
        held = ", ".join(f"{job} {count}" for job, count in sorted(node.get("jobs", {}).items()))
        table.add_row(Text(f"{node['id']} ({note})"), f"{node['used']}/{node['gpus']}", _bar(node), Text(held or "–"))
    return table


def _bar(node: Mapping[str, Any]) -> Text:
    total = max(1, node["gpus"])
    width = min(total, _BAR)
    full = round(node["used"] * width / total)
    return Text("█" * full, style="green") + Text("░" * (width - full), style="dim")


def job_line(job: Mapping[str, Any], now: float) -> str:
    """One job in one line of text, for a live line."""
    parts = [f"{job['state']} on {job['gpus']} of up to {job['max_gpus']} GPUs" if job["gpus"] else str(job["state"])]
    if job.get("batch_size"):
        parts.append(f"batch {compact(job['batch_size'])}")
    if job.get("goodput"):
        parts.append(f"goodput {compact(job['goodput'])}/s")
    if job.get("efficiency") is not None and job.get("goodput"):
        parts.append(f"efficiency {share(job['efficiency'])}")
    if job.get("progress") is not None:
        parts.append(f"{share(job['progress'])} done")
    if job.get("eta"):
        parts.append(f"ends in {eta_range(job, now)}")
    return ", ".join(parts)
