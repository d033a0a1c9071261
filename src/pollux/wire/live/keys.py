"""The keys that replicas and their shim exchange in the job's store, and who writes each.

Every key of the shim stands below `PREFIX`. It names a generation, and a rank in it where every replica writes its own.
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
    "PROCESS_GROUP",
    "READY",
    "KeyParts",
    "beat",
    "done",
    "door",
    "ends",
    "failed",
    "group",
    "handed",
    "handover",
    "here",
    "job",
    "job_count",
    "lost",
    "parse",
    "plan",
    "ready",
    "received",
    "saves",
    "step_request",
    "withdrawn",
]

PREFIX = "pollux/live"

COMMITTED = "committed"
"""The number of the newest generation that all replicas must join. Written by the shim."""

FACTS = "facts"
"""Settings in which joining replicas must agree, as a JSON mapping. Written by replica 0."""

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
    """The parts of a key: its kind, its generation, and its rank, if it has one."""

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


# Written by the shim


def plan(generation: int) -> str:
    """The `GenerationPlan` of a generation."""
    return f"plan/{generation}"


def withdrawn(generation: int) -> str:
    """Why a generation was withdrawn before any replica joined it, as text."""
    return f"withdrawn/{generation}"


def lost(generation: int) -> str:
    """The ranks of a generation that are known to be dead, as a JSON list."""
    return f"lost/{generation}"


def handed(generation: int) -> str:
    """Set when all members have taken over the state, so that the replicas that sent it may end."""
    return f"handed/{generation}"


# Written by replicas


def ready(generation: int, rank: int) -> str:
    """Set when a joining replica is ready and waits for the commit."""
    return f"{READY}/{generation}/{rank}"


def here(generation: int, number: int) -> str:
    """Set when a member, or a sender numbered after the members, has stopped training and waits for the others."""
    return f"{HERE}/{generation}/{number}"


def received(generation: int, number: int) -> str:
    """Set when a member has received the state, or a sender has sent it."""
    return f"received/{generation}/{number}"


def done(generation: int, rank: int) -> str:
    """The `PauseReport` of a replica after its first step in the generation."""
    return f"{DONE}/{generation}/{rank}"


def saves(generation: int, rank: int) -> str:
    """This replica saves the state for all remaining ones."""
    return f"saves/{generation}/{rank}"


def beat(generation: int, rank: int) -> str:
    """The newest `Heartbeat` of a replica."""
    return f"{BEAT}/{generation}/{rank}"


def ends(generation: int, rank: int) -> str:
    """The local ends of a replica's connections to others, as a JSON list of texts."""
    return f"ends/{generation}/{rank}"


def door(generation: int) -> str:
    """Whether the generation starts; the first replica that writes the key decides for all."""
    return f"door/{generation}"


def failed(generation: int) -> str:
    """Why a replica has abandoned the generation, as text."""
    return f"{FAILED}/{generation}"


# Only among replicas: prefixes of keys, and keys below them

PROCESS_GROUP = "pollux/group"
"""Where the first process group meets."""


def group(generation: int) -> str:
    """Where the process groups of a generation meet; below `PREFIX`, as `handover`."""
    return f"group/{generation}"


def handover(generation: int) -> str:
    """Where the members of a generation meet the leavers that send them the state."""
    return f"handover/{generation}"


def job_count(rank: int) -> str:
    """How many jobs a replica has had in one process group, which may outlive a job."""
    return f"pollux/jobs/{rank}"


def job(number: int) -> str:
    """What the replicas of the job of that number exchange; the same number on all of them."""
    return f"pollux/job/{number}"


def step_request(number: int, name: str) -> str:
    """A part of the agreement of that number on the requests that replicas serve after a step; below `job`."""
    return f"watch/{number}/{name}"
