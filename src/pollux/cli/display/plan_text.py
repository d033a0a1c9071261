"""The plan of a job in words: when it starts, on how many GPUs, and when it should end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pollux.cli.display.number_format import duration, eta_range

__all__ = ["plan_lines"]


def plan_lines(plan: Mapping[str, Any], now: float, planned: bool = False) -> list[str]:
    """A line on the start, one on what is predicted, and where to look next."""
    job, gpus = plan["job_id"], plan["gpus"]
    verb = "would start" if planned else "starts"
    if not plan["high_gpus"] and plan.get("text"):
        first = f"{job}: {plan['text']}"
    elif plan["starts_now"]:
        first = f"{job}: {verb} now on {gpus} {_noun(gpus)}"
    else:
        behind = plan.get("behind") or ()
        waits = "would wait" if planned else "waits"
        first = f"{job}: {waits}" + (f" behind {', '.join(behind)}" if behind else " for free GPUs")
    low, high = plan["low_gpus"], plan["high_gpus"]
    lines = [first]
    said = [f"{low} {_noun(low)}" if low == high else f"{low} to {high} GPUs"] if high else []
    if plan.get("eta"):
        said.append(f"ends in {eta_range(plan, now)}")
        if plan["eta"].get("current") is not None and plan["starts_now"]:
            said.append(f"{duration(plan['eta']['current'] - now)} if it keeps {gpus}")
    if said:
        lines.append(f"  predicted: {'; '.join(said)}")
    if not plan.get("eta"):
        lines.append("  no ETA yet: how fast the job is will be measured while it runs")
    if plan.get("note"):
        lines.append(f"  note: {plan['note']}")
    return lines


def _noun(count: int) -> str:
    return "GPU" if count == 1 else "GPUs"
