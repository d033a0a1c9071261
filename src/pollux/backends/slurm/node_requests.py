"""Slurm without pilots: submits batch jobs for the nodes that jobs lack, and refuses jobs that wait too long."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from pollux.backends.slurm.job_books import JobBooks
from pollux.backends.slurm.job_requests import blamed_nodes, job_script, nodes_of_request
from pollux.backends.slurm.node_offers import NodeOffers
from pollux.backends.slurm.parse import PilotRow, fold_nodes
from pollux.backends.slurm.queue_view import QueueView
from pollux.core.errors import BackendFailed

__all__ = ["NodeRequests"]

_log = logging.getLogger("pollux.backends")

# How long a node is not offered after it kept a job waiting while others were free.
_AVOID_SECONDS = 300.0


class NodeRequests:
    """Asks Slurm for nodes, one batch job at a time. `refusals`: by job, why it does not get its nodes."""

    def __init__(self, queue: QueueView, books: JobBooks, offers: NodeOffers) -> None:
        self._queue, self._books, self._offers = queue, books, offers
        self.refusals: dict[str, str] = {}
        # Since when each batch job waits in Slurm's queue.
        self._pending_since: dict[str, float] = {}

    def submit_lacking(self, wanted: Mapping[str, set[str]], requested: Collection[str]) -> None:
        """Ask Slurm for the nodes that jobs want, and that no batch job has or waits for."""
        there = set(requested)
        for job_id, nodes in wanted.items():
            lacking = nodes - there
            if lacking and job_id not in self.refusals and self._queue.pause.is_over:
                self._submit(job_id, lacking)
                there |= lacking

    def _submit(self, job_id: str, nodes: set[str]) -> None:
        """Ask Slurm for nodes for a job; refuse the job if Slurm rejects the request."""
        queue, listed = self._queue, fold_nodes(nodes)
        try:
            addresses = {name: queue.states[name].address or name for name in nodes if name in queue.states}
            script = job_script(queue.options, queue.folder.path, self._books.head, job_id, nodes, addresses)
            array = queue.commands.submit(script, 1)
        except BackendFailed as error:
            self.refusals[job_id] = f"Slurm does not lend {listed}: {error}"
            pause = queue.pause.lengthen()
            queue.warnings.set("submit", f"{self.refusals[job_id]}; Slurm is asked again in {pause:.0f} s")
            self._offers.refresh()
            self._books.tell_change()
            return
        queue.warnings.set("submit")
        row = PilotRow(f"{array}_0", "PENDING", None, None, (), f"{job_id}@{listed}", "just submitted")
        queue.rows[row.id] = row
        _log.info("asked Slurm for %s, for job '%s': %s", listed, job_id, array)

    def refuse_late(self, now: float) -> None:
        """Refuse jobs that Slurm has kept waiting while it has other nodes to lend: they are then placed there."""
        queue = self._queue
        pending = [row for row in queue.rows.values() if row.state == "PENDING" and row.id not in queue.cancelled]
        since = self._pending_since = {row.id: self._pending_since.get(row.id, now) for row in pending}
        late = [row for row in pending if now - since[row.id] >= queue.options.wait_seconds]
        free = self._offers.free_nodes(now) if late else []
        left = len(free)
        for row in sorted(late, key=lambda row: since[row.id]):
            # Cancel no more requests than there are other nodes: the rest may be served in the queue first.
            blamed = blamed_nodes(queue.options, queue.states, row)
            if blamed and len(blamed) <= left:
                left -= len(blamed)
                why = f"for {now - since[row.id]:.0f} s ({row.reason or 'no reason given'})"
                self._refuse(row, blamed, f"{why}, and has others to lend ({fold_nodes(free)})", now)

    def _refuse(self, row: PilotRow, blamed: Collection[str], why: str, now: float) -> None:
        """Cancel a batch job that waits, refuse its jobs, and do not offer the nodes that kept it waiting."""
        why = f"Slurm has not lent {fold_nodes(blamed)} {why}: the job is placed again"
        with self._books.lock:
            jobs = self._books.jobs_wanting(nodes_of_request(row))
            self._offers.leave_alone(blamed, now + _AVOID_SECONDS)
            self.refusals.update(dict.fromkeys(jobs, why))
        _log.info("%s: %s", ", ".join(jobs) or row.id, why)
        self._queue.cancel((row.id,))
        self._offers.refresh()
        self._books.tell_change()
