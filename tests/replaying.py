"""A real replay that waits between its two sizes until a test lets it go on: it stands at one half for as long."""

from __future__ import annotations

import sys
from pathlib import Path

from pollux.service.replay import replays

__all__ = ["held_child"]

_HELD = """
import os, time
from pollux.cli.commands.simulation import simulate
inner, sizes = simulate.simulate_together, []

def held(*words, **named):
    sizes.append(1)
    until = time.monotonic() + 300
    while len(sizes) > 1 and not os.path.exists({go!r}) and time.monotonic() < until:
        time.sleep(0.02)
    return inner(*words, **named)

simulate.simulate_together = held
"""


def held_child(go: Path) -> tuple[str, ...]:
    """The child of `Replays`, which begins its second size once `go` is there."""
    begin, words, rest = replays._CHILD.partition("from pollux.cli.main import main")
    assert words
    return sys.executable, "-c", begin + _HELD.format(go=str(go)) + words + rest
