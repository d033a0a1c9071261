"""The heartbeat of a replica, and its report of a pause."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from pollux.wire.live import PROTOCOL_VERSION
from pollux.wire.live.codec import MalformedValue, encode, from_plain, read_json

__all__ = ["DEFAULT_HANG_SECONDS", "Activity", "Heartbeat", "PauseReport", "UnsupportedVersion"]


DEFAULT_HANG_SECONDS = 30.0
"""How long a replica that trains may be silent."""


class Activity(enum.StrEnum):
    """The long activity of a replica other than a step; `TRAINING` between its steps."""

    TRAINING = ""
    FIRST_STEP = "first step"
    CHECKPOINT = "checkpoint"
    DATA = "data"
    PASS_END = "pass end"
    REGROUP = "regroup"
    FINISHED = "finished"


class UnsupportedVersion(MalformedValue):
    """The agent in a replica speaks another version of the protocol."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat after `step`, at the time `at` in seconds since 1970.

    `busy_seconds` is how long the replica has waited for data; `waiting`: it waits for other replicas. `refusal` says
    why the job cannot be resized live; empty if it can.
    """

    step: int
    at: float
    activity: Activity
    busy_seconds: float = 0.0
    waiting: bool = False
    refusal: str = ""
    version: int = PROTOCOL_VERSION

    @classmethod
    def decode(cls, text: str | bytes) -> Heartbeat:
        """The heartbeat that `encode` wrote; `MalformedValue` for any other text."""
        value = read_json(text)
        version = value.get("version") if isinstance(value, Mapping) else None
        if isinstance(version, int) and version != PROTOCOL_VERSION:
            raise UnsupportedVersion(
                f"the agent in its replicas speaks version {str(version)[:20]} of the live protocol, this shim version "
                f"{PROTOCOL_VERSION}: install the same Pollux for both"
            )
        return from_plain(cls, value)

    def encode(self) -> str:
        """The heartbeat as the store holds it."""
        return encode(self)


@dataclass(frozen=True, slots=True)
class PauseReport:
    """How long training paused for a resize of that `kind`; `parts` are the seconds of each phase.

    `step` is the first step after the pause, `bytes` the size of the transferred state.
    """

    pause_seconds: float
    kind: str
    step: int = -1
    bytes: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
