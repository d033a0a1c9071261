"""`pollux show` and `pollux explain`: everything about one job, and why it has its GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pollux.cli.arguments.options import Job, Json, print_json
from pollux.cli.display.warnings_output import WAITING, print_warnings
from pollux.cli.printing.visible import say

__all__ = ["explain", "show", "story_lines"]

_INDENT = 15


def show(job: Job, as_json: Json = False) -> None:
    """Show everything about a job: its request, its progress, every re-allocation, and how good its ETAs were.

    Example: pollux show resnet18
    """
    from pollux.cli.client.client import connect, job_path

    client = connect()
    answer = client.get(job_path(job))
    if as_json:
        print_json(answer)
        return
    from rich.text import Text

    from pollux.cli.display.render import standard_output
    from pollux.cli.display.tables import STATE_STYLES

    console = standard_output()
    status, now = answer["job"], client.now
    state = Text(str(status["state"]), style=STATE_STYLES.get(status["state"], "bold"))
    console.print(Text.assemble((str(status["id"]), "bold"), "  ", state))
    for name, value in _facts(status, now):
        first, *rest = _wrapped(value, console.width - _INDENT) or [""]
        console.print(Text(f"  {name:<12} ", style="dim") + Text(first), soft_wrap=True)
        for line in rest:
            console.print(Text(" " * _INDENT + line), soft_wrap=True)
    _print_request(console, answer.get("request") or {})
    _print_events(console, answer, now)
    if status["state"] in WAITING:
        print_warnings(client)


def explain(job: Job, as_json: Json = False) -> None:
    """Explain why a job has the GPUs it has, and what to do about it.

    Example: pollux explain resnet18
    """
    from pollux.cli.client.client import connect, job_path

    client = connect()
    answer = client.get(job_path(job, "explain"))
    if as_json:
        print_json(answer)
        return
    say(answer["text"])
    if answer.get("next_step"):
        say(f"Next: {answer['next_step']}")
    print_warnings(client)


def _facts(status: Mapping[str, Any], now: float) -> Iterator[tuple[str, str]]:
    """Name and text of each line about the job, in the order in which they are printed."""
    yield from _request_facts(status, now)
    yield from _progress_facts(status, now)
    yield from _speed_facts(status)
    yield from _cost_facts(status)
    if status.get("checkpoint_error"):
        yield "checkpoint", f"the last one could not be written: {status['checkpoint_error']}"
    if status.get("detail"):
        yield "detail", str(status["detail"])
    reason = status.get("reason")
    if reason and not status.get("ended_at"):
        yield "why", str(reason.get("text") or reason["code"])
        if reason.get("next_step"):
            yield "next step", str(reason["next_step"])


def _request_facts(status: Mapping[str, Any], now: float) -> Iterator[tuple[str, str]]:
    from pollux.cli.display.number_format import moment

    where = ", ".join(f"{node} {count}" for node, count in sorted(status.get("placement", {}).items()))
    kind = ", rigid" if status.get("rigid") else ""
    gpus = f"{status['gpus']} of {status['min_gpus']}..{status['max_gpus']}{kind}"
    yield "GPUs", gpus + (f" on {where}" if where else "")
    yield "queue", f"{status['queue']}, priority {status['priority']}"
    if status.get("after"):
        yield "after", ", ".join(status["after"])
    yield "submitted", moment(status["submitted_at"], now)
    for name in ("started", "ended"):
        if status.get(f"{name}_at"):
            yield name, moment(status[f"{name}_at"], now)


def _progress_facts(status: Mapping[str, Any], now: float) -> Iterator[tuple[str, str]]:
    from pollux.cli.display.number_format import duration, eta_range, share

    if status.get("progress") is not None:
        epoch = f", epoch {status['epoch']:.2f}" if status.get("epoch") is not None else ""
        yield "progress", f"{share(status['progress'])}{epoch}{_age(status, now)}"
    if status.get("eta") and not status.get("ended_at"):
        current = status["eta"].get("current")
        held = "" if current is None else f"; {duration(current - now)} if it keeps its GPUs"
        yield "ends in", eta_range(status, now) + held + (", by its last report" if status.get("outdated") else "")


def _speed_facts(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    from pollux.cli.display.number_format import compact, share

    if status.get("batch_size"):
        # A job reports the micro-steps beyond the first.
        extra = status.get("accumulation") or 0
        steps = f", {extra + 1} micro-steps" if extra > 0 else ""
        local = f" ({status['local_batch']} per GPU{steps})" if status.get("local_batch") else ""
        yield "batch", f"{status['batch_size']:,}{local}, learning rate × {status.get('learning_rate_factor') or 1:.3g}"
    if status.get("throughput") is not None:
        yield "throughput", f"{compact(status['throughput'])} samples/s"
    if status.get("goodput") is not None:
        efficiency = share(status.get("efficiency"))
        yield "goodput", f"{compact(status['goodput'])} useful samples/s (statistical efficiency {efficiency})"
    if status.get("noise_scale") is not None:
        yield "noise scale", f"{compact(status['noise_scale'])} samples"
    if status.get("loss") is not None:
        yield "loss", f"{status['loss']:.4g}"


def _cost_facts(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    used = f"{status.get('gpu_seconds', 0.0) / 3600:.2f} GPU-hours"
    moves = f"{status['restarts']} re-allocation{'s' * (status['restarts'] != 1)}"
    yield "used", f"{used}, {moves}, {status['crashes']} of {status['retries']} retries"
    if status.get("resize_costs") and not status.get("ended_at"):
        how = "without a restart" if status.get("resize_kind") == "live" else "with a restart"
        kinds = ", ".join(f"{kind} {seconds:.2g} s" for kind, seconds in sorted(status["resize_costs"].items()))
        yield "a change", f"costs it about {status['resize_seconds']:.2g} s, {how}; so far: {kinds}"


def _age(status: Mapping[str, Any], now: float) -> str:
    """The age of numbers that earlier replicas reported; empty for numbers of the present replicas."""
    from pollux.cli.display.number_format import since

    if not status.get("outdated") or status.get("reported_at") is None:
        return ""
    return f", reported {since(status['reported_at'], now)}, before it was given these GPUs"


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of whole words: commands and paths are never cut."""
    import textwrap

    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _print_request(console: Any, request: Mapping[str, Any]) -> None:
    if not request:
        return
    console.print("\nas submitted", style="bold")
    for key, value in request.items():
        shown = _request_value(key, value)
        if shown:
            console.print(f"  {key:<12} {shown}", markup=False, soft_wrap=True)


