"""Handles Ray's answers to claims: which job holds which place, what is claimed again, and which jobs are refused.

A claim without a place: Ray
- grants a free GPU: the job has that place;
- grants a GPU that another job uses, or fails: the job is refused, and no job is placed on the node for a minute;
- grants a part of a GPU: the same, and the node stays blocked;
- has nothing for some seconds: the node counts as smaller, and the job is refused.

A claim with a place: Ray
- grants the same GPU: nothing changes;
- grants another GPU of the same job: the two claims exchange their places;
- grants a third GPU: that group is kept, and another one is claimed, until Ray grants the right GPU;
- has no further GPU then: another Ray job has the right one. The last group stands for the place, the node is blocked;
- fails: the driver asks again.

A claim without a job is a sentinel: it stays in Ray's queue while other Ray jobs hold the node. Any answer to it means
that the node has free places again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from pollux.backends.ray.claims import Claim, ClaimBook
from pollux.backends.ray.driver_messages import DriverRequest, FreeClaims, RetryClaims, TakeClaims
from pollux.backends.ray.node_book import RayNodeBook

__all__ = ["Grants"]

# How long no job is placed on a node where Ray failed to give a place.
_BLOCKED_SECONDS = 60.0


class Grants:
    """Keeps the claims of `book` on the nodes of `nodes` in line with Ray; `send` takes orders for the driver."""

    def __init__(
        self,
        book: ClaimBook,
        nodes: RayNodeBook,
        send: Callable[[DriverRequest], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.book, self._nodes, self._send, self._clock = book, nodes, send, clock
        self._refusals: dict[str, str] = {}
        # For each claim on a GPU in use: groups with other GPUs, which are kept until Ray has granted that GPU.
        self._mismatched: dict[str, list[str]] = {}
        # The sentinel of each node of which other Ray jobs hold a part.
        self._sentinels: dict[str, str] = {}

    # For jobs

    def ask(self, job_id: str, wanted: Mapping[str, int]) -> None:
        """Claim the places that a job lacks on each node, and free waiting claims that it does not need."""
        self._refusals.pop(job_id, None)
        taken, freed = self.book.ask(job_id, wanted)
        self._take(taken)
        self._free(freed)

    def adopt(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Claim the places that a job found running uses without a claim."""
        self._take(self.book.adopt(job_id, places))

    def drop(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Free these places, and try again the claims of other jobs that wait for the same nodes."""
        self._refusals.pop(job_id, None)
        freed = self.book.drop(job_id, places)
        self._free(freed)
        again = self.book.retry_waiting({claim.node_id for claim in freed})
        if again:
            self._send(RetryClaims(tuple(again)))

    def refusal(self, job_id: str) -> str:
        """Why a job does not get its places; empty while it may still get them."""
        return self._refusals.get(job_id) or self.book.refusal(job_id, self._nodes.limited())

    # For the driver

    def for_new_driver(self) -> dict[str, str]:
        """Every claim with its node. The driver removes all other groups, also those kept with other GPUs."""
        self._mismatched.clear()
        claims = {claim.name: claim.node_id for claim in self.book.claims.values()}
        return claims | {name: node_id for node_id, name in self._sentinels.items()}

    def note_grant(self, name: str, gpu: str | None) -> None:
        """Handle a granted claim, with this GPU of its node; None where it does not matter which."""
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

    def note_wait(self, name: str) -> None:
        """Handle a claim for which Ray has had nothing for some seconds.

        If our own jobs do not hold the whole node, other Ray jobs hold the rest: the node counts as smaller until Ray
        grants a place there again.
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

    def note_failure(self, name: str, why: str) -> None:
        """Handle a group that Ray could not make, or has lost. For a place in use the driver makes another group."""
        claim = None if self._end_sentinel(name) else self.book.claims.get(name)
        if claim is None:
            return
        text = f"Ray failed to give a place on node '{claim.node_id}' ({why}): see 'ray list placement-groups'"
        if claim.place is None:
            self._refuse(claim, text, _BLOCKED_SECONDS)
        elif (known := self._nodes.get(claim.node_id)) is not None:
            known.note("failure", text)

    def drop_claims_without_node(self) -> None:
        """Drop the claims on nodes that are no longer in the Ray cluster."""
        gone = [node_id for node_id in self._sentinels if node_id not in self._nodes]
        sentinels = [self._sentinels.pop(node_id) for node_id in gone]
        self._remove_groups([*(claim.name for claim in self.book.drop_except_on(self._nodes)), *sentinels])

    def free_sentinels(self) -> None:
        """Free every sentinel: the service ends."""
        self._send_free([*self._sentinels.values()])

    # What a grant means

    def _place_of(self, claim: Claim, gpu: int) -> int:
        """The place of a GPU on its node; while the host is not up, the place that the claim has."""
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
        """Drop a claim whose grant is of no use; refuse the job, and block the node for this time."""
        self._block(claim.node_id, why, seconds)
        self._refusals[claim.job_id] = why
        self.book.remove(claim.name)
        self._remove_groups([claim.name])

    def _ask_for_another(self, claim: Claim) -> None:
        """Claim again: Ray made a group for a place in use with another GPU, which is kept meanwhile."""
        new = self.book.replace_claim(claim.name)
        self._mismatched[new.name] = [*self._mismatched.pop(claim.name, []), claim.name]
        self._take([new])

    def _keep_mismatched(self, claim: Claim) -> None:
        """Let the last group stand for the place, with a warning: Ray has no other GPU on the node."""
        *others, last = self._mismatched.pop(claim.name)
        self.book.replace_claim(claim.name, last)
        self._send_free([claim.name, *others])
        known = self._nodes.get(claim.node_id)
        gpus = dict(enumerate(known.report.gpus)) if known is not None and known.report is not None else {}
        gpu = None if claim.place is None else gpus.get(claim.place, claim.place)
        why = (
            f"job '{claim.job_id}' uses GPU {gpu} of node '{claim.node_id}', which Ray has lent to another job: "
            "nothing new is started there for a minute; 'ray list placement-groups' and 'ray list actors' show who"
        )
        self._block(claim.node_id, why, _BLOCKED_SECONDS)

    def _block(self, node_id: str, why: str, seconds: float) -> None:
        known = self._nodes.get(node_id)
        if known is not None:
            known.block(why, self._clock() + seconds)

    def _end_sentinel(self, name: str) -> bool:
        """Drop the sentinel of that name, if there is one, and end the limit of its node."""
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
            self._send(TakeClaims({claim.name: claim.node_id for claim in claims}))

    def _free(self, claims: list[Claim]) -> None:
        """Free claims; one that waits at a limited node stays in Ray's queue, to show when the node has room again."""
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
        """Remove these groups, and the groups with other GPUs that were kept for them."""
        self._send_free([*names, *(kept for name in names for kept in self._mismatched.pop(name, []))])

    def _send_free(self, names: list[str]) -> None:
        if names:
            self._send(FreeClaims(tuple(names)))
