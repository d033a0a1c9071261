"""Returns to Slurm the batch jobs that no training job needs, and spare nodes of the other batch jobs."""

from __future__ import annotations

import logging
from dataclasses import replace

from pollux.backends.slurm.job_books import JobBooks
from pollux.backends.slurm.job_requests import SpareNodes, nodes_of_request
from pollux.backends.slurm.node_offers import NodeOffers
from pollux.backends.slurm.parse import PilotRow, fold_nodes
from pollux.backends.slurm.queue_view import QueueView
from pollux.core.errors import BackendFailed

__all__ = ["Surplus"]

_log = logging.getLogger("pollux.backends")

# The request for a job's next generation comes a moment after the places of the last one were freed.
_LINGER_SECONDS = 2.0
_SPARE = "spare "


class Surplus:
    """Finds batch jobs and nodes that no job has needed for a moment, and gives them back."""

    def __init__(self, queue: QueueView, books: JobBooks, offers: NodeOffers) -> None:
        self._queue, self._books, self._offers = queue, books, offers
        self._spare = SpareNodes()
        # Since when no job needs a node of these batch jobs.
        self._idle_since: dict[str, float] = {}

    def idle_jobs(self, now: float) -> list[str]:
        """The batch jobs of which no job has needed a node for a moment."""
        return [pilot for pilot, at in self._idle_since.items() if now - at >= _LINGER_SECONDS]

    def take_down_idle(self, now: float) -> list[str]:
        """The batch jobs that are not needed any more or cannot be used; jobs get no places there from now on.

        The caller holds the lock, and cancels these batch jobs.
        """
        needed, working = self._books.needed(), self._books.working()
        asked = {row.id: set(nodes_of_request(row)) for row in self._queue.rows.values()}
        unneeded = [pilot for pilot, nodes in asked.items() if not nodes & needed]
        self._idle_since = {pilot: self._idle_since.get(pilot, now) for pilot in unneeded}
        # A job that waits for a faulty host is refused when the node goes, and is placed again; running jobs stay.
        faulty = [pilot for pilot in self._queue.pool.faulty if not asked.get(pilot, set()) & working]
        gone = [*dict.fromkeys([*self.idle_jobs(now), *faulty])]
        self._offers.take_down(name for pilot in gone for name in asked.get(pilot, ()))
        return gone

    def return_spare(self, now: float) -> None:
        """Give back spare nodes of batch jobs that are needed: after a job has shrunk or lost a replica."""
        queue = self._queue
        held = {row.id: row for row in queue.rows.values() if row.is_held and row.id not in queue.cancelled}
        self._spare.forget_others(held)
        for row in held.values():
            with self._books.lock:
                # Ask again which nodes are needed: commands take time. From here on jobs get none of the spare nodes.
                spare = self._spare.due(row, self._books.needed(), now, _LINGER_SECONDS)
                self._offers.take_down(spare)
            if spare:
                self._return(row, spare, now)
        stuck = {_SPARE + pilot for pilot in self._spare.stuck()}
        for kind in queue.warnings.kinds():
            if kind.startswith(_SPARE) and kind not in stuck:
                queue.warnings.set(kind)

    def _return(self, row: PilotRow, spare: set[str], now: float) -> None:
        """Have a batch job give these nodes back, and keep the others."""
        queue = self._queue
        kept = tuple(name for name in row.nodes if name not in spare)
        try:
            queue.commands.keep_only(row.id, kept)
        except BackendFailed as error:
            seconds = self._spare.note_kept(row.id, now)
            why = f"{fold_nodes(spare)} cannot be given back while the rest of {row.id} is used: {error}"
            queue.warnings.set(_SPARE + row.id, f"{why}; Slurm is asked again in {seconds:.0f} s")
            return
        queue.rows[row.id] = replace(row, nodes=kept)
        self._spare.note_returned(row.id)
        queue.folder.forget_nodes(row.id, spare)
        _log.info("gave %s of %s back to Slurm", fold_nodes(spare), row.id)
        self._offers.refresh()
