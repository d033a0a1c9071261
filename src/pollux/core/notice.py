"""How much notice a job needs to save its work before its node goes, and how often it saves where it gets less. Pure.

The same arithmetic tells people at submit and sets the pace of checkpoints inside a job.
"""

from __future__ import annotations

__all__ = ["AHEAD_SHARE", "FIRST_SECONDS", "LEAST_SECONDS", "ahead_seconds", "needed_seconds"]

LEAST_SECONDS = 10.0
"""What a job needs of which no checkpoint was measured: the step under way ends, and some hundred MB are written."""

FIRST_SECONDS = 60.0
"""When the first checkpoint is made where nodes may be taken back: from then on it is known how long one takes."""

AHEAD_SHARE = 0.05
"""The most of its time that a job pauses for checkpoints made ahead."""

_SPARE_TIMES = 1.5
_SPARE_SECONDS = 3.0
_LEAST_AHEAD_SECONDS = 30.0
# One begins when the last has been written, and the disk is others', too.
_WRITING_TIMES = 2.0


def needed_seconds(checkpoint_seconds: float | None) -> float:
    """The notice that suffices for a checkpoint which took so long; None: none was measured.

    1.5 times as long and 3 s more: the step under way ends first, and where a node goes, others save at the same time.
    """
    if checkpoint_seconds is None:
        return LEAST_SECONDS
    return _SPARE_TIMES * checkpoint_seconds + _SPARE_SECONDS


def ahead_seconds(
    notice_seconds: float | None, checkpoint_seconds: float | None, pause_seconds: float = 0.0
) -> float | None:
    """How often to save ahead where the notice is too short; None where it suffices, or where none is known.

    Training pauses `pause_seconds` for each checkpoint, which may cost `AHEAD_SHARE` of the time.
    """
    if notice_seconds is None:
        return None
    if checkpoint_seconds is None:
        return FIRST_SECONDS
    if needed_seconds(checkpoint_seconds) <= notice_seconds:
        return None
    return max(_LEAST_AHEAD_SECONDS, pause_seconds / AHEAD_SHARE, _WRITING_TIMES * checkpoint_seconds)
