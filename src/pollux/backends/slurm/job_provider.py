"""Slurm without pilots: asks for nodes when a decision names them, with one batch job for each generation of a job.

A node's address is fixed before its host is up, so that jobs can be placed there. A granted node runs the same
processes as with pilots (`pilot_provider`). `node_offers` offers nodes, `node_requests` asks Slurm for them,
`surplus` gives back what no job needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pollux.backends.nodes.provider import LentNode, NodeProvider
from pollux.backends.slurm.commands import SlurmCommands
from pollux.backends.slurm.job_books import JobBooks
from pollux.backends.slurm.job_requests import nodes_of_request
from pollux.backends.slurm.node_offers import NodeOffers
from pollux.backends.slurm.node_requests import NodeRequests
from pollux.backends.slurm.queue_view import QueueView, Rounds
from pollux.backends.slurm.script import SlurmOptions
from pollux.backends.slurm.surplus import Surplus

__all__ = ["SlurmJobProvider"]


class SlurmJobProvider(NodeProvider):
    """Offers all nodes of the partition that Slurm could lend, and asks for those that jobs want.

    Its files are in the folder `path`, which nodes must share. `commands` and `clock` (monotonic seconds) can be
    replaced in tests. A thread calls `do_round` for each round.
    """

    def __init__(
        self,
        path: Path,
        options: SlurmOptions,
        commands: SlurmCommands | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.queue = QueueView(path, options, commands, clock)
        self.rounds = Rounds(self.queue, self.do_round, self._give_back_unused)
        self.books = JobBooks()
        self._offers = NodeOffers(self.queue, self.books)
        self._requests = NodeRequests(self.queue, self.books, self._offers)
        self._surplus = Surplus(self.queue, self.books, self._offers)
        self._knows_jobs = False

    # The interface of a provider

    def start(self, secret: bytes, head: str, changed: Callable[[], None]) -> None:
        """Offer the nodes of the last service, and start the rounds."""
        self.books.start(secret, head, changed)
        self.queue.restore(secret)
        self._offers.refresh()
        self.rounds.start()

    def hosts(self) -> tuple[LentNode, ...]:
        """The nodes that jobs can be placed on, with those that Slurm would have to lend first."""
        return self.books.hosts()

    def is_up(self, node: str) -> bool:
        """Whether the host of a node is up; Slurm would have to lend the others first."""
        return node in self.books.up

    def leaving(self) -> Mapping[str, str]:
        """Nodes that jobs must leave now, while they still work, each with the reason."""
        return self.queue.pool.leaving

    def ask(self, job_id: str, wanted: Mapping[str, int]) -> None:
        """Ask Slurm for the nodes that are missing; places are given once their hosts are up."""
        self._requests.refusals.pop(job_id, None)
        self._knows_jobs = True
        self.books.ask(job_id, wanted)
        self.rounds.wake()

    def claim(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Note the places as held."""
        self._knows_jobs = True
        self.books.claim(job_id, places)

    def held(self, job_id: str) -> Mapping[str, tuple[int, ...]]:
        """The places that the job holds, on nodes whose host is up."""
        return self.books.held(job_id)

    def refusal(self, job_id: str) -> str:
        """Why Slurm has not lent the job's nodes."""
        return self._requests.refusals.get(job_id, "") or self.books.refusal(job_id)

    def drop(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Free these places; a node that no job needs is given back to Slurm soon."""
        self.books.drop(job_id, places)
        self.rounds.wake()

    def check_node(self, node: str) -> None:
        """Read the folder at once: the node may have announced its end there."""
        self.rounds.watch_folder()

    def warnings(self) -> tuple[str, ...]:
        """One sentence for each problem of Slurm, of its commands or of nodes."""
        return self.queue.all_warnings()

    def close(self) -> None:
        """End the rounds. Batch jobs in use go on, and the next object finds them."""
        self.rounds.close()

    # A round

    def do_round(self, full: bool = True) -> None:
        """Do one round; `full`: read Slurm's queue, too, and not only the files of nodes."""
        self.queue.write_pulse()
        if full:
            self.queue.read(all_nodes=True)
        self._offers.refresh()
        self._request_and_return()

    def _request_and_return(self) -> None:
        """Give back nodes that no job needs, refuse jobs that Slurm keeps waiting, and ask for missing nodes."""
        with self.books.lock:
            wanted = self.books.wanted()
            requested = {name for row in self.queue.rows.values() for name in nodes_of_request(row)}
            idle = self._surplus.take_down_idle(self.queue.clock())
        self.queue.cancel(idle)
        if not self.queue.is_sure:
            return
        self._surplus.return_spare(self.queue.clock())
        self._requests.refuse_late(self.queue.clock())
        if not self.rounds.are_ending:
            self._requests.submit_lacking(wanted, requested)

    def _give_back_unused(self) -> None:
        """Give back nodes that no job uses, also requested ones if it is known that no job runs."""
        if not self.books.nodes_in_use():
            idle = self._surplus.idle_jobs(self.queue.clock())
            rows = self.queue.rows.values()
            self.queue.close([row.id for row in rows if self._knows_jobs or row.is_waiting or row.id in idle])
