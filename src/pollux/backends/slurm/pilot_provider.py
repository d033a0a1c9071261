"""Slurm with pilots: keeps the wanted number of batch jobs of one node each, and lends their nodes.

`queue_view` reads the queue, and `pool_plan` decides what follows from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from pollux.backends.nodes.provider import LentNode, PooledNodeProvider
from pollux.backends.slurm.commands import SlurmCommands
from pollux.backends.slurm.pilot_requests import PilotRequests
from pollux.backends.slurm.pool_plan import plan_pool
from pollux.backends.slurm.queue_view import QueueView, Rounds
from pollux.backends.slurm.script import SlurmOptions

__all__ = ["SlurmPilotProvider"]


class SlurmPilotProvider(PooledNodeProvider):
    """Keeps pilots; nodes must share the folder `path`, in which several objects may work one after another.

    `commands` and `clock` (monotonic seconds) can be replaced in tests. A thread calls `do_round` for each round.
    """

    def __init__(
        self,
        path: Path,
        options: SlurmOptions,
        commands: SlurmCommands | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.options = options
        self.queue = QueueView(path, options, commands, clock)
        self.rounds = Rounds(self.queue, self.do_round, self._give_back_unused)
        self._requests = PilotRequests(self.queue)
        self._desired = 0
        # Pilots whose nodes do not answer.
        self._silent: set[str] = set()
        self._surplus_since: float | None = None

    # The interface of a provider

    def start(self, secret: bytes, head: str, changed: Callable[[], None]) -> None:
        """Offer the nodes of the last service, and start the rounds."""
        super().start(secret, head, changed)
        self.queue.restore(secret)
        self._refresh()
        self.rounds.start()

    def leaving(self) -> Mapping[str, str]:
        """Nodes that jobs must leave now, while they still work, each with the reason."""
        return self.queue.pool.leaving

    def desire(self, num_nodes: int, awaited: bool = False) -> None:
        """Hold as many nodes as could be used, between the fewest and the most that the options allow."""
        if num_nodes != self._desired:
            self._desired = num_nodes
            self.rounds.wake()

    def check_node(self, node: str) -> None:
        """Read the folder at once: the node may have announced its end there."""
        self.rounds.watch_folder()

    def release_silent(self, silent: Collection[LentNode]) -> None:
        """Cancel the pilots of these nodes: Slurm may take minutes to see a dead node, and lends no other meanwhile."""
        pool = self.queue.pool
        here = {(lent.node.id, lent.address) for lent in pool.hosts}
        pilots = {pool.pilot_of[each.node.id] for each in silent if (each.node.id, each.address) in here}
        if pilots != self._silent:
            self._silent = pilots
            self.rounds.wake()

    def drop(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Free these places; a node that is being left can be given back once it is empty."""
        super().drop(job_id, places)
        self.rounds.wake()

    def warnings(self) -> tuple[str, ...]:
        """One sentence for each problem of Slurm, of its commands or of nodes."""
        return self.queue.all_warnings()

    def close(self) -> None:
        """End the rounds. Pilots go on; those without work end after a minute, unless a new object takes over."""
        self.rounds.close()

    # A round

    def do_round(self, full: bool = True) -> None:
        """Do one round; `full`: read Slurm's queue, too, and not only the files of nodes."""
        self.queue.write_pulse()
        if full:
            self.queue.read()
        self._refresh()
        self._resize_pool()

    def _refresh(self) -> None:
        """Read the files of nodes, and offer the nodes there are."""
        pool = self.queue.pool_of(self.queue.current_rows())
        self._requests.avoid(pool.bad_nodes)
        others_leave = self.queue.replace_pool(pool)
        self.offer(pool.hosts)
        if others_leave:
            self._changed()

    def _resize_pool(self) -> None:
        """Ask for missing pilots, and give back those that are too many or of no use."""
        now, pool = self.queue.clock(), self.queue.pool
        wanted = min(max(self._desired, self.options.least_nodes), self.options.most_nodes)
        if len(pool.steady) + len(pool.waiting) <= wanted:
            self._surplus_since = None
        elif self._surplus_since is None:
            self._surplus_since = now
        patient = self._surplus_since is not None and now - self._surplus_since >= self.options.idle_seconds
        may_submit = self.queue.is_sure and self.queue.pause.is_over and not self.rounds.are_ending
        in_use = self.nodes_in_use()
        todo = plan_pool(self.options, pool, wanted, in_use, may_submit, patient)
        silent = self._silent & self.queue.rows.keys() - {pool.pilot_of.get(host, "") for host in in_use}
        self.queue.cancel((*todo.cancel, *sorted(silent.difference(todo.cancel))))
        if todo.submit:
            self._requests.submit(todo.submit, self.head)

    def _give_back_unused(self) -> None:
        """Cancel pilots that still wait in the queue, unless jobs run on."""
        if not self.nodes_in_use():
            self.queue.close([row.id for row in self.queue.rows.values() if row.is_waiting])
