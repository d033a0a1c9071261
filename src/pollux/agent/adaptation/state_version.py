"""Whether a saved state is of the version that this code reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pollux.core.errors import CheckpointMismatch

__all__ = ["require_version"]


def require_version(what: str, state: Mapping[str, Any], known: int) -> None:
    """Raise `CheckpointMismatch` where the state of `what` has another version than the known one."""
    if state.get("version") != known:
        raise CheckpointMismatch(
            f"{what} has version {state.get('version')}, known is {known}: resume with the release of pollux that "
            "wrote it"
        )
