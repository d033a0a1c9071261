"""Forked children that tests kill at random moments, and the reports that children make until then."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["fork", "read_all"]

_LONGEST_SECONDS = 60


def fork(action: Callable[..., None], first: Any, *others: Any) -> tuple[int, int]:
    """Run `action(first, report, *others)` in a child; `report` is the descriptor to which it writes its reports.

    Returns the child's process number and the descriptor to read its reports from. The child lives a minute at most.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        # The child ends even if the parent is killed.
        signal.alarm(_LONGEST_SECONDS)
        try:
            os.close(reading)
            action(first, writing, *others)
            code = 0
        except BaseException as error:
            print(f"{action.__name__}: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    os.close(writing)
    return child, reading


def read_all(reading: int) -> str:
    """Everything that is reported until the child and its own children have ended; closes the descriptor."""
    with os.fdopen(reading) as pipe:
        return pipe.read()
