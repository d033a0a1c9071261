"""The keys that replicas and their supervisor exchange in the job's store, and who writes each.

Every key stands below `PREFIX`. A key names a generation, and a rank in it where every replica writes its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "BEAT",
    "COMMITTED",
    "DONE",
    "FACTS",
    "FAILED",
    "HERE",
    "PREFIX",
    "READY",
    "KeyParts",
    "beat",
    "done",
    "door",
    "ends",
    "failed",
    "handed",
    "here",
    "lost",
    "parse",
    "plan",
    "ready",
    "received",
    "saves",
    "withdrawn",
]

PREFIX = "pollux/live"

COMMITTED = "committed"
"""The newest generation that all replicas are to go to, as a number. Written by the supervisor."""

FACTS = "facts"
"""What joining replicas must agree on, as a JSON mapping. Written by replica 0."""

READY = "ready"
"""The kind of the keys of `ready`."""

HERE = "here"
"""The kind of the keys of `here`."""

DONE = "done"
"""The kind of the keys of `done`."""

FAILED = "failed"
"""The kind of the keys of `failed`."""

BEAT = "beat"
"""The kind of the keys of `beat`."""

_KEY = re.compile(r"([a-z]{1,20})/(\d{1,18})(?:/(\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class KeyParts:
    """What a key says: its kind, its generation, and a rank where it has one."""

    kind: str
    generation: int
    rank: int | None


def parse(key: str) -> KeyParts | None:
    """The parts of a key that names a generation; None for any other key."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    kind, generation, rank = match.groups()
    return KeyParts(kind, int(generation), None if rank is None else int(rank))


# Written by the supervisor


def plan(generation: int) -> str:
    """The plan of a generation: see `GenerationPlan`."""
    return f"plan/{generation}"


def withdrawn(generation: int) -> str:
    """Why a generation was given up before any replica went there, as text."""
    return f"withdrawn/{generation}"


def lost(generation: int) -> str:
    """The ranks of a generation that are known to be dead, as a JSON list."""
    return f"lost/{generation}"


def handed(generation: int) -> str:
    """All members have gone on from the state that they got: the replicas that sent it may end."""
    return f"handed/{generation}"


# Written by replicas


def ready(generation: int, rank: int) -> str:
    """A joining replica is built, and waits for the commit."""
    return f"{READY}/{generation}/{rank}"


def here(generation: int, number: int) -> str:
    """A member, or a sender numbered after the members, has stopped training and waits for the others."""
    return f"{HERE}/{generation}/{number}"


def received(generation: int, number: int) -> str:
    """A member has the state, or a sender has sent it."""
    return f"received/{generation}/{number}"


def done(generation: int, rank: int) -> str:
    """A replica has taken its first step in the generation: see `PauseReport`."""
    return f"{DONE}/{generation}/{rank}"


def saves(generation: int, rank: int) -> str:
    """This replica saves the state for all that are left."""
    return f"saves/{generation}/{rank}"


def beat(generation: int, rank: int) -> str:
    """The newest sign of life of a replica: see `Heartbeat`."""
    return f"{BEAT}/{generation}/{rank}"


def ends(generation: int, rank: int) -> str:
    """A replica's ends of its connections to others, as a JSON list of texts."""
    return f"ends/{generation}/{rank}"


def door(generation: int) -> str:
    """Whether the generation comes about; the first replica that writes it decides for all."""
    return f"door/{generation}"


def failed(generation: int) -> str:
    """Why a replica has given the generation up, as text."""
    return f"{FAILED}/{generation}"
