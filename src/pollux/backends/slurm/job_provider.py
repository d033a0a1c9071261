"""Slurm without pilots: nodes are asked for when a decision names them, with one batch job for each job's generation.

A node's address is fixed before its host is there, so that it can be placed on. What runs on a granted node is as with
pilots (`pilot_provider`).
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from pollux.backends.nodes.provider import LentNode
from pollux.backends.slurm.parse import (
    NOT_RESPONDING,
    NodeRow,
    PilotRow,
    expand_nodes,
    fold_nodes,
    gres_count,
    gres_type,
    read_nodes,
)
from pollux.backends.slurm.pilot_provider import SlurmPilotProvider
from pollux.backends.slurm.pool_plan import look
from pollux.backends.slurm.script import SlurmOptions, batch_script
from pollux.core import Node
from pollux.core.errors import BackendFailed

__all__ = ["SlurmJobProvider", "host_port", "job_script"]

_log = logging.getLogger("pollux.backends")

_FIRST_PORT, _PORTS = 20000, 12000
# So long a node whose batch job has ended is not offered, so that nobody takes its next host for the last one.
_REST_SECONDS = 5.0
# The next generation of a job is asked for a moment after the last one's places were given back.
_LINGER_SECONDS = 2.0
# So long a node is not offered that kept a job waiting while others were free: it would be sent there again.
_AVOID_SECONDS = 300.0
_SPARE = "spare "
_BUSY = ("allocated", "completing")
# Reasons to wait that another node may not have, whatever the states of these look like.
_OF_THE_NODES = ("Resources", "ReqNodeNotAvail", "Nodes required", "Reservation")
# Reasons that it would have on any node.
_OF_THE_USER = ("Assoc", "QOS", "JobHeld", "Dependency", "BeginTime", "MaxJobs", "MaxMem", "Licenses")


def host_port(pool: str, node: str) -> int:
    """Where a node's host listens in the pool of this folder: below the ports that systems hand out by themselves."""
    digest = hashlib.sha256(f"{pool}\0{node}".encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:4], "big") % _PORTS


def job_script(
    options: SlurmOptions,
    folder: Path,
    head: str,
    job_id: str,
    nodes: Collection[str],
    addresses: Mapping[str, str] | None = None,
) -> str:
    """The batch job that asks for these nodes for a job. `addresses`: what Slurm has for them, else their names."""
    listed, known = fold_nodes(nodes), addresses or {}
    words = {name: name if known.get(name, name) == name else f"{name}={known[name]}" for name in nodes}
    ports = {words[name]: host_port(str(folder), name) for name in nodes}
    return batch_script(options, folder, head, f"{job_id}@{listed}", listed, len(nodes), ports)


