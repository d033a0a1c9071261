"""Which replicas belong to which generation of a job, and what this one tells of itself: keys in the job's store.

The store is hosted by whoever supervises the replicas, which writes the plans. How replicas follow one is in `member`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from pollux.core.errors import InvalidInput, Unreachable

__all__ = ["LOST", "OPEN", "SHUT", "STORE_SECONDS", "Member", "Membership", "Plan", "connect"]

LOST = "lost"
OPEN = "open"
SHUT = "shut"
STORE_SECONDS = 60.0
"""How long a request to the job's store may take."""

_PREFIX = "pollux/live"
_POLL_SECONDS = 0.003
# Who waits for minutes, for others that evaluate say, need not ask the store that often.
_LATER_POLL_SECONDS = 0.02
_SOON_SECONDS = 2.0
_DEADLINES = {"join": 30.0, "regroup": 10.0, "transfer": 30.0}
_T = TypeVar("_T")
_clients: dict[tuple[int, str], dist.Store] = {}


@dataclass(frozen=True, slots=True)
class Member:
    """One replica of a generation: its rank there, and what it was in the generation before; None for a joiner."""

    rank: int
    was: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A generation: its members, and the generation `before` that their old ranks are those of.

    `deadlines` are seconds by phase ("join", "regroup", "transfer"); `why` is "resize", or "lost" after a loss.
    `senders` are the ranks before of those that hand the state over and leave, where no member holds it.
    """

    generation: int
    before: int
    members: tuple[Member, ...]
    num_nodes: int = 1
    why: str = "resize"
    deadlines: Mapping[str, float] = field(default_factory=dict)
    senders: tuple[int, ...] = ()

    @classmethod
    def read(cls, text: str | bytes) -> Plan:
        """A plan as the store has it."""
        entries = json.loads(text)
        members = sorted((Member(int(each["rank"]), each["was"]) for each in entries["members"]), key=lambda m: m.rank)
        return cls(
            int(entries["generation"]),
            int(entries["before"]),
            tuple(members),
            int(entries.get("num_nodes", 1)),
            str(entries.get("why", "resize")),
            {str(name): float(seconds) for name, seconds in (entries.get("deadline_seconds") or {}).items()},
            tuple(int(rank) for rank in entries.get("senders") or ()),
        )

    def text(self) -> str:
        """The plan as the store has it."""
        return json.dumps(
            {
                "generation": self.generation,
                "before": self.before,
                "members": [{"rank": member.rank, "was": member.was} for member in self.members],
                "num_nodes": self.num_nodes,
                "deadline_seconds": dict(self.deadlines),
                "why": self.why,
                "senders": list(self.senders),
            }
        )

    @property
    def num_replicas(self) -> int:
        """How many replicas the generation has."""
        return len(self.members)

    def rank_of(self, was: int) -> int | None:
        """The rank of the replica that was that one before; None where it leaves."""
        return next((member.rank for member in self.members if member.was == was), None)

    @property
    def num_present(self) -> int:
        """How many come to its door: its members and, numbered after them, its senders."""
        return self.num_replicas + len(self.senders)

    def place_of_sender(self, was: int) -> int | None:
        """The number at the door of who hands the state over; None where that replica does not."""
        return self.num_replicas + self.senders.index(was) if was in self.senders else None

    def deadline(self, phase: str) -> float:
        """Seconds that a phase may take."""
        return self.deadlines.get(phase, _DEADLINES[phase])

    def kind(self, num_before: int) -> str:
        """What the change is for a job of that many replicas: "grow", "shrink", "move" or "recover"."""
        if self.why == LOST:
            return "recover"
        if self.num_replicas == num_before:
            return "move"
        return "grow" if self.num_replicas > num_before else "shrink"


def connect(address: str, timeout: float) -> dist.Store:
    """This process's one client of the job's store, at "host:port"; made anew again and again, clients stall."""
    client = _clients.get((os.getpid(), address))
    if client is not None:
        return client
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidInput(f"POLLUX_STORE is '{address}': give host:port, or unset it")
    limit = datetime.timedelta(seconds=timeout)
    try:
        client = dist.TCPStore(host, int(port), is_master=False, timeout=limit, wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        raise Unreachable(f"the job's store at {address} does not answer: {error}; start the job anew") from error
    _clients[os.getpid(), address] = client
    return client


class Membership:
    """This replica's place in its job's generations: `rank` in `generation`, and what others are to know of it.

    Every method is one or two requests to the store; none waits for a key to appear. Errors of the store are
    `RuntimeError` (PyTorch's `DistError` among them).
    """

    def __init__(self, store: dist.Store, generation: int, rank: int) -> None:
        self.store = store
        self.generation = generation
        self.ranks = {generation: rank}
        self._live = dist.PrefixStore(_PREFIX, store)

    @property
    def rank(self) -> int:
        """This replica's rank in the generation it is in."""
        return self.ranks[self.generation]

    def group_store(self, generation: int) -> dist.Store:
        """Where the process groups of a generation meet; a fresh prefix."""
        return dist.PrefixStore(f"group/{generation}", self._live)

    def handover_store(self, generation: int) -> dist.Store:
        """Where its members meet those that hand the state over to them, before they meet each other."""
        return dist.PrefixStore(f"handover/{generation}", self._live)

    def enters(self, plan: Plan, rank: int) -> None:
        """From here on this replica counts as that rank of that generation, whether or not it comes about."""
        self.ranks[plan.generation] = rank

    # What the supervisor says

    def _text(self, key: str) -> str | None:
        return self._live.get(key).decode() if self._live.check([key]) else None

    def committed(self) -> int:
        """The newest generation that everybody is to go to; -1 for none so far."""
        return int(self._text("committed") or -1)

    def plan(self, generation: int) -> Plan | None:
        """The plan of a generation; None where there is none."""
        text = self._text(f"plan/{generation}")
        return None if text is None else Plan.read(text)

    def withdrawn(self, generation: int) -> str | None:
        """Why a generation was given up before anybody went there; None where it was not."""
        return self._text(f"withdrawn/{generation}")

    def lost(self, generation: int) -> frozenset[int]:
        """The ranks of a generation that are known to be dead."""
        return frozenset(json.loads(self._text(f"lost/{generation}") or "[]"))

    def is_first_left(self, seconds: float) -> bool:
        """Whether this replica is the first of its generation that is not known to be dead; tells it where it is.

        That somebody is dead may be heard of later than that a group with it has failed: so much is waited for that,
        unless an earlier replica has told.
        """
        generation, earlier = self.generation, frozenset(range(self.rank))

        def look() -> bool | None:
            if earlier <= self.lost(generation):
                return True
            return False if any(self._text(f"saves/{generation}/{rank}") is not None for rank in earlier) else None

        is_first = self.wait(look, seconds) is True
        if is_first:
            self.tell("saves", generation, self.rank)
        return is_first

    def newest(self, above: int | None = None) -> Plan | None:
        """The newest committed plan above a generation (None: the present one) that says something about this replica.

        It counts from a generation that this replica was in; in the plan it may be a member or leave. One that was
        withdrawn after all says nothing.
        """
        floor = self.generation if above is None else above
        for generation in range(self.committed(), floor, -1):
            plan = self.plan(generation)
            if plan is not None and plan.before in self.ranks and self.withdrawn(generation) is None:
                return plan
        return None

    # What this replica says

    def tell(self, what: str, generation: int, rank: int | None = None, value: Any = "") -> None:
        """Write `what/<generation>[/<rank>]`: "ready", "here", "received", "done", "left", "saves", "beat", "ends"."""
        key = f"{what}/{generation}" if rank is None else f"{what}/{generation}/{rank}"
        self._live.set(key, json.dumps(value))

    def are_here(self, plan: Plan) -> bool:
        """Whether all members of a plan, and all its senders, have come to its door."""
        return bool(self._live.check([f"here/{plan.generation}/{number}" for number in range(plan.num_present)]))

    def have_received(self, plan: Plan) -> bool:
        """Whether the state has come to all members of a plan, as they and its senders say."""
        return bool(self._live.check([f"received/{plan.generation}/{number}" for number in range(plan.num_present)]))

    def is_handed_over(self, generation: int) -> bool:
        """Whether its members have gone on from what they got, so that nobody needs those that sent it."""
        return bool(self._live.check([f"handed/{generation}"]))

    def decide(self, generation: int, what: str) -> str:
        """Say whether a generation comes about, OPEN or SHUT: what the first replica says holds, and is returned."""
        return self._live.compare_set(f"door/{generation}", "", what).decode()

    def has_failed(self, generation: int) -> str | None:
        """Why some rank gave a generation up; None where none did."""
        return self._text(f"failed/{generation}")

    def fail(self, generation: int, why: str) -> None:
        """Give a generation up, so that the supervisor starts the job anew; says nothing where the store is gone."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            self.tell("failed", generation, value=why)

    def share_facts(self, facts: Mapping[str, object]) -> None:
        """What replicas that join later must agree on; written by replica 0."""
        self._live.set("facts", json.dumps(facts))

    def facts(self) -> dict[str, object]:
        """What `share_facts` wrote; empty where nothing is there."""
        return dict(json.loads(self._text("facts") or "{}"))

    def tell_ends(self, generation: int, rank: int, ends: Sequence[str]) -> None:
        """This replica's ends of its connections, once the groups of a generation are there."""
        self.tell("ends", generation, rank, list(ends))

    def ends(self, generation: int, num_replicas: int) -> frozenset[str]:
        """The ends of all replicas of a generation that told theirs."""
        texts = (self._text(f"ends/{generation}/{rank}") for rank in range(num_replicas))
        return frozenset(end for text in texts if text is not None for end in json.loads(text))

    @staticmethod
    def wait(look: Callable[[], _T | None], seconds: float, clock: Callable[[], float] = time.monotonic) -> _T | None:
        """What `look` gives as soon as that is something; None after that many seconds."""
        began = clock()
        while True:
            seen = look()
            waited = clock() - began
            if seen is not None or waited >= seconds:
                return seen
            time.sleep(_POLL_SECONDS if waited < _SOON_SECONDS else _LATER_POLL_SECONDS)
