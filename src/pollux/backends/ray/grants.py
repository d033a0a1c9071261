"""What Ray's answers to claims mean: which job holds which place, what is asked for again, and what a job is refused.

A claim without a place: Ray
- grants a free GPU: the job has that place;
- grants a GPU that another job uses, or fails: the job is refused, and nothing is placed on the node for a minute;
- grants what is no whole GPU: the same, and the node stays blocked;
- has nothing for some seconds: the node counts as smaller, and the job is refused.

A claim with a place: Ray
- grants the same GPU: nothing changes;
- grants another GPU of the same job: the two claims exchange their places;
- grants yet another GPU: that group is kept, and one more is asked for, until the right GPU has come;
- has nothing more for it then: somebody else has the GPU. The last group stands for the place, the node is blocked;
- fails: the driver asks again.

A claim without a job (a sentinel, left in Ray's queue where other Ray jobs hold the node): whatever Ray says to it, the
node has something to give again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from pollux.backends.ray.claims import Claim, ClaimBook
from pollux.backends.ray.node_book import RayNodeBook

__all__ = ["Grants"]

# For how long nothing is placed on a node where Ray failed to give a place.
_BLOCKED_SECONDS = 60.0


class Grants:
    """The claims of `book` on the nodes of `nodes`, brought in line with Ray; `send` takes orders for the driver."""

    def __init__(
        self,
        book: ClaimBook,
        nodes: RayNodeBook,
        send: Callable[[Mapping[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.book, self._nodes, self._send, self._clock = book, nodes, send, clock
        self._refusals: dict[str, str] = {}
        # Groups with other GPUs than the one in use, by the claim for that one: kept until Ray has given it.
        self._mismatched: dict[str, list[str]] = {}
        # By node where other Ray jobs hold a part: the claim without a job that stays in Ray's queue.
        self._sentinels: dict[str, str] = {}

    # For jobs

    def ask(self, job_id: str, wanted: Mapping[str, int]) -> None:
        """Claim the places by node that a job lacks, and give back claims that it waits for without need."""
        self._refusals.pop(job_id, None)
        taken, freed = self.book.ask(job_id, wanted)
        self._take(taken)
        self._free(freed)

    def adopt(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Claim the places that a running job was found to use and that have no claim yet."""
        self._take(self.book.adopt(job_id, places))

    def drop(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Give these places back; other jobs that wait on the same nodes may have them."""
        self._refusals.pop(job_id, None)
        freed = self.book.drop(job_id, places)
        self._free(freed)
        again = self.book.retry_waiting({claim.node_id for claim in freed})
        if again:
            self._send({"do": "retry", "names": again})

    def refusal(self, job_id: str) -> str:
        """Why a job does not get what it asked for; empty while it may come."""
        return self._refusals.get(job_id) or self.book.refusal(job_id, self._nodes.limited())

    # For the driver

    def for_new_driver(self) -> dict[str, str]:
        """Every claim with its node. The driver removes all other groups, so that none is left that does not match."""
        self._mismatched.clear()
        claims = {claim.name: claim.node_id for claim in self.book.claims.values()}
        return claims | {name: node_id for node_id, name in self._sentinels.items()}

    def granted(self, name: str, gpu: str | None) -> None:
        """Ray has granted a claim, with this GPU of its node; None where it does not matter which."""
        claim = None if self._end_sentinel(name) else self.book.claims.get(name)
        if claim is None:
            return
        if gpu is not None and not gpu.isdigit():
            why = f"node '{claim.node_id}' lends GPU '{gpu}', which is no whole GPU: it is not used"
            self._refuse(claim, why, math.inf)
            return
        place = claim.place if gpu is None else self._place_of(claim, int(gpu))
        other = self._other_claim_at(claim, place)
        if claim.place in (None, place):
            if other is not None:
                why = f"Ray gave GPU {gpu} of node '{claim.node_id}', which job '{other.job_id}' uses; asking again"
                self._refuse(claim, why, _BLOCKED_SECONDS)
                return
        elif other is None or other.job_id != claim.job_id:
            self._ask_for_another(claim)
            return
        else:
            self.book.swap_places(name, other.name)
        self._accept(claim, place)

    def waits(self, name: str) -> None:
        """Ray has had nothing for a claim for some seconds.

        Where our own jobs do not hold all of the node, others do: it has that much less to offer until Ray gives
        something there again.
        """
        self.book.note_waiting(name)
        claim = self.book.claims.get(name)
        if claim is None:
            return
        if name in self._mismatched:
            self._keep_mismatched(claim)
            return
        known, hoped_for = self._nodes.get(claim.node_id), self.book.obtainable_on(claim.node_id)
        if known is not None and hoped_for < known.node.num_gpus:
            known.limit = hoped_for

    def failed(self, name: str, why: str) -> None:
        """Ray could not make a group, or lost it. For a place in use the driver makes another one."""
        claim = None if self._end_sentinel(name) else self.book.claims.get(name)
        if claim is None:
            return
        text = f"Ray failed to give a place on node '{claim.node_id}' ({why}): see 'ray list placement-groups'"
        if claim.place is None:
            self._refuse(claim, text, _BLOCKED_SECONDS)
        elif (known := self._nodes.get(claim.node_id)) is not None:
            known.note("failure", text)

    def drop_claims_without_node(self) -> None:
        """Drop the claims on nodes that Ray does not have any more."""
        gone = [node_id for node_id in self._sentinels if node_id not in self._nodes]
        sentinels = [self._sentinels.pop(node_id) for node_id in gone]
        self._remove_groups([*(claim.name for claim in self.book.drop_except_on(self._nodes)), *sentinels])

    def free_sentinels(self) -> None:
        """Give every sentinel back: the service ends."""
        self._send_free([*self._sentinels.values()])

    # What a grant means

    def _place_of(self, claim: Claim, gpu: int) -> int:
        """The place of a GPU on its node; where the host is not up, the place of the claim is kept."""
        known = self._nodes.get(claim.node_id)
        if known is not None and known.report is not None and gpu in known.report.gpus:
            return known.report.gpus.index(gpu)
        return gpu if claim.place is None else claim.place

    def _other_claim_at(self, claim: Claim, place: int | None) -> Claim | None:
        holder = None if place is None else self.book.claim_at(claim.node_id, place)
        return None if holder is None or holder.name == claim.name else holder

    def _accept(self, claim: Claim, place: int | None) -> None:
        self.book.grant(claim.name, place)
        self._send_free(self._mismatched.pop(claim.name, []))
        known = self._nodes.get(claim.node_id)
        if known is not None:
            known.limit = None
            if known.blocked_until is None:
                known.note("failure", "")

    def _refuse(self, claim: Claim, why: str, seconds: float) -> None:
        """Drop a claim whose grant is of no use; the job is refused, and nothing is placed on the node for a time."""
        self._block(claim.node_id, why, seconds)
        self._refusals[claim.job_id] = why
        self.book.remove(claim.name)
        self._remove_groups([claim.name])

    def _ask_for_another(self, claim: Claim) -> None:
        """Ray made a new group for a place in use, with another GPU: keep that group, and ask for one more."""
        new = self.book.replace_claim(claim.name)
        self._mismatched[new.name] = [*self._mismatched.pop(claim.name, []), claim.name]
        self._take([new])

    def _keep_mismatched(self, claim: Claim) -> None:
        """Ray has no other GPU there: the last group stands for the place in Ray's books, and a warning says so."""
        *others, last = self._mismatched.pop(claim.name)
        self.book.replace_claim(claim.name, last)
        self._send_free([claim.name, *others])
        known = self._nodes.get(claim.node_id)
        gpus = dict(enumerate(known.report.gpus)) if known is not None and known.report is not None else {}
        gpu = None if claim.place is None else gpus.get(claim.place, claim.place)
        why = (
            f"job '{claim.job_id}' uses GPU {gpu} of node '{claim.node_id}', which Ray has lent to somebody else: "
            "nothing new is started there for a minute; 'ray list placement-groups' and 'ray list actors' show who"
        )
        self._block(claim.node_id, why, _BLOCKED_SECONDS)

    def _block(self, node_id: str, why: str, seconds: float) -> None:
        known = self._nodes.get(node_id)
        if known is not None:
            known.block(why, self._clock() + seconds)

    def _end_sentinel(self, name: str) -> bool:
        """Drop the sentinel of that name, if it is one: as far as is known, its node has something to give again."""
        node_id = next((node_id for node_id, sentinel in self._sentinels.items() if sentinel == name), None)
        if node_id is None:
            return False
        del self._sentinels[node_id]
        if (known := self._nodes.get(node_id)) is not None:
            known.limit = None
        self._send_free([name])
        return True

    # Orders for the driver

    def _take(self, claims: list[Claim]) -> None:
        if claims:
            self._send({"do": "take", "claims": {claim.name: claim.node_id for claim in claims}})

    def _free(self, claims: list[Claim]) -> None:
        """Give claims back; one that waits at a limited node stays in Ray's queue, to tell when others have left."""
        freed = []
        for claim in claims:
            known = self._nodes.get(claim.node_id)
            is_limited = known is not None and known.limit is not None
            if claim.waits and is_limited and claim.node_id not in self._sentinels:
                self._sentinels[claim.node_id] = claim.name
            else:
                freed.append(claim.name)
        self._remove_groups(freed)

    def _remove_groups(self, names: list[str]) -> None:
        """Give these groups back, and the mismatched ones that were kept for them."""
        self._send_free([*names, *(kept for name in names for kept in self._mismatched.pop(name, []))])

    def _send_free(self, names: list[str]) -> None:
        if names:
            self._send({"do": "free", "names": names})
