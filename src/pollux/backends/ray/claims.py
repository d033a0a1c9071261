"""The claims of jobs on the GPUs of a Ray cluster: one claim is one placement group of one bundle.

Nothing here calls Ray. A file keeps the claims, so that a restarted service knows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Claim", "ClaimBook"]


@dataclass(frozen=True, slots=True)
class Claim:
    """One place on one node for one job. `place`: None until Ray has granted it; `waits`: Ray has none to give now."""

    name: str
    job_id: str
    node_id: str
    place: int | None = None
    waits: bool = False


class ClaimBook:
    """All claims of one service. `prefix`: what the names of its placement groups, and no others, begin with."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._claims: dict[str, Claim] = {}
        self._jobs: dict[str, dict[str, None]] = {}
        self._granted: Counter[str] = Counter()
        self._places: dict[tuple[str, int], str] = {}
        self._next = 1

    @property
    def claims(self) -> Mapping[str, Claim]:
        """Every claim by the name of its placement group, granted or not."""
        return self._claims

    def ask(self, job_id: str, wanted: Mapping[str, int]) -> tuple[list[Claim], list[Claim]]:
        """Bring a job's claims to the wanted number per node; the new claims, and those that were removed."""
        taken: list[Claim] = []
        freed: list[Claim] = []
        mine = self._of(job_id)
        for node_id in sorted({*wanted, *(claim.node_id for claim in mine)}):
            here = [claim for claim in mine if claim.node_id == node_id]
            count = wanted.get(node_id, 0)
            pending = [claim for claim in here if claim.place is None]
            freed += pending[: max(0, len(here) - count)]
            taken += [self._new(job_id, node_id) for _ in range(count - len(here))]
        return taken, self._remove_all(freed)

    def drop(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> list[Claim]:
        """Remove the claims on these places, and return them."""
        mine = self._of(job_id)
        gone = [claim for claim in mine if claim.place in places.get(claim.node_id, ())]
        if all(claim.place is None for claim in mine if claim not in gone):
            # A job without any place has ended, or will ask for other places: drop the claims that wait, too.
            gone = mine
        return self._remove_all(gone)

    def adopt(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> list[Claim]:
        """Make granted claims for places that a job uses without a claim, and return the new ones.

        Ungranted claims of the job on the node are used first: the grant may have come after the file was written.
        """
        held = self.held(job_id)
        found = []
        for node_id, numbers in sorted(places.items()):
            pending = [claim for claim in self._of(job_id) if claim.node_id == node_id and claim.place is None]
            for place in sorted(set(numbers) - set(held.get(node_id, ()))):
                if pending:
                    self._put(replace(pending.pop(0), place=place, waits=False))
                else:
                    found.append(self._put(replace(self._new(job_id, node_id), place=place)))
        return found

    def claim_at(self, node_id: str, place: int) -> Claim | None:
        """The claim that has this place; None where there is none."""
        return self._claims.get(self._places.get((node_id, place), ""))

    def swap_places(self, name: str, other: str) -> None:
        """Exchange the places of two claims."""
        one, two = self._claims[name], self._claims[other]
        self._put(replace(one, place=two.place))
        self._put(replace(two, place=one.place))

    def replace_claim(self, name: str, other: str = "") -> Claim:
        """Remove a claim, and give its place to a claim with the name `other`, or with a new name."""
        claim = self._claims[name]
        self.remove(name)
        new = Claim(other, claim.job_id, claim.node_id) if other else self._new(claim.job_id, claim.node_id)
        return self._put(replace(new, place=claim.place))

    def drop_except_on(self, known: Container[str]) -> list[Claim]:
        """Remove the claims on all nodes but the known ones, and return them."""
        return self._remove_all([claim for claim in self._claims.values() if claim.node_id not in known])

    def grant(self, name: str, place: int | None) -> Claim | None:
        """Note that Ray has granted a claim, with this place or the lowest free one; None for an unknown claim."""
        claim = self._claims.get(name)
        if claim is None:
            return None
        if place is None:
            place = claim.place if claim.place is not None else self._free_place(claim.node_id)
        return self._put(replace(claim, place=place, waits=False))

    def note_waiting(self, name: str) -> None:
        """Note that Ray has had nothing for a claim for some seconds."""
        if name in self._claims:
            self._put(replace(self._claims[name], waits=True))

    def retry_waiting(self, node_ids: Container[str]) -> list[str]:
        """Make the waiting claims on these nodes count as new, since places were given back there; their names."""
        late = [claim for claim in self._claims.values() if claim.waits and claim.node_id in node_ids]
        for claim in late:
            self._put(replace(claim, waits=False))
        return [claim.name for claim in late]

    def remove(self, name: str) -> None:
        """Forget one claim."""
        claim = self._claims.pop(name, None)
        if claim is not None:
            self._granted[claim.node_id] -= claim.place is not None
            self._leave(claim)
            self._jobs[claim.job_id].pop(name, None)
            if not self._jobs[claim.job_id]:
                del self._jobs[claim.job_id]

    def held(self, job_id: str) -> dict[str, tuple[int, ...]]:
        """The granted places of a job by node, in order."""
        found: dict[str, list[int]] = {}
        for claim in self._of(job_id):
            if claim.place is not None:
                found.setdefault(claim.node_id, []).append(claim.place)
        return {node_id: tuple(sorted(places)) for node_id, places in sorted(found.items())}

    def granted_on(self, node_id: str) -> int:
        """How many places of a node Ray has granted us."""
        return self._granted[node_id]

    def obtainable_on(self, node_id: str) -> int:
        """The number of a node's places that Ray has granted or may still grant."""
        return sum(claim.node_id == node_id and not claim.waits for claim in self._claims.values())

    def refusal(self, job_id: str, short: Container[str]) -> str:
        """Which places Ray does not give a job on nodes that are `short`, for people; empty while all may come."""
        waiting: dict[str, int] = {}
        for claim in self._of(job_id):
            if claim.waits and claim.node_id in short:
                waiting[claim.node_id] = waiting.get(claim.node_id, 0) + 1
        if not waiting:
            return ""
        what = ", ".join(f"{count} on {node_id}" for node_id, count in sorted(waiting.items()))
        return (
            f"Ray does not lend all that was asked for ({what} missing): other Ray jobs hold them; "
            "'ray status' and 'ray list placement-groups' show who"
        )

    def record(self) -> dict[str, Any]:
        """The claims as plain values, for the file."""
        rows = [[claim.name, claim.job_id, claim.node_id, claim.place] for claim in self._claims.values()]
        return {"next": self._next, "claims": rows}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Load the claims of a `record`; rows that cannot be read are left out."""
        rows = record.get("claims")
        for row in rows if isinstance(rows, list) else ():
            if _is_row(row) and row[0].startswith(self.prefix):
                self._put(Claim(*row))
        following = record.get("next")
        used = (name.rpartition(":")[2] for name in self._claims)
        last = max((int(number) for number in used if number.isdigit()), default=0)
        self._next = max(following if isinstance(following, int) else 1, last + 1)

    def _of(self, job_id: str) -> list[Claim]:
        return [self._claims[name] for name in self._jobs.get(job_id, ())]

    def _new(self, job_id: str, node_id: str) -> Claim:
        claim = Claim(f"{self.prefix}{job_id}:{node_id}:{self._next}", job_id, node_id)
        self._next += 1
        return self._put(claim)

    def _put(self, claim: Claim) -> Claim:
        """Note a new claim, or a new state of a known one."""
        before = self._claims.get(claim.name)
        if before is not None:
            self._leave(before)
        if claim.place is not None:
            self._places[claim.node_id, claim.place] = claim.name
        self._granted[claim.node_id] += (claim.place is not None) - (before is not None and before.place is not None)
        self._claims[claim.name] = claim
        self._jobs.setdefault(claim.job_id, {})[claim.name] = None
        return claim

    def _leave(self, claim: Claim) -> None:
        """Free the place of a claim, unless another claim has that place by now."""
        if claim.place is not None and self._places.get((claim.node_id, claim.place)) == claim.name:
            del self._places[claim.node_id, claim.place]

    def _remove_all(self, gone: list[Claim]) -> list[Claim]:
        for claim in gone:
            self.remove(claim.name)
        return gone

    def _free_place(self, node_id: str) -> int:
        used = {claim.place for claim in self._claims.values() if claim.node_id == node_id}
        return next(place for place in range(len(used) + 1) if place not in used)


def _is_row(row: object) -> bool:
    """Whether this is a row as `record` writes it for a claim."""
    if not isinstance(row, list) or len(row) != 4 or not all(isinstance(word, str) for word in row[:3]):
        return False
    return row[3] is None or type(row[3]) is int
