"""Slurm without pilots: the nodes that jobs can be placed on, whose host is up or which Slurm could lend."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from pollux.backends.nodes.provider import LentNode
from pollux.backends.slurm.job_books import JobBooks
from pollux.backends.slurm.job_requests import could_lend, lendable_node, nodes_of_request
from pollux.backends.slurm.parse import PilotRow
from pollux.backends.slurm.queue_view import QueueView

__all__ = ["NodeOffers"]

# How long a node is not offered after the end of its batch job, so that its next host is not mistaken for the last.
_REST_SECONDS = 5.0


class NodeOffers:
    """Offers nodes to `books`, according to Slurm's `queue` and the files of nodes."""

    def __init__(self, queue: QueueView, books: JobBooks) -> None:
        self._queue, self._books = queue, books
        # Until when each of these nodes is not offered, unless its host is up.
        self._resting: dict[str, float] = {}

    def refresh(self) -> None:
        """Read the files of nodes, and offer the nodes there are and those that Slurm could lend."""
        queue, books = self._queue, self._books
        # Cancelled batch jobs do not lend nodes any more, though they may take a while to end.
        rows = [row for row in queue.current_rows() if row.id not in queue.cancelled]
        pool, now = queue.pool_of(rows), queue.clock()
        with books.lock:
            up = {lent.node.id: lent for lent in pool.hosts}
            self.leave_alone(books.up.keys() - up.keys(), now + _REST_SECONDS)
            has_new_hosts = not up.keys() <= books.up.keys()
            books.up = up
        offered = self._offered(rows, now)
        others_leave = queue.replace_pool(replace(pool, hosts=offered))
        books.offer(offered)
        if others_leave:
            books.tell_change()
        if has_new_hosts and books.serve_all():
            books.tell_change()

    def leave_alone(self, names: Iterable[str], until: float) -> None:
        """Do not offer these nodes until that time."""
        self._resting.update(dict.fromkeys(names, until))

    def take_down(self, names: Iterable[str]) -> None:
        """Give no more places on these nodes, whose hosts will be ended. The caller holds the lock."""
        books = self._books
        gone = {name for name in names if name in books.up}
        books.up = {name: lent for name, lent in books.up.items() if name not in gone}
        self.leave_alone(gone, self._queue.clock() + _REST_SECONDS)

    def free_nodes(self, now: float) -> list[str]:
        """The nodes that Slurm could lend, and that no batch job of ours waits for."""
        queue = self._queue
        taken = {name for row in queue.rows.values() for name in nodes_of_request(row)}
        could = [row.name for row in queue.states.values() if could_lend(queue.options, row)]
        return [name for name in could if name not in taken and self._resting.get(name, 0.0) <= now]

    def _offered(self, rows: Collection[PilotRow], now: float) -> tuple[LentNode, ...]:
        queue, up = self._queue, self._books.up
        lent = {name for row in rows for name in row.nodes}
        offered = (lent | self._asked_for(rows) | self._could_be_lent()) - self._resting_at(now)
        path, states = queue.folder.path, queue.states
        named = [lendable_node(queue.options, path, states[name], up.get(name)) for name in states if name in offered]
        # Hosts that are up are offered even if Slurm's state of the node is unknown: jobs run there.
        return (*named, *(host for name, host in up.items() if name in lent and name not in states))

    def _asked_for(self, rows: Collection[PilotRow]) -> set[str]:
        """The nodes that batch jobs wait for and may still get: jobs are placed there already."""
        asked = {name for row in rows if row.is_waiting for name in nodes_of_request(row)}
        return {name for name, state in self._queue.states.items() if name in asked and state.stand == "held"}

    def _could_be_lent(self) -> set[str]:
        """The nodes that Slurm could lend now; none during a pause of requests, since jobs would be refused there."""
        if not self._queue.pause.is_over:
            return set()
        return {name for name, state in self._queue.states.items() if could_lend(self._queue.options, state)}

    def _resting_at(self, now: float) -> set[str]:
        return {name for name, until in self._resting.items() if until > now and name not in self._books.up}
