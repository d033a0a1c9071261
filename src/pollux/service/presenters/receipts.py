"""Receipts that jobs have written, read as untrusted text: a file of a training script may hold anything."""

from __future__ import annotations

import json
import math
from pathlib import Path

from pollux.storage.foreign_file import read_inside
from pollux.wire.home_layout import receipt_folder

__all__ = ["LARGEST_RECEIPT", "receipt_of"]

LARGEST_RECEIPT = 8 * 2**20
"""In bytes; an agent's own receipt is far smaller."""


def _finite(text: str) -> float | None:
    """None for a number that is too large, such as 1e999: JSON cannot hold infinity."""
    number = float(text)
    return number if math.isfinite(number) else None


def receipt_of(home: Path, job_id: str) -> bytes | None:
    """The receipt of a job as a JSON object; None if there is no file, or it holds no object.

    Conflict for anything but a plain file: no link is followed, and nothing else is opened.
    """
    folder = receipt_folder(home, job_id)
    try:
        text = read_inside(folder.parent, folder.name, "receipt.json", most_bytes=LARGEST_RECEIPT)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(text, parse_constant=lambda word: None, parse_float=_finite)
        return json.dumps(found, separators=(",", ":")).encode() if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        return None
