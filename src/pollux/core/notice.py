"""How much notice a job needs to save its work before its node goes, and how often it saves if it gets less. Pure.

Users see these numbers at submit, and checkpoints inside a job follow them.
"""

from __future__ import annotations

__all__ = ["AHEAD_SHARE", "FIRST_SECONDS", "LEAST_SECONDS", "ahead_seconds", "needed_seconds"]

LEAST_SECONDS = 10.0
"""The notice for a job without a measured checkpoint: the current step ends, and some hundred MB are written."""

FIRST_SECONDS = 60.0
"""When the first checkpoint is made where nodes may be taken back; it shows how long a checkpoint takes."""

AHEAD_SHARE = 0.05
"""The largest share of its time that a job pauses for checkpoints made ahead."""

_SPARE_TIMES = 1.5
_SPARE_SECONDS = 3.0
_LEAST_AHEAD_SECONDS = 30.0
# A checkpoint begins after the last is written, and other jobs use the disk, too.
_WRITING_TIMES = 2.0


def needed_seconds(checkpoint_seconds: float | None) -> float:
    """The notice that a checkpoint of this duration needs; None: none was measured.

    1.5 times the duration plus 3 s: the current step ends first, and other jobs on the node save at the same time.
    """
    if checkpoint_seconds is None:
        return LEAST_SECONDS
    return _SPARE_TIMES * checkpoint_seconds + _SPARE_SECONDS


def ahead_seconds(
    notice_seconds: float | None, checkpoint_seconds: float | None, pause_seconds: float = 0.0
) -> float | None:
    """How often to save ahead if the notice is too short; None if it suffices or is unknown.

    Training pauses `pause_seconds` for each checkpoint, which may cost `AHEAD_SHARE` of the time.
    """
    if notice_seconds is None:
        return None
    if checkpoint_seconds is None:
        return FIRST_SECONDS
    if needed_seconds(checkpoint_seconds) <= notice_seconds:
        return None
    return max(_LEAST_AHEAD_SECONDS, pause_seconds / AHEAD_SHARE, _WRITING_TIMES * checkpoint_seconds)