def _request_value(key: str, value: Any) -> str:
    """A field of the request as text; empty if it was not given."""
    import shlex

    from pollux.cli.display.number_format import duration

    if value in (None, {}, []):
        return ""
    if key == "run" and isinstance(value, list):
        return shlex.join(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={entry}" for name, entry in value.items() if entry is not None)
    if isinstance(value, list):
        return ", ".join(str(entry) for entry in value)
    return duration(value) if key in ("grace", "time_limit") and isinstance(value, int | float) else str(value)


def _print_events(console: Any, answer: Mapping[str, Any], now: float) -> None:
    events = answer.get("events") or []
    if events:
        console.print("\nwhat happened", style="bold")
    for line in story_lines(events, now):
        console.print(line, markup=False, soft_wrap=True)
    quality = answer.get("eta_quality") or {}
    if not quality.get("predictions", True):
        return
    if quality:
        console.print("\nhow good its ETAs were", style="bold")
    for name, value in quality.items():
        shown = f"{value:.3g}" if isinstance(value, float) else value
        console.print(f"  {str(name).replace('_', ' '):<15} {'–' if shown is None else shown}", markup=False)


def story_lines(events: list[dict[str, Any]], now: float) -> list[str]:
    """Events of a job as lines, oldest first."""
    from pollux.cli.display.number_format import clock

    return [f"  {clock(event['at'], now):>12}  {event['kind']:<10} {event['text']}" for event in events]
