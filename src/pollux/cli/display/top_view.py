"""The screen of `pollux top`: what it shows, fetched from the service, and how that is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pollux.cli.display.number_format import clock, duration
from pollux.cli.display.warnings_output import warning_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pollux.cli.client.client import Client

__all__ = ["EventLine", "Frame", "draw", "fetch"]

_MOST_NODES = 12
_LAST_LINES = 6
_MOST_WARNINGS = 4
_ORDER = ("running", "starting", "resizing", "queued", "paused", "failed", "succeeded", "cancelled")


@dataclass(frozen=True, slots=True)
class EventLine:
    """An event as a line: its time, its job and its text."""

    at: float
    job: str
    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """The last known state. `lost` says since when and why the service does not answer; empty if it answers."""

    url: str
    status: Mapping[str, Any] = field(default_factory=dict)
    jobs: tuple[Mapping[str, Any], ...] = ()
    more: bool = False
    now: float = 0.0
    lost: str = ""

    def to_json(self) -> dict[str, Any]:
        """The frame as plain JSON values."""
        return {"url": self.url, "status": dict(self.status), "jobs": list(self.jobs), "more": self.more}


def fetch(client: Client, rows: int) -> Frame:
    """Ask the service for its state and up to `rows` unfinished jobs."""
    status = client.get("/v1/status")
    answer = client.get("/v1/jobs", active=True, limit=max(1, min(rows, 1000)))
    return Frame(client.url, status, tuple(answer["jobs"]), answer.get("next") is not None, float(status["now"]))


def draw(frame: Frame, events: Iterable[EventLine], width: int, height: int | None = None) -> RenderableType:
    """The screen; with a `height`, rows that do not fit are left out, and their number is shown."""
    from rich.console import Group
    from rich.text import Text

    from pollux.cli.display.tables import jobs_table

    parts: list[RenderableType] = [_headline(frame)]
    if frame.lost:
        parts.append(Text(frame.lost, style="bold red"))
    warned = warning_lines(frame.status)[:_MOST_WARNINGS]
    parts += [Text(line, style="yellow") for line in warned]
    nodes = list(frame.status.get("nodes", ()))
    parts += _nodes(nodes)
    lines = _lines(frame, events)
    room = len(frame.jobs)
    if height is not None:
        above = 9 + min(len(nodes), _MOST_NODES) + bool(frame.lost)
        above += sum(len(textwrap.wrap(line, width)) for line in warned)
        # Warnings go before decisions if there is not enough room for both.
        lines = lines[: max(0, height - above - 3)] if warned else lines
        taken = above + (len(lines) + 2 if lines else 0)
        room = max(1, min(room, height - taken))
    parts.append(Text())
    parts.append(jobs_table(frame.jobs[:room], frame.now, width) if frame.jobs else Text("no unfinished jobs"))
    if room < len(frame.jobs) or frame.more:
        parts.append(Text(_left_out(frame, room), style="dim"))
    if lines:
        parts += [Text(), Text("last decisions", style="bold"), *lines]
    return Group(*parts)


def _nodes(nodes: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """The table of the first nodes, and how many more there are."""
    from rich.text import Text

    from pollux.cli.display.tables import nodes_table

    parts: list[RenderableType] = [Text(), nodes_table(nodes[:_MOST_NODES])] if nodes else []
    if len(nodes) > _MOST_NODES:
        parts.append(Text(f"and {len(nodes) - _MOST_NODES} more nodes", style="dim"))
    return parts


def _headline(frame: Frame) -> RenderableType:
    from rich.text import Text

    status = frame.status
    if not status:
        return Text(f"pollux  {frame.url}", style="bold")
    counts = status.get("jobs_by_state", {})
    ordered = sorted(counts, key=lambda state: _ORDER.index(state) if state in _ORDER else len(_ORDER))
    states = ", ".join(f"{counts[state]} {state}" for state in ordered if counts[state])
    decided = status.get("last_decision_at")
    took = status.get("decision_seconds")
    decision = "no decision yet" if decided is None else f"decided {duration(frame.now - decided)} ago"
    if took is not None and decided is not None:
        decision += f" in {took * 1000:.0f} ms"
    first = f"  {frame.url}  policy {status['policy']} by {status['trigger']}, backend {status['backend']}"
    second = f"up {duration(frame.now - status['started_at'])}, {decision}; jobs: {states or 'none'}"
    line = Text.assemble(("pollux", "bold"), first, "\n", (second, "dim"))
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _left_out(frame: Frame, room: int) -> str:
    hidden = len(frame.jobs) - room
    return f"and {hidden} more" + ("; 'pollux ls' has all of them" if not frame.more else ", or even more: 'pollux ls'")


def _lines(frame: Frame, events: Iterable[EventLine]) -> list[RenderableType]:
    """The newest of the events and of the jobs' reasons, one line each."""
    from rich.text import Text

    reasons = [
        EventLine(job["reason"]["at"], str(job["id"]), str(job["reason"].get("text") or job["reason"]["code"]))
        for job in frame.jobs
        if job.get("reason")
    ]
    newest = sorted({*reasons, *events}, key=lambda line: (line.at, line.job), reverse=True)[:_LAST_LINES]
    return [
        Text(f"{clock(line.at, frame.now):>12}  {line.job}: {line.text}", no_wrap=True, overflow="ellipsis")
        for line in newest
    ]
