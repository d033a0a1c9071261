"""The receipt of a run as text: what was adapted and why, in at most 15 lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["summary"]

_MOST_LINES = 15
_TELLING_KINDS = ("batch-changed", "resized", "out-of-memory", "rolled-back", "frozen")


def summary(receipt: Mapping[str, Any], kinds: Sequence[str]) -> str:
    """The text for a receipt in the form of `Receipt.to_json`; `kinds` of events are counted in this order."""
    return "\n".join(_lines(receipt, kinds)[:_MOST_LINES])


def _lines(receipt: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    """The lines of the summary; facts that do not apply are left out."""
    totals, progress = receipt["totals"], receipt["progress"]
    where = _where(progress["predicted"], receipt["dataset_size"])
    kept = "exact" if receipt["exact"] else "not exact" if receipt["mode"] == "exact" else "adaptive"
    lines = [f"{receipt['job']}: {kept}, {where} in {totals['steps']:,} steps and {_duration(totals['seconds'])}"]
    lines += [f"not exact: {reason}" for reason in receipt["not_exact_because"][:2]]
    if not receipt["configurations"]:
        return [*lines, "nothing was recorded yet"]
    lines.append(_batch_line(receipt))
    replicas = [entry["num_replicas"] for entry in receipt["configurations"]]
    few, many = min(replicas), max(replicas)
    held = f"{few}" if few == many else f"{few} to {many}, now {replicas[-1]}"
    lines.append(f"replicas: {held}; {_duration(totals['replica_seconds'])} of replica time")
    if receipt["mode"] == "adaptive":
        lines += _learning_lines(receipt)
    losses = [loss for loss in receipt["rows"]["loss"] if loss is not None]
    if losses:
        lines.append(f"loss: {losses[0]:.4g} at first, {losses[-1]:.4g} at last")
    lines += _event_lines(receipt, kinds)
    return lines


def _batch_line(receipt: Mapping[str, Any]) -> str:
    batches = [entry["total_batch"] for entry in receipt["configurations"]]
    factors = receipt["rows"]["lr_factors"][-1]
    limit = "" if receipt["max_batch"] is None else f", at most {receipt['max_batch']} allowed"
    rate = ", ".join(f"×{factor:.3g}" for factor in factors[:4]) or "as set"
    path = f"{receipt['initial_batch']}"
    if set(batches) != {receipt["initial_batch"]}:
        path += f" → {batches[-1]} (largest {max(batches)}{limit})"
    return f"total batch: {path}; learning rate by rule '{receipt['rule']}', now {rate}"


def _learning_lines(receipt: Mapping[str, Any]) -> list[str]:
    progress, rows = receipt["progress"], receipt["rows"]
    lines = []
    if progress["mean_efficiency"] is not None:
        lines.append(
            f"efficiency: {progress['mean_efficiency']:.3f} on average; {progress['samples']:,} samples did the "
            f"predicted work of {progress['exact_samples']:,.0f} at batch {receipt['initial_batch']}"
        )
        lines.append(f"an exact run would take {progress['exact_steps']:,} steps for it")
    low, high = rows["noise_low"][-1], rows["noise_high"][-1]
    if rows["noise_scale"][-1] is not None and high is not None:
        lines.append(f"noise scale: {rows['noise_scale'][-1]:.4g} samples, between {low or 0.0:.4g} and {high:.4g}")
    elif low is not None:
        lines.append(f"noise scale: unknown, at least {low:.4g} samples")
    told = [entry for entry in progress["realised"]["changes"] if entry["realised_over_predicted"] is not None]
    if told:
        ratios = ", ".join(
            f"{entry['realised_over_predicted']:.2f} ({entry['low']:.2f} to {entry['high']:.2f})" for entry in told[-3:]
        )
        lines.append(f"realised over predicted progress after changes, by the loss: {ratios}")
    elif progress["realised"]["changes"]:
        lines.append("realised against predicted progress: the loss is too noisy to tell")
    return lines


def _event_lines(receipt: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    """How often each kind of event happened, then the newest reasons."""
    counts = receipt["totals"]["events"]
    lines = []
    if counts:
        lines.append("events: " + ", ".join(f"{kind} {counts[kind]}" for kind in kinds if kind in counts))
    for event in [event for event in receipt["events"] if event["kind"] in _TELLING_KINDS][-4:]:
        lines.append(f"  {_where(event['progress'], receipt['dataset_size'])}: {event['kind']}: {event['text']}")
    return lines


def _where(progress: float, dataset_size: int | None) -> str:
    return f"epoch {progress / dataset_size:.2f}" if dataset_size else f"{progress:,.0f} samples of progress"


def _duration(seconds: float) -> str:
    for size, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.1f} s"
