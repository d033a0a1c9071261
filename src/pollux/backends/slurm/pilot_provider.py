"""Slurm with pilots: keeps as many batch jobs of one node each as are wanted, and lends their nodes.

What follows from the queue is decided in `pool_plan`; the queue itself is read by `queue_view`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from pollux.backends.nodes.provider import LentNode, PooledNodeProvider
from pollux.backends.slurm.commands import SlurmCommands
from pollux.backends.slurm.parse import PilotRow
from pollux.backends.slurm.pool_plan import plan_pool
from pollux.backends.slurm.queue_view import QueueView, Rounds
from pollux.backends.slurm.script import PILOT_COMMENT, SlurmOptions, batch_script
from pollux.core.errors import BackendFailed

__all__ = ["SlurmPilotProvider"]

_log = logging.getLogger("pollux.backends")

_AFTER_FAILURE_SECONDS = 30.0
_BAD_NODE_SECONDS = 3600.0


class SlurmPilotProvider(PooledNodeProvider):
    """Pilots in the folder `path`, which nodes must share; several objects, one after another, may work there.

    `commands` and `clock` (monotonic seconds) can be replaced for tests. `do_round` is one round, done by the thread.
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
        self._desired = 0
        # Pilots whose nodes do not answer, and nodes that could not be used, with when that was seen.
        self._silent: set[str] = set()
        self._bad_nodes: dict[str, float] = {}
        # How many are asked for at once; None: as many as are wanted.
        self._most_at_once: int | None = None
        self._surplus_since: float | None = None

    # What is asked of it

    def start(self, secret: bytes, head: str, changed: Callable[[], None]) -> None:
        """Offer what ran when the last service ended, and start the rounds."""
        super().start(secret, head, changed)
        self.queue.restore(secret)
        self._refresh()
        self.rounds.start()

    @property
    def grace_seconds(self) -> float | None:
        """What Slurm gives between SIGTERM and SIGKILL; None where that is not known (yet)."""
        return self.queue.grace_seconds

    def leaving(self) -> Mapping[str, str]:
        """Nodes that still work and are to be left now, with why."""
        return self.queue.pool.leaving

    def is_up(self, node: str) -> bool:
        """Whether the host of a node that is offered is there: always, since only such are offered."""
        return True

    def desire(self, num_nodes: int, awaited: bool = False) -> None:
        """Hold as many nodes as would be used, between the fewest and the most that the options allow."""
        if num_nodes != self._desired:
            self._desired = num_nodes
            self.rounds.wake()

    def check_node(self, node: str) -> None:
        """Look at once for what it writes of its end."""
        self.rounds.watch_folder()

    def release_silent(self, silent: Collection[LentNode]) -> None:
        """Their pilots go: Slurm may take minutes to see that a node is dead, and lends no other meanwhile."""
        pool = self.queue.pool
        here = {(lent.node.id, lent.address) for lent in pool.hosts}
        pilots = {pool.pilot_of[each.node.id] for each in silent if (each.node.id, each.address) in here}
        if pilots != self._silent:
            self._silent = pilots
            self.rounds.wake()

    def drop(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Free them; a node that is being left can go as soon as it is empty."""
        super().drop(job_id, places)
        self.rounds.wake()

    def warnings(self) -> tuple[str, ...]:
        """What Slurm, its commands or nodes keep from us."""
        return self.queue.all_warnings()

    def close(self) -> None:
        """End the rounds. Pilots go on; those without work end after a minute, unless a new object comes."""
        self.rounds.close()

    # A round

    def do_round(self, full: bool = True) -> None:
        """One round; `full`: with a look at Slurm's queue, else only at what nodes wrote."""
        self.queue.write_pulse()
        if full:
            self.queue.read()
        self._refresh()
        self._resize_pool()

    def _refresh(self) -> None:
        """Take in what nodes wrote, and show what there is."""
        pool = self.queue.pool_of(self.queue.current_rows())
        self._bad_nodes.update(dict.fromkeys(pool.bad_nodes, self.queue.clock()))
        others_leave = self.queue.replace_pool(pool)
        self.offer(pool.hosts)
        if others_leave:
            self._changed()

    def _resize_pool(self) -> None:
        """Ask for the pilots that are lacking, and give back those that are too many or of no use."""
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
            self._submit(todo.submit)

    def _submit(self, count: int) -> None:
        queue = self.queue
        script = batch_script(self.options, queue.folder.path, self.head)
        count = min(count, self._most_at_once or count)
        exclude = [name for name, at in self._bad_nodes.items() if queue.clock() - at < _BAD_NODE_SECONDS]
        try:
            array = queue.commands.submit(script, count, exclude)
        except BackendFailed as error:
            # It may have been taken all the same: the queue tells, before it is tried again.
            queue.pause.wait(_AFTER_FAILURE_SECONDS)
            # An array is refused as a whole, also where a quota has room for a part of it.
            self._most_at_once = max(1, count // 2)
            queue.warnings.set(
                "submit", f"{count} node{'s' * (count != 1)} cannot be asked for: {error}; Slurm is asked for "
                f"{self._most_at_once} in {_AFTER_FAILURE_SECONDS:.0f} s",
            )  # fmt: skip
            return
        self._most_at_once = 2 * count if self._most_at_once == count else None
        queue.warnings.set("submit")
        for number in range(count):
            row = PilotRow(f"{array}_{number}", "PENDING", None, None, (), PILOT_COMMENT, "just submitted")
            queue.rows[row.id] = row
        _log.info("asked Slurm for %d node(s): array %s", count, array)

    def _give_back_unused(self) -> None:
        """Cancel what still waits in the queue, unless jobs run on."""
        if not self.nodes_in_use():
            self.queue.close([row.id for row in self.queue.rows.values() if row.is_waiting])
