"""Slurm without pilots: nodes are asked for when a decision names them, with one batch job for each job's generation.

A node's address is fixed before its host is there, so that it can be placed on. What runs on a granted node is as with
pilots (`pilot_provider`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from pollux.backends.nodes.provider import LentNode, PooledNodeProvider
from pollux.backends.slurm.commands import SlurmCommands
from pollux.backends.slurm.job_requests import (
    SpareNodes,
    blamed_nodes,
    could_lend,
    job_script,
    lendable_node,
    nodes_of_request,
)
from pollux.backends.slurm.parse import PilotRow, fold_nodes
from pollux.backends.slurm.queue_view import QueueView, Rounds
from pollux.backends.slurm.script import SlurmOptions
from pollux.core.errors import BackendFailed

__all__ = ["SlurmJobProvider"]

_log = logging.getLogger("pollux.backends")

# So long a node whose batch job has ended is not offered, so that nobody takes its next host for the last one.
_REST_SECONDS = 5.0
# The next generation of a job is asked for a moment after the last one's places were given back.
_LINGER_SECONDS = 2.0
# So long a node is not offered that kept a job waiting while others were free: it would be sent there again.
_AVOID_SECONDS = 300.0
_SPARE = "spare "


class SlurmJobProvider(PooledNodeProvider):
    """Offers all nodes of the partition that Slurm could lend, and asks for those that jobs want.

    Its files are in the folder `path`, which nodes must share. `commands` and `clock` (monotonic seconds) can be
    replaced for tests. `turn` is one round, done by the thread.
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
        self.rounds = Rounds(self.queue, self.turn, self._leave)
        # Nodes whose host is up, and until when others are not offered.
        self._up: Mapping[str, LentNode] = {}
        self.resting: dict[str, float] = {}
        self._refused: dict[str, str] = {}
        self._spare = SpareNodes()
        # Batch jobs that nobody needs, and those that wait in Slurm's queue, each with since when.
        self._idle_since: dict[str, float] = {}
        self._pending_since: dict[str, float] = {}
        self._knows_jobs = False

    # What is asked of it

    def start(self, secret: bytes, head: str, changed: Callable[[], None]) -> None:
        """Offer what ran when the service ended, and begin to look."""
        super().start(secret, head, changed)
        self.queue.restore(secret)
        self._show()
        self.rounds.start()

    @property
    def grace_seconds(self) -> float | None:
        """What Slurm gives between SIGTERM and SIGKILL; None where that is not known (yet)."""
        return self.queue.grace_seconds

    def leaving(self) -> Mapping[str, str]:
        """Nodes that still work and are to be left now, with why."""
        return self.queue.pool.leaving

    def is_up(self, node: str) -> bool:
        """Whether its host is there: others are offered that Slurm would have to lend first."""
        return node in self._up

    def claim(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Note what is in use."""
        self._knows_jobs = True
        super().claim(job_id, places)

    def ask(self, job_id: str, wanted: Mapping[str, int]) -> None:
        """Ask Slurm for the nodes that are not there yet; places are given once their hosts are up."""
        self._refused.pop(job_id, None)
        self._knows_jobs = True
        super().ask(job_id, wanted)
        self.rounds.wake()

    def refusal(self, job_id: str) -> str:
        """What Slurm said to the batch job that was asked for."""
        return self._refused.get(job_id, "") or super().refusal(job_id)

    def drop(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Free them; a node that nobody needs goes back to Slurm soon."""
        super().drop(job_id, places)
        self.rounds.wake()

    def check_node(self, node: str) -> None:
        """Look at once for what it writes of its end."""
        self.rounds.watch_folder()

    def warnings(self) -> tuple[str, ...]:
        """What Slurm, its commands or nodes keep from us."""
        return self.queue.all_warnings()

    def close(self) -> None:
        """Let go. Batch jobs that jobs use go on, and the next object finds them."""
        self.rounds.close()

    def _giving(self) -> Container[str]:
        """Only those whose host is up."""
        return self._up.keys() & self._sizes.keys()

    # Looking

    def turn(self, full: bool = True) -> None:
        """One round; `full`: with a look at Slurm's queue, else only at what nodes wrote."""
        self.queue.beat()
        if full:
            self.queue.read(all_nodes=True)
        self._show()
        self._request_and_return()

    def _show(self) -> None:
        """Take in what nodes wrote, and offer what there is and what Slurm could lend."""
        # What was cancelled is not lent any more, though its end may take a while.
        rows = [row for row in self.queue.current_rows() if row.id not in self.queue.cancelled]
        pool, now = self.queue.pool_of(rows), self.queue.clock()
        with self._books:
            up = {lent.node.id: lent for lent in pool.hosts}
            self.resting.update(dict.fromkeys(self._up.keys() - up.keys(), now + _REST_SECONDS))
            fresh = up.keys() - self._up.keys()
            self._up = up
        offered = self._offered(rows, now)
        others_leave = self.queue.show(replace(pool, hosts=offered))
        self.offer(offered)
        if others_leave:
            self._changed()
        if fresh and self.serve_all():
            self._changed()

    def _offered(self, rows: list[PilotRow], now: float) -> tuple[LentNode, ...]:
        states = self.queue.states
        lent = {name for row in rows for name in row.nodes}
        asked = {name for row in rows if row.is_waiting for name in nodes_of_request(row)}
        # What Slurm would not lend now is not to be placed on: jobs wait for it without being sent there in vain.
        may_ask = self.queue.pause.is_over

        def is_offered(name: str) -> bool:
            row = states[name]
            if self.resting.get(name, 0.0) > now and name not in self._up:
                return False
            return (
                name in lent or (row.stand == "held" and name in asked) or (may_ask and could_lend(self.options, row))
            )

        path = self.queue.folder.path
        named = (lendable_node(self.options, path, states[n], self._up.get(n)) for n in states if is_offered(n))
        # Of a host that is up it need not be known what Slurm has to say: jobs run there.
        return (*named, *(host for name, host in self._up.items() if name in lent and name not in states))

    # Acting

    def _request_and_return(self) -> None:
        """Give back what nobody needs, refuse what Slurm keeps waiting, and ask for what is lacking."""
        with self._books:
            wanted = {job: set(nodes) for job, nodes in self._wanted.items()}
            there = {name for row in self.queue.rows.values() for name in nodes_of_request(row)}
            idle = self._take_down_idle(self.queue.clock())
        self.queue.cancel(idle)
        if not self.queue.is_sure:
            return
        self._return_spare(self.queue.clock())
        self._refuse_late(self.queue.clock())
        if self.rounds.are_ending:
            return
        for job_id, nodes in wanted.items():
            lacking = nodes - there
            if lacking and job_id not in self._refused and self.queue.pause.is_over:
                self._request(job_id, lacking)
                there |= lacking

    def _needed(self) -> set[str]:
        """Nodes that jobs have places on, or wait for."""
        return self.nodes_in_use().union(*self._wanted.values())

    def _take_down(self, names: Iterable[str]) -> None:
        """Have nobody given a place there: the host is about to be ended."""
        gone = {name for name in names if name in self._up}
        self._up = {name: lent for name, lent in self._up.items() if name not in gone}
        self.resting.update(dict.fromkeys(gone, self.queue.clock() + _REST_SECONDS))

    def _take_down_idle(self, now: float) -> list[str]:
        """Batch jobs that nobody needs any more, or that cannot be used; nobody is given a place there from here on."""
        needed = self._needed()
        working = set().union(*(self._works_on(job) for job in self._held))
        asked = {row.id: set(nodes_of_request(row)) for row in self.queue.rows.values()}
        unneeded = [pilot for pilot, nodes in asked.items() if not nodes & needed]
        self._idle_since = {pilot: self._idle_since.get(pilot, now) for pilot in unneeded}
        # Whoever waits for its host is refused when its node goes, and is placed anew; what runs beside is spared.
        faulty = [pilot for pilot in self.queue.pool.faulty if not asked.get(pilot, set()) & working]
        idle = [*dict.fromkeys([*self._idle_for_long(now), *faulty])]
        self._take_down(name for pilot in idle for name in asked.get(pilot, ()))
        return idle

    def _idle_for_long(self, now: float) -> list[str]:
        return [pilot for pilot, at in self._idle_since.items() if now - at >= _LINGER_SECONDS]

    def _works_on(self, job_id: str) -> set[str]:
        """The nodes that a job uses: those it was given while it still waits for others of them are not used yet."""
        held, wanted = self._held.get(job_id, {}), self._wanted.get(job_id, {})
        waits = any(len(held.get(node, ())) < number for node, number in wanted.items())
        return {node for node, places in held.items() if places and not (waits and node in wanted)}

    def _return_spare(self, now: float) -> None:
        """Give back nodes of batch jobs of which others are needed: after a job has shrunk, or where one died."""
        queue = self.queue
        there = {row.id: row for row in queue.rows.values() if row.is_held and row.id not in queue.cancelled}
        self._spare.forget_others(there)
        for row in there.values():
            with self._books:
                # Now, and not as it was before commands that take their time: from here on nobody is given them.
                goes = self._spare.due(row, self._needed(), now, _LINGER_SECONDS)
                self._take_down(goes)
            if goes:
                self._return(row, goes, now)
        stuck = {_SPARE + pilot for pilot in self._spare.stuck()}
        for kind in queue.warnings.kinds():
            if kind.startswith(_SPARE) and kind not in stuck:
                queue.warnings.say(kind)

    def _return(self, row: PilotRow, goes: set[str], now: float) -> None:
        queue = self.queue
        kept = tuple(name for name in row.nodes if name not in goes)
        try:
            queue.commands.keep_only(row.id, kept)
        except BackendFailed as error:
            seconds = self._spare.note_kept(row.id, now)
            why = f"{fold_nodes(goes)} cannot be given back while the rest of {row.id} is used: {error}"
            queue.warnings.say(_SPARE + row.id, f"{why}; Slurm is asked again in {seconds:.0f} s")
            return
        queue.rows[row.id] = replace(row, nodes=kept)
        self._spare.note_returned(row.id)
        queue.folder.forget_nodes(row.id, goes)
        _log.info("gave %s of %s back to Slurm", fold_nodes(goes), row.id)
        self._show()

    def _refuse_late(self, now: float) -> None:
        """Refuse what Slurm has kept waiting for its nodes while it has others to lend: it is placed there instead."""
        queue = self.queue
        pending = [row for row in queue.rows.values() if row.state == "PENDING" and row.id not in queue.cancelled]
        since = self._pending_since = {row.id: self._pending_since.get(row.id, now) for row in pending}
        late = [row for row in pending if now - since[row.id] >= self.options.wait_seconds]
        free = self._free_nodes(now) if late else []
        left = len(free)
        for row in sorted(late, key=lambda row: since[row.id]):
            # No more leave their place in Slurm's queue than find others: the rest may be served there first.
            blamed = blamed_nodes(self.options, queue.states, row)
            if blamed and len(blamed) <= left:
                left -= len(blamed)
                why = f"for {now - since[row.id]:.0f} s ({row.reason or 'no reason given'})"
                self._refuse(row, blamed, f"{why}, and has others to lend ({fold_nodes(free)})", now)

    def _free_nodes(self, now: float) -> list[str]:
        """Nodes that Slurm could lend, and that nothing of ours waits for."""
        taken = {name for row in self.queue.rows.values() for name in nodes_of_request(row)}
        return [
            row.name
            for row in self.queue.states.values()
            if could_lend(self.options, row) and row.name not in taken and self.resting.get(row.name, 0.0) <= now
        ]

    def _refuse(self, row: PilotRow, blamed: Collection[str], why: str, now: float) -> None:
        """Refuse a batch job that waits, and leave the nodes alone that keep it."""
        why = f"Slurm has not lent {fold_nodes(blamed)} {why}: the job is placed anew"
        with self._books:
            names = set(nodes_of_request(row))
            jobs = [job for job, wanted in self._wanted.items() if names & wanted.keys()]
            self.resting.update(dict.fromkeys(blamed, now + _AVOID_SECONDS))
            self._refused.update(dict.fromkeys(jobs, why))
        _log.info("%s: %s", ", ".join(jobs) or row.id, why)
        self.queue.cancel((row.id,))
        self._show()
        self._changed()

    def _request(self, job_id: str, nodes: set[str]) -> None:
        """Ask Slurm for nodes for a job; where Slurm says no, the job is refused."""
        queue, listed = self.queue, fold_nodes(nodes)
        try:
            addresses = {name: queue.states[name].address or name for name in nodes if name in queue.states}
            script = job_script(self.options, queue.folder.path, self.head, job_id, nodes, addresses)
            array = queue.commands.submit(script, 1)
        except BackendFailed as error:
            self._refused[job_id] = f"Slurm does not lend {listed}: {error}"
            pause = queue.pause.lengthen()
            queue.warnings.say("submit", f"{self._refused[job_id]}; Slurm is asked again in {pause:.0f} s")
            self._show()
            self._changed()
            return
        queue.warnings.say("submit")
        row = PilotRow(f"{array}_0", "PENDING", None, None, (), f"{job_id}@{listed}", "just submitted")
        queue.rows[row.id] = row
        _log.info("asked Slurm for %s, for job '%s': %s", listed, job_id, array)

    def _leave(self) -> None:
        """Give back what nobody uses. What jobs asked for goes, too, where it is known that no job runs."""
        if not self.nodes_in_use():
            idle = self._idle_for_long(self.queue.clock())
            rows = self.queue.rows.values()
            self.queue.close([row.id for row in rows if self._knows_jobs or row.is_waiting or row.id in idle])
