"""Values as the text that is stored: JSON on one line, facts in it, and which snapshots fit a log."""

from __future__ import annotations

import json
from typing import Any

from pollux.controller import Event
from pollux.controller.codec.events import decode, encode
from pollux.core.errors import InvalidInput, StoreFailed
from pollux.store.protocol import SavedState


def to_text(value: Any, what: str) -> str:
    """JSON without blanks; `what` names the value where it is not plain."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{what} cannot be stored as JSON: {error}; give plain values and finite numbers") from None


def event_to_text(event: Event) -> str:
    """The fact as one line of JSON."""
    return to_text(encode(event), type(event).__name__)


def event_from_text(text: str, where: str) -> Event:
    """The fact of a line; StoreFailed where it cannot be read, since nothing after it can be trusted."""
    try:
        return decode(json.loads(text))
    except (ValueError, InvalidInput) as error:
        raise StoreFailed(f"{where} cannot be read: {error}; restore a backup") from error


def check_saved(saved: SavedState, revision: int) -> None:
    """Refuse a snapshot of what was never logged; only an empty store may begin with a state from elsewhere."""
    if saved.revision < 0 or (saved.revision > revision > 0):
        raise InvalidInput(
            f"a snapshot of revision {saved.revision} does not fit a log that ends at {revision}; "
            "save the state after the last logged event"
        )
