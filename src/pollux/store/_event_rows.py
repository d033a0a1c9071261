"""Facts and other values as lines of JSON, and the check that a snapshot fits a log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pollux.controller import Event
from pollux.controller.codec.events import decode, encode
from pollux.core.errors import InvalidInput, StoreFailed
from pollux.store.protocol import SavedState

_STATE = "the controller's state"
# JSON of so many jobs takes about a millisecond, in which the interpreter does nothing else.
_AT_ONCE = 32


def to_text(value: Any, what: str) -> str:
    """JSON without blanks; `what` names the value in errors."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{what} cannot be stored as JSON: {error}; give plain values and finite numbers") from None


def state_to_text(state: Mapping[str, Any]) -> str:
    """JSON of a saved state, made a few jobs at a time: other threads wait while a piece is made."""
    parts = (f"{to_text(name, 'a name')}:{_in_pieces(value)}" for name, value in state.items())
    return f"{{{','.join(parts)}}}"


def _in_pieces(value: Any) -> str:
    if not isinstance(value, list):
        return to_text(value, _STATE)
    pieces = (to_text(value[begin : begin + _AT_ONCE], _STATE)[1:-1] for begin in range(0, len(value), _AT_ONCE))
    return f"[{','.join(pieces)}]"


def event_to_text(event: Event) -> str:
    """The fact as one line of JSON."""
    return to_text(encode(event), type(event).__name__)


def event_from_text(text: str, where: str) -> Event:
    """The fact of a line; StoreFailed if it cannot be read, since later facts depend on it."""
    try:
        return decode(json.loads(text))
    except (ValueError, RecursionError, InvalidInput) as error:
        raise StoreFailed(f"{where} cannot be read: {error}; restore a backup") from error


def check_saved(saved: SavedState, revision: int) -> None:
    """Refuse a snapshot of a revision that was never logged; only an empty store may begin with a snapshot."""
    if saved.revision < 0 or (saved.revision > revision > 0):
        raise InvalidInput(
            f"a snapshot of revision {saved.revision} does not fit a log that ends at {revision}; "
            "save the state after the last logged event"
        )
