"""The plan of a job in words: when it starts, on how many GPUs, and when it should end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pollux.cli.display.number_format import duration, eta_range

__all__ = ["plan_lines"]


def plan_lines(plan: Mapping[str, Any], now: float, planned: bool = False) -> list[str]:
    """Lines on the start, the prediction and the next step."""
    low, high = plan["low_gpus"], plan["high_gpus"]
    lines = [f"{plan['job_id']}: {_start(plan, planned)}"]
    said = [f"{low} {_noun(low)}" if low == high else f"{low} to {high} GPUs"] if high else []
    if plan.get("eta"):
        said.append(f"ends in {eta_range(plan, now)}")
        if plan["eta"].get("current") is not None and plan["starts_now"]:
            said.append(f"{duration(plan['eta']['current'] - now)} if it keeps {plan['gpus']}")
    if said:
        lines.append(f"  predicted: {'; '.join(said)}")
    if not plan.get("eta"):
        lines.append("  no ETA yet: how fast the job is will be measured while it runs")
    if plan.get("note"):
        lines.append(f"  note: {plan['note']}")
    return lines


def _start(plan: Mapping[str, Any], planned: bool) -> str:
    gpus, behind = plan["gpus"], plan.get("behind") or ()
    if not plan["high_gpus"] and plan.get("text"):
        return str(plan["text"])
    if plan["starts_now"]:
        return f"{'would start' if planned else 'starts'} now on {gpus} {_noun(gpus)}"
    waits = "would wait" if planned else "waits"
    return f"{waits} behind {', '.join(behind)}" if behind else f"{waits} for free GPUs"


def _noun(count: int) -> str:
    return "GPU" if count == 1 else "GPUs"
