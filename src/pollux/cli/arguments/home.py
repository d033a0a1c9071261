"""Makes the service's folder; `wire.home_layout` names its files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pollux.core.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["make_home"]


def make_home(home: Path, named_by: str = "POLLUX_HOME") -> None:
    """Make the folder, for its owner only, if there is none; InvalidInput if it cannot be written to."""
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        why = "" if os.access(home, os.W_OK | os.X_OK) else "it cannot be written to"
    except OSError as error:
        why = str(error.strerror)
    if why:
        raise InvalidInput(f"home {home} cannot be used: {why}; give another with {named_by}")
