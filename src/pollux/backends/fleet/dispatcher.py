"""The thread of a backend over lent nodes: what `dispatcher` does, and the nodes that come, go or fall silent.

A node's end is told only after the losses of the jobs that ran there, so that those that can go on without it do.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pollux.backends.dispatch.dispatcher import Dispatcher
from pollux.backends.dispatch.job_table import DispatchedJob
from pollux.backends.dispatch.slots import FleetSlotAllocator
from pollux.backends.fleet.shared_folders import FolderCheck, SharedFolders
from pollux.backends.nodes.provider import LentNode, NodeProvider
from pollux.backends.process.records import read_record, write_record
from pollux.backends.process.replica_env import node_of
from pollux.backends.protocol import Launch, NodeDown, NodeUp
from pollux.backends.transport.query import ask_host
from pollux.core import Node
from pollux.core.errors import BackendFailed, PolluxError
from pollux.storage.address import is_address

__all__ = ["FleetDispatcher"]

_log = logging.getLogger("pollux.backends")
# Texts that differ in numbers only, such as how long, are the same news.
_NUMBER = re.compile(r"(?<![\w.-])\d+(\.\d+)?(?![\w.-])")

# So long after its node is gone a job may take to say what it lost.
_LOSS_SECONDS = 5.0
# So long after a start a lender may take to find the nodes there were.
_RETURN_SECONDS = 60.0
_PROBE_SECONDS = 1.0
# A node that is silent for so many times as long as it takes to count as lost is not worth being held.
_GIVE_UP_TIMES = 5.0
_LOG_SECONDS = 5.0


class FleetDispatcher(Dispatcher):
    """Work on the nodes of a `lender`; `node_alarms` are those of the `false_alarms` that are nodes."""

    def __init__(
        self,
        home: Path,
        ground: FleetSlotAllocator,
        lender: NodeProvider,
        environ: Mapping[str, str],
        warm: bool,
        log_cap_bytes: int,
        hang_seconds: float,
        shared: SharedFolders | None = None,
    ) -> None:
        super().__init__(home, ground, environ, warm, log_cap_bytes, hang_seconds)
        self._shared = SharedFolders(ground.secret) if shared is None else shared
        self.node_alarms = 0
        self._fleet = ground
        self._lender = lender
        self._told: dict[str, LentNode] = {}
        self._listed: Mapping[str, LentNode] = {}
        # Until when jobs may say what they lost with a node that is gone.
        self._ending: dict[str, float] = {}
        # Nodes that their engine takes back: nobody is placed there, while jobs save what they have there.
        self._left: dict[str, LentNode] = {}
        self._taken_back: Mapping[str, str] = {}
        self._suspects: dict[str, str] = {}
        # When it was first asked in vain, and where.
        self._silent_since: dict[str, tuple[tuple[str, int], float]] = {}
        self._prober: threading.Thread | None = None
        self._logged: set[str] = set()

    @property
    def suspects(self) -> Mapping[str, str]:
        """Nodes that do not answer, and what was seen of it."""
        with self._lock:
            return dict(self._suspects)

    def nodes(self) -> tuple[Node, ...]:
        """Those that can be used."""
        with self._lock:
            return tuple(hosted.node for hosted in self._usable().values())

    def close(self) -> None:
        """Let go of the lender too."""
        super().close()
        self._lender.close()

    # Starting

    def _prepare_home(self) -> None:
        super()._prepare_home()
        self._remember_from_before()
        self._lender.start(self._fleet.secret, self._fleet.head, self._rouse)

    @property
    def _memory(self) -> Path:
        return self._home / "run" / "fleet-nodes.json"

    def _remember_from_before(self) -> None:
        """Nodes of a time before count as there until the lender has had time to find them."""
        noted = (read_record(self._memory) or {}).get("nodes", [])
        rows = noted if isinstance(noted, list) else []
        found = [hosted for hosted in map(_hosted, rows) if hosted is not None]
        if len(found) < len(rows):
            _log.warning(
                "%d of the nodes in %s cannot be understood, and are left out until the engine names them; was it "
                "written by another version?", len(rows) - len(found), self._memory,
            )  # fmt: skip
        self._fleet.remembered = {hosted.node.id: hosted for hosted in found}
        self._told = dict(self._fleet.remembered)
        self._after(_RETURN_SECONDS, self._fleet.remembered.clear)

    def _note_nodes(self) -> None:
        nodes = [
            {"node": _plain(hosted.node), "address": hosted.address, "gpus": hosted.gpus}
            for hosted in (self._told | self._left).values()
        ]
        try:
            write_record(self._memory, {"nodes": nodes})
        except BackendFailed as error:
            _log.warning("the nodes there are could not be noted: %s", error)

    # The thread

    def _work(self) -> None:
        self._stumbles.step(self._follow_nodes)
        super()._work()

    def _usable(self) -> dict[str, LentNode]:
        unusable = {*self._suspects, *self._lender.leaving()}
        return {node: hosted for node, hosted in self._fleet.hosts.items() if node not in unusable}

    def _follow_nodes(self) -> None:
        """Tell of nodes that came or went since the last time; nothing to do where none did."""
        hosts, taken_back = self._fleet.hosts, self._lender.leaving()
        if hosts is not self._listed or taken_back.keys() != self._taken_back.keys():
            self._listed, self._taken_back = hosts, taken_back
            for node in [*self._suspects]:
                if node not in hosts:
                    del self._suspects[node]
            for node, hosted in (self._told | self._left).items():
                # Told once: by the next time a job may be on the node's new host.
                if node not in self._ending and (node not in hosts or hosts[node].address != hosted.address):
                    self._gone(node)
                    self._tell_shims(node, f"node '{node}' is gone")
            for node in [node for node in self._told if node in taken_back and node not in self._ending]:
                self._left[node] = self._told.pop(node)
                self._events.append(NodeDown(time.time(), node))
            self._announce()
        if self._ending:
            self._let_end()

    def _gone(self, node: str) -> None:
        if node not in self._ending:
            self._ending[node] = time.monotonic() + _LOSS_SECONDS
            self._after(_LOSS_SECONDS, lambda: None)

    def _tell_shims(self, node: str, why: str) -> None:
        for job in self._jobs.values():
            if job.link is not None and self._counts_on(job, node):
                job.link.send(op="gone", node=node, why=why)

    def _counts_on(self, job: DispatchedJob, node: str) -> bool:
        """Whether the job has replicas there, as far as it has told."""
        now = job.now
        if now is None or now.ended is not None or not now.sent:
            return False
        return any(node_of(place) == node for place in (now.places if now.kept is None else now.kept))

    def _let_end(self) -> None:
        for node, until in [*self._ending.items()]:
            waits = any(self._counts_on(job, node) for job in self._jobs.values())
            if not waits or time.monotonic() >= until:
                del self._ending[node]
                self._left.pop(node, None)
                if self._told.pop(node, None) is not None:
                    self._events.append(NodeDown(time.time(), node))
                    self._note_nodes()
        self._announce()

    def _announce(self) -> None:
        changed = False
        for node, hosted in self._usable().items():
            if self._told.get(node) != hosted and node not in self._ending:
                self._told[node] = hosted
                self._left.pop(node, None)
                self._events.append(NodeUp(time.time(), hosted.node))
                changed = True
        if changed:
            self._note_nodes()

    # Folders

    def _launch(self, job: DispatchedJob) -> None:
        """Only where the nodes see the job's folders: some were not there yet when it was submitted."""
        held = job.now
        if held is not None and held.launch is not None and not held.sent and held.ended is None:
            found = self._look_for_folders(held.launch, held.places)
            if found is None:
                return
            if found.why:
                # Where no node sees them it is the job's own fault, else that of a node.
                self._close(job, held, "refused" if found.elsewhere else "crashed", found.why)
                return
        super()._launch(job)

    def _vet(
        self, launch: Launch, target: tuple[str, ...], kept: tuple[str, ...]
    ) -> tuple[str, tuple[str, ...]] | None:
        found = self._look_for_folders(launch, [place for place in target if place not in kept])
        if found is None:
            return None
        if not found.why:
            return "", target
        return found.why, tuple(place if place in kept else self._fleet.gone(place) for place in target)

    def _look_for_folders(self, launch: Launch, places: Sequence[str]) -> FolderCheck | None:
        """Whether the nodes of these places share the job's folders with this machine; None: not known yet."""
        hosts = self._fleet.hosts
        nodes = [hosts[node] for node in dict.fromkeys(map(node_of, places)) if node in hosts]
        written = launch.env.get("POLLUX_CHECKPOINT_DIR")
        folders = [launch.workdir, *([written] if written and not is_address(written) else [])]
        found = self._shared.verdict(folders, nodes, self._rouse)
        if found is not None and found.silent:
            self._suspect(found.silent, found.why)
        return found

    # Warnings

    def log(self, warnings: Callable[[], Sequence[str]]) -> None:
        """From the start on, write what is degraded into the log too, once for as long as it lasts."""
        self._after(0.0, lambda: self._log_warnings(warnings))

    def _log_warnings(self, warnings: Callable[[], Sequence[str]]) -> None:
        there = {_NUMBER.sub("#", text): text for text in warnings()}
        for shape in there.keys() - self._logged:
            _log.warning("degraded: %s", there[shape])
        self._logged = {*there}
        self._after(_LOG_SECONDS, lambda: self._log_warnings(warnings))

    # Silent nodes

    def _take_aside(self, job: DispatchedJob, message: Mapping[str, Any]) -> bool:
        if message["event"] == "silent":
            self._suspect(str(message["node"]), str(message["why"]))
            return True
        if message["event"] == "leaving":
            _log.warning("%s (job '%s')", message["why"], job.id)
            node = str(message["node"])
            self._lender.look_at(node)
            if node in self._ending:
                # It answers, and the job saves: whoever decides is to know now, and not after a wait for losses.
                self._ending[node] = time.monotonic()
            return True
        if message["event"] == "alarm" and "replica" not in message:
            self.node_alarms += 1
        return super()._take_aside(job, message)

    def _suspect(self, node: str, why: str) -> None:
        """It did not answer a job: nobody is placed there until it answers us."""
        if node in self._suspects or node not in self._fleet.hosts:
            return
        _log.warning("%s; it is not used until it answers", why)
        self._suspects[node] = why
        # Other jobs that run there find out for themselves, once their leases there are over.
        self._gone(node)
        if self._prober is None or not self._prober.is_alive():
            self._prober = threading.Thread(target=self._probe, name="pollux-fleet-probe", daemon=True)
            self._prober.start()

    def _probe(self) -> None:
        """Ask silent nodes until they answer or are gone; in a thread of its own."""
        while not self._halt.wait(_PROBE_SECONDS):
            with self._lock:
                left = {node: self._fleet.hosts[node] for node in self._suspects if node in self._fleet.hosts}
                if not left:
                    self._prober = None
                    self._lender.give_up(())
                    return
            for node, hosted in left.items():
                try:
                    ask_host(hosted.address, self._fleet.secret, {"see": []}, 2.0)
                except BackendFailed:
                    continue
                with self._lock:
                    if self._suspects.pop(node, None) is not None and node not in self._ending:
                        self._announce()
                self._rouse()
            self._give_up(left)

    def _give_up(self, asked: Mapping[str, LentNode]) -> None:
        """Tell the lender which of these have been silent for long, all of them each time: who answers is not."""
        now, hosts = time.monotonic(), self._fleet.hosts
        with self._lock:
            silent = {node: hosted for node, hosted in asked.items() if node in self._suspects and node in hosts}
        since = {node: self._silent_since.get(node, (hosted.address, now)) for node, hosted in silent.items()}
        # A new host of the same name has just begun to be silent, if it is.
        self._silent_since = {
            node: at if at[0] == silent[node].address else (silent[node].address, now) for node, at in since.items()
        }
        most = _GIVE_UP_TIMES * self._fleet.lost_seconds
        self._lender.give_up([silent[node] for node, (_, at) in self._silent_since.items() if now - at >= most])


def _hosted(row: Any) -> LentNode | None:
    """A node as it was noted; None for what is none, or is one of another version."""
    try:
        address, port = row["address"]
        return LentNode(Node(**row["node"]), (str(address), int(port)), tuple(map(int, row["gpus"])))
    except (TypeError, ValueError, KeyError, AttributeError, PolluxError):
        return None


def _plain(node: Node) -> dict[str, Any]:
    return {
        "id": node.id,
        "num_gpus": node.num_gpus,
        "gpu_type": node.gpu_type,
        "num_cpus": node.num_cpus,
        "memory_bytes": node.memory_bytes,
        "preemptible": node.preemptible,
        "isolated_network": node.isolated_network,
        "schedulable": node.schedulable,
    }
