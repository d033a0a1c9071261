"""Reads the plans of a job's generations from the job's store, and writes what this replica reports there.

The job's shim hosts the store and writes the plans; `member` follows them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from pollux.agent.distributed.authenticated_store import AuthenticatedStore
from pollux.agent.distributed.rendezvous import store_access
from pollux.core.errors import InvalidInput, Unreachable
from pollux.wire.live import keys
from pollux.wire.live.codec import MAX_VALUE_BYTES, MalformedValue, decode, encode
from pollux.wire.live.plan import GenerationPlan
from pollux.wire.live.store_channel import SECRET_VARIABLE

__all__ = ["OPEN", "SHUT", "STORE_SECONDS", "Membership", "connect"]

OPEN = "open"
SHUT = "shut"
STORE_SECONDS = 60.0
"""How long a request to the job's store may take."""

_POLL_SECONDS = 0.003
# A wait of minutes, such as for replicas that evaluate, need not ask the store that often.
_LATER_POLL_SECONDS = 0.02
_SOON_SECONDS = 2.0
# A replica that is more generations behind than this does not catch up.
_MOST_GENERATIONS = 1000
_T = TypeVar("_T")
_log = logging.getLogger("pollux")
_clients: dict[tuple[int, str], dist.Store] = {}


def connect(address: str, timeout: float) -> dist.Store:
    """This process's one client of the job's store, at "host:port"; many clients would stall."""
    client = _clients.get((os.getpid(), address))
    if client is not None:
        return client
    access = store_access()
    if access is None or access.address != address:
        raise InvalidInput(
            f"POLLUX_STORE is '{address}', but {SECRET_VARIABLE} has no secret for it: unset both, as only the "
            "launcher of a job sets them"
        )
    try:
        client = AuthenticatedStore(access, timeout)
    except (dist.DistError, RuntimeError) as error:
        raise Unreachable(f"the job's store at {address} does not answer: {error}; restart the job") from error
    _clients[os.getpid(), address] = client
    return client


