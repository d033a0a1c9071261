"""Children that may be killed at any moment: run something in a fork and hear what it reports until then."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["fork", "read_all"]

_LONGEST_SECONDS = 60


def fork(action: Callable[..., None], first: Any, *others: Any) -> tuple[int, int]:
    """Run `action(first, report, *others)` in a child, `report` being the file that it may write to.

    The child's process number, and the reading end of what it reports. It lives for a minute at most.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        # Nobody is left over should the parent be ended.
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
    """Everything that comes until the child, and whoever has its file, is gone; the file is closed."""
    with os.fdopen(reading) as pipe:
        return pipe.read()
