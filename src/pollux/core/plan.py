"""Turns a decision into changes, in an order that frees GPUs before it takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pollux.core.placement import NOWHERE, Placement
from pollux.core.snapshot import Decision, Snapshot

__all__ = ["Change", "plan"]


@dataclass(frozen=True, slots=True)
class Change:
    """One job's move from `before` to `after`."""

    job_id: str
    before: Placement
    after: Placement

    @property
    def kind(self) -> Literal["start", "stop", "resize"]:
        """What has to be done."""
        if not self.before:
            return "start"
        return "resize" if self.after else "stop"

    @property
    def takes(self) -> bool:
        """Whether it needs GPUs that it does not hold yet."""
        held = dict(self.before.shares)
        return any(count > held.get(node, 0) for node, count in self.after.shares)


_RANK = {"stop": 0, "resize": 1, "start": 3}


def plan(snapshot: Snapshot, decision: Decision) -> tuple[Change, ...]:
    """Changes in order: stops, resizes that only free, resizes that also take, starts.

    Moves may form a cycle (two jobs swapping nodes), so an executor first frees the GPUs of all jobs that move.
    """
    changes: list[tuple[int, int, Change]] = []
    for order, job in enumerate(snapshot.jobs):
        before, after = snapshot.placement(job.id), decision.allocation.get(job.id, NOWHERE)
        if before is after or before == after:
            continue
        change = Change(job.id, before, after)
        rank = _RANK[change.kind]
        if change.kind == "resize" and change.takes:
            rank = 2
        changes.append((rank, order, change))
    changes.sort(key=lambda entry: entry[:2])
    return tuple(change for _, _, change in changes)