class Membership:
    """This replica's `rank` in `generation`, and its keys in the job's store.

    Every method makes one or two requests; only `wait` and `is_first_left` wait. Errors of the store are `RuntimeError`
    (PyTorch's `DistError` among them).
    """

    def __init__(self, store: dist.Store, generation: int, rank: int) -> None:
        self.store = store
        self.generation = generation
        self.ranks = {generation: rank}
        self._malformed: tuple[str, str | None] = ("", None)
        self._live = dist.PrefixStore(keys.PREFIX, store)

    @property
    def rank(self) -> int:
        """This replica's rank in its generation."""
        return self.ranks[self.generation]

    def group_store(self, generation: int) -> dist.Store:
        """The store, with a prefix of its own, where the process groups of a generation meet."""
        return dist.PrefixStore(f"group/{generation}", self._live)

    def handover_store(self, generation: int) -> dist.Store:
        """The store, with another prefix, where the generation's members meet the leavers that send them the state."""
        return dist.PrefixStore(f"handover/{generation}", self._live)

    def note_rank(self, plan: GenerationPlan, rank: int) -> None:
        """Note this replica's rank in the generation of a plan, whether or not the move succeeds."""
        self.ranks[plan.generation] = rank

    # What the shim says

    def _text(self, key: str) -> str | None:
        """The first characters of a key's value as text, even if it is malformed; None if the key is not set."""
        if not self._live.check([key]):
            return None
        return self._live.get(key)[: MAX_VALUE_BYTES + 1].decode(errors="replace")

    def _value(self, key: str, read: Callable[[str], _T]) -> _T | None:
        """A value as `read` returns it; None where there is none, and, with a warning, where it is malformed."""
        text = self._text(key)
        try:
            return None if text is None else read(text)
        except MalformedValue as error:
            if (key, text) != self._malformed:
                self._malformed = (key, text)
                _log.warning("the job's store has a malformed value of '%s', which is ignored: %s", key, error)
            return None

    def committed(self) -> int:
        """The newest generation that all replicas are to move to; -1 for none so far."""
        found = self._value(keys.COMMITTED, lambda text: decode(int, text))
        return -1 if found is None else found

    def plan(self, generation: int) -> GenerationPlan | None:
        """The plan of a generation; None where there is none."""
        return self._value(keys.plan(generation), GenerationPlan.decode)

    def withdrawn(self, generation: int) -> str | None:
        """Why a plan was withdrawn before any replica moved; None where it was not."""
        return self._text(keys.withdrawn(generation))

    def lost(self, generation: int) -> frozenset[int]:
        """The ranks of a generation that are known to be lost."""
        return frozenset(self._value(keys.lost(generation), lambda text: decode(tuple[int, ...], text)) or ())

    def is_first_left(self, seconds: float) -> bool:
        """Whether this replica is the first of its generation that is left; if so, note it in the store.

        A loss may become known after the failure of a group: wait up to `seconds` for it, unless a replica of lower
        rank has written that it is the first.
        """
        generation, earlier = self.generation, frozenset(range(self.rank))

        def look() -> bool | None:
            if earlier <= self.lost(generation):
                return True
            return False if any(self._text(keys.saves(generation, rank)) is not None for rank in earlier) else None

        is_first = self.wait(look, seconds) is True
        if is_first:
            self.write(keys.saves(generation, self.rank))
        return is_first

    def newest(self, above: int | None = None) -> GenerationPlan | None:
        """The newest committed plan above a generation (None: the present one) that concerns this replica.

        The plan starts from a generation of this replica, and was not withdrawn; the replica is a member or leaves.
        """
        floor = self.generation if above is None else above
        committed = self.committed()
        if committed > floor and not self._is_known(committed):
            return None
        for generation in range(committed, max(floor, committed - _MOST_GENERATIONS), -1):
            plan = self.plan(generation)
            if plan is not None and plan.before in self.ranks and self.withdrawn(generation) is None:
                return plan
        return None

    def _is_known(self, committed: int) -> bool:
        """Whether there is a plan for that generation, which is written before the commit; a warning where not."""
        is_there = bool(self._live.check([keys.plan(committed)]))
        if not is_there and (keys.COMMITTED, str(committed)) != self._malformed:
            self._malformed = keys.COMMITTED, str(committed)
            _log.warning("the job's store calls generation %d committed, but has no plan for it: ignored", committed)
        return is_there

    # What this replica says

    def write(self, key: str, value: object = "") -> None:
        """Write a key of `pollux.wire.live.keys`; text as it is, any other value as JSON."""
        self._live.set(key, value if isinstance(value, str) else encode(value))

    def are_here(self, plan: GenerationPlan) -> bool:
        """Whether all members of a plan, and all its senders, have come to the meeting."""
        return bool(self._live.check([keys.here(plan.generation, number) for number in range(plan.num_present)]))

    def have_received(self, plan: GenerationPlan) -> bool:
        """Whether all members of a plan have the state, by their own and the senders' reports."""
        return bool(self._live.check([keys.received(plan.generation, number) for number in range(plan.num_present)]))

    def is_handed_over(self, generation: int) -> bool:
        """Whether the members train, so that the replicas that sent the state are not needed any more."""
        return bool(self._live.check([keys.handed(generation)]))

    def decide(self, generation: int, what: str) -> str:
        """Decide whether a generation forms, OPEN or SHUT; the first replica's decision holds and is returned."""
        return self._live.compare_set(keys.door(generation), "", what).decode()

    def has_failed(self, generation: int) -> str | None:
        """Why some rank gave up a generation; None where none did."""
        return self._text(keys.failed(generation))

    def fail(self, generation: int, why: str) -> None:
        """Give up a generation, so that the job is restarted; does nothing where the store is lost."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            self.write(keys.failed(generation), why)

    def share_facts(self, facts: Mapping[str, object]) -> None:
        """Write the facts that later replicas must agree with; on replica 0."""
        self.write(keys.FACTS, dict(facts))

    def facts(self) -> dict[str, object]:
        """The facts that `share_facts` wrote; empty for none."""
        return self._value(keys.FACTS, lambda text: decode(dict[str, Any], text)) or {}

    def write_ends(self, generation: int, rank: int, ends: Sequence[str]) -> None:
        """Write this replica's ends of its connections, once the groups of a generation exist."""
        self.write(keys.ends(generation, rank), list(ends))

    def ends(self, generation: int, num_replicas: int) -> frozenset[str]:
        """The ends of connections of all replicas of a generation that wrote theirs."""
        told = (
            self._value(keys.ends(generation, rank), lambda text: decode(tuple[str, ...], text))
            for rank in range(num_replicas)
        )
        return frozenset(end for ends in told for end in ends or ())

    @staticmethod
    def wait(look: Callable[[], _T | None], seconds: float, clock: Callable[[], float] = time.monotonic) -> _T | None:
        """Call `look` until it returns a value; None after that many seconds."""
        began = clock()
        while True:
            seen = look()
            waited = clock() - began
            if seen is not None or waited >= seconds:
                return seen
            time.sleep(_POLL_SECONDS if waited < _SOON_SECONDS else _LATER_POLL_SECONDS)
