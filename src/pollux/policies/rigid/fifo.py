"""First in, first out: jobs get what they asked for in order of submission and are never preempted."""

from __future__ import annotations

from pollux.core import BatchMode, Decision, Snapshot
from pollux.policies.packing.greedy import admit_in_turn

__all__ = ["Fifo"]


class Fifo:
    """Order by submission; the head of the line blocks (`strict`) or is skipped when it does not fit."""

    name = "fifo"
    needs: frozenset[str] = frozenset()
    batch: BatchMode = "fixed"

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Admit in order of submission."""
        order = sorted(snapshot.jobs, key=lambda job: job.submitted_at)
        return admit_in_turn(snapshot, order, strict=self.strict)