class SlurmJobProvider(SlurmPilotProvider):
    """Offers all nodes of the partition that Slurm could lend, and asks for those that jobs want."""

    def __init__(self, *given: object, **more: object) -> None:
        super().__init__(*given, **more)  # type: ignore[arg-type]
        self._up: Mapping[str, LentNode] = {}
        self._resting: dict[str, float] = {}
        self._refused: dict[str, str] = {}
        self._idle_since: dict[str, float] = {}
        self._pending_since: dict[str, float] = {}
        # Nodes of batch jobs of which only others are needed, and since when; when one is asked again that kept them.
        self._spare_since: dict[tuple[str, str], float] = {}
        self._whole_until: dict[str, float] = {}
        self._knows_jobs = False

    def claim(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Note what is in use."""
        self._knows_jobs = True
        super().claim(job_id, places)

    def ask(self, job_id: str, wanted: Mapping[str, int]) -> None:
        """Ask Slurm for the nodes that are not there yet; places are given once their hosts are up."""
        self._refused.pop(job_id, None)
        self._knows_jobs = True
        super().ask(job_id, wanted)
        self._wake.set()

    def refusal(self, job_id: str) -> str:
        """What Slurm said to the batch job that was asked for."""
        return self._refused.get(job_id, "") or super().refusal(job_id)

    def is_up(self, node: str) -> bool:
        """Whether its host is there: others are offered that Slurm would have to lend first."""
        return node in self._up

    def give_up(self, silent: Collection[LentNode]) -> None:
        """Nothing: what no job uses is given back in any case."""

    def _giving(self) -> Container[str]:
        """Only those whose host is up."""
        return self._up.keys() & self._sizes.keys()

    # Looking

    def _read_states(self) -> None:
        try:
            states, odd = read_nodes(self._calls.all_nodes(self.options.partition), with_use=True)
        except BackendFailed as error:
            self._say("nodes", f"{error}; nodes are taken for as they were")
            return
        self._say("nodes", "" if not odd else f"sinfo printed what cannot be understood, such as '{odd[0][:120]}'")
        self._states = {**self._states, **states} if odd else states

    def _glance(self) -> None:
        notes, odd = self._folder.notes()
        self._say("notes", odd[0] if odd else "")
        # What was cancelled is not lent any more, though its end may take a while.
        rows = [row for row in self._aged() if row.id not in self._cancelled]
        now = self._clock()
        running = {pilot: now - since for pilot, since in self._since.items()}
        picture = look(self.options, rows, self._states, notes, running, self._patience_seconds)
        with self._books:
            up = {hosted.node.id: hosted for hosted in picture.hosts}
            for name in self._up.keys() - up.keys():
                self._resting[name] = now + _REST_SECONDS
            fresh = up.keys() - self._up.keys()
            self._up = up
        self._publish(replace(picture, hosts=self._offered(rows, now)))
        if fresh:
            with self._books:
                served = [self._serve(job_id) for job_id in [*self._wanted]]
            if any(served):
                self._changed()

    def _offered(self, rows: list[PilotRow], now: float) -> tuple[LentNode, ...]:
        lent = {name for row in rows for name in row.nodes}
        asked = {name for row in rows if row.is_waiting for name in _nodes_of(row)}
        # What Slurm would not lend now is not to be placed on: jobs wait for it without being sent there in vain.
        may_ask = now >= self._submit_after
        names = [
            row.name
            for row in self._states.values()
            if row.name in lent or (row.stand == "held" and row.name in asked) or (may_ask and self._could_lend(row))
        ]
        rested = [name for name in names if self._resting.get(name, 0.0) <= now or name in self._up]
        # Of a host that is up it need not be known what Slurm has to say: jobs run there.
        unnamed = [hosted for name, hosted in self._up.items() if name in lent and name not in self._states]
        return (*(self._host(self._states[name]) for name in rested), *unnamed)

    def _could_lend(self, row: NodeRow) -> bool:
        """Whether it answers Slurm, and has left all that a batch job asks for on each of its nodes."""
        asked, kind = self.options.request, gres_type(self.options.request)
        cpus = row.cpus if row.idle_cpus is None else row.idle_cpus
        return (
            row.stand == "held"
            and NOT_RESPONDING not in row.state
            and not row.state.startswith(_BUSY)
            and (not row.state.startswith("reserved") or "--reservation" in self.options.words)
            and gres_count(row.gres, kind) - gres_count(row.used, kind) >= gres_count(asked)
            and (not row.cpus or cpus >= max(1, self.options.cpus))
        )

    def _host(self, row: NodeRow) -> LentNode:
        """The node as it is or would be lent; its address is the same, whether the host is there or not."""
        address = (row.address or row.name, host_port(str(self._folder.path), row.name))
        # By Slurm's name for it, since that is known before: a node must not be of another type once its host is up.
        kind = "cpu" if self.options.slots else gres_type(row.gres) or "gpu"
        known = self._up.get(row.name)
        if known is not None:
            return LentNode(replace(known.node, gpu_type=kind), address, known.gpus)
        places = self.options.slots or self.options.gpus_per_node
        node = Node(row.name, places, kind, row.cpus or math.inf, preemptible=self.options.preemptible)
        return LentNode(node, address)

    # Acting

    def _act(self) -> None:
        now = self._clock()
        with self._books:
            wanted = {job: set(nodes) for job, nodes in self._wanted.items()}
            working = set().union(*(self._works_on(job) for job in self._held))
            needed = self._needed()
            asked = {row.id: set(_nodes_of(row)) for row in self._rows.values()}
            since = {pilot: self._idle_since.get(pilot, now) for pilot, nodes in asked.items() if not nodes & needed}
            self._idle_since = since
            idle = [pilot for pilot, at in since.items() if now - at >= _LINGER_SECONDS]
            # Whoever waits for its host is refused when its node goes, and is placed anew; what runs beside is spared.
            faulty = [pilot for pilot in self._picture.faulty if not asked.get(pilot, set()) & working]
            idle += [pilot for pilot in faulty if pilot not in idle]
            self._take_down(name for pilot in idle for name in asked.get(pilot, ()))
        if idle:
            self._cancel(tuple(idle))
        if self._sure:
            self._give_back_spare(now)
            self._give_up_waiting(now)
        there = set().union(*asked.values())
        if self._sure and not self._halt.is_set():
            for job_id, nodes in wanted.items():
                lacking = nodes - there
                if lacking and job_id not in self._refused and now >= self._submit_after:
                    self._submit_for(job_id, lacking)
                    there |= lacking

    def _needed(self) -> set[str]:
        """Nodes that jobs have places on, or wait for."""
        used = {name for held in self._held.values() for name, places in held.items() if places}
        return used.union(*self._wanted.values())

    def _take_down(self, names: Iterable[str]) -> None:
        """Have nobody given a place there: the host is about to be ended."""
        for name in [name for name in names if name in self._up]:
            self._up = {other: hosted for other, hosted in self._up.items() if other != name}
            self._resting[name] = self._clock() + _REST_SECONDS

    def _give_back_spare(self, now: float) -> None:
        """Nodes that nobody needs of batch jobs of which others are: after a job has shrunk, or where one died.

        The first node of a batch job has its script, and stays as long as any does.
        """
        there = {row.id: row for row in self._rows.values() if row.is_held and row.id not in self._cancelled}
        self._whole_until = {pilot: at for pilot, at in self._whole_until.items() if pilot in there}
        self._spare_since = {
            (pilot, name): at
            for (pilot, name), at in self._spare_since.items()
            if pilot in there and name in there[pilot].nodes
        }
        for row in there.values():
            with self._books:
                # Now, and not as it was before commands that take their time: from here on nobody is given them.
                goes = self._spare(row, now)
                self._take_down(goes)
            if goes:
                self._return(row, goes, now)
        stuck = {pilot for pilot, _ in self._spare_since if pilot in self._whole_until}
        for key in [key for key in self._trouble if key.startswith(_SPARE) and key.removeprefix(_SPARE) not in stuck]:
            self._say(key, "")

    def _spare(self, row: PilotRow, now: float) -> set[str]:
        """The nodes of a batch job that go; those that are not needed are noted."""
        needed = self._needed()
        spare = {name for name in row.nodes[1:] if name not in needed} if needed.intersection(row.nodes) else set()
        since = {name: self._spare_since.get((row.id, name), now) for name in spare}
        for name in row.nodes:
            self._spare_since.pop((row.id, name), None)
        self._spare_since.update({(row.id, name): at for name, at in since.items()})
        may = now >= self._whole_until.get(row.id, now)
        return {name for name, at in since.items() if may and now - at >= _LINGER_SECONDS}

    def _return(self, row: PilotRow, goes: set[str], now: float) -> None:
        kept = tuple(name for name in row.nodes if name not in goes)
        try:
            self._calls.keep_only(row.id, kept)
        except BackendFailed as error:
            self._whole_until[row.id] = now + _AVOID_SECONDS
            why = f"{fold_nodes(goes)} cannot be given back while the rest of {row.id} is used: {error}"
            self._say(_SPARE + row.id, f"{why}; Slurm is asked again in {_AVOID_SECONDS:.0f} s")
            return
        self._rows[row.id] = replace(row, nodes=kept)
        self._whole_until.pop(row.id, None)
        self._folder.forget_nodes(row.id, goes)
        _log.info("gave %s of %s back to Slurm", fold_nodes(goes), row.id)
        self._glance()

    def _works_on(self, job_id: str) -> set[str]:
        """The nodes that a job uses: those it was given while it still waits for others of them are not used yet."""
        held, wanted = self._held.get(job_id, {}), self._wanted.get(job_id, {})
        waits = any(len(held.get(node, ())) < number for node, number in wanted.items())
        return {node for node, places in held.items() if places and not (waits and node in wanted)}

    def _give_up_waiting(self, now: float) -> None:
        """Refuse what Slurm has kept waiting for its nodes while it has others to lend: it is placed there instead."""
        pending = [row for row in self._rows.values() if row.state == "PENDING" and row.id not in self._cancelled]
        self._pending_since = {row.id: self._pending_since.get(row.id, now) for row in pending}
        late = [row for row in pending if now - self._pending_since[row.id] >= self.options.wait_seconds]
        if not late:
            return
        taken = {name for row in self._rows.values() for name in _nodes_of(row)}
        free = [
            row.name
            for row in self._states.values()
            if self._could_lend(row) and row.name not in taken and self._resting.get(row.name, 0.0) <= now
        ]
        left = len(free)
        for row in sorted(late, key=lambda row: self._pending_since[row.id]):
            # No more leave their place in Slurm's queue than find others: the rest may be served there first.
            blamed = self._blamed(row)
            if blamed and len(blamed) <= left:
                left -= len(blamed)
                waited, said = now - self._pending_since[row.id], row.reason or "no reason given"
                why = f"for {waited:.0f} s ({said}), and has others to lend ({fold_nodes(free)})"
                self._give_up(row, blamed, why, now)

    def _blamed(self, row: PilotRow) -> list[str]:
        """The nodes that keep one waiting; none where it would wait elsewhere, too."""
        if row.reason.startswith(_OF_THE_USER):
            return []
        names = [name for name in _nodes_of(row) if name in self._states]
        # Where each could be lent, what keeps them from it is not seen in their states.
        blamed = [name for name in names if not self._could_lend(self._states[name])]
        return names if not blamed and row.reason.startswith(_OF_THE_NODES) else blamed

    def _give_up(self, row: PilotRow, blamed: list[str], why: str, now: float) -> None:
        """Refuse one that waits, and leave the nodes alone that keep it."""
        why = f"Slurm has not lent {fold_nodes(blamed)} {why}: the job is placed anew"
        with self._books:
            jobs = [job for job, wanted in self._wanted.items() if any(name in wanted for name in _nodes_of(row))]
            self._resting.update(dict.fromkeys(blamed, now + _AVOID_SECONDS))
            self._refused.update(dict.fromkeys(jobs, why))
        _log.info("%s: %s", ", ".join(jobs) or row.id, why)
        self._cancel((row.id,))
        self._glance()
        self._changed()

    def _submit_for(self, job_id: str, nodes: set[str]) -> None:
        listed = fold_nodes(nodes)
        try:
            addresses = {name: self._states[name].address or name for name in nodes if name in self._states}
            script = job_script(self.options, self._folder.path, self.head, job_id, nodes, addresses)
            array = self._calls.submit(script, 1)
        except BackendFailed as error:
            self._refused[job_id] = f"Slurm does not lend {listed}: {error}"
            pause = self._pause()
            self._say("submit", f"{self._refused[job_id]}; Slurm is asked again in {pause:.0f} s")
            self._glance()
            self._changed()
            return
        self._say("submit", "")
        row = PilotRow(f"{array}_0", "PENDING", None, None, (), f"{job_id}@{listed}", "just submitted")
        self._rows[row.id] = row
        _log.info("asked Slurm for %s, for job '%s': %s", listed, job_id, array)

    def _leave(self) -> None:
        """What nobody uses is given back, as while we are there; what was asked for is so by the next object."""
        if not self._in_use():
            super()._leave()

    def _unneeded(self) -> list[str]:
        """What waits and what is idle; all, where it is known that no job runs, and not only where none was told of."""
        now = self._clock()
        idle = {pilot for pilot, at in self._idle_since.items() if now - at >= _LINGER_SECONDS}
        return [row.id for row in self._rows.values() if self._knows_jobs or row.is_waiting or row.id in idle]


def _nodes_of(row: PilotRow) -> tuple[str, ...]:
    """The nodes of a batch job, also while it waits."""
    if row.nodes:
        return row.nodes
    try:
        return expand_nodes(row.comment.partition("@")[2])
    except BackendFailed:
        return ()
