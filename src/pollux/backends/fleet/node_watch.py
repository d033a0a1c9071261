"""Watches the nodes of a fleet that come, go or fall silent, and tells the jobs that run there.

The end of a node is reported after the losses of its jobs, so that jobs that can go on without the node do so.

Where a lost node is noticed:

- by silence, on any engine: `shim/remote_launcher`, whose message comes to `handle_message` here;
- by Slurm: `_read_queue` and `_read_states` of `slurm/queue_view`, then `slurm/pool_plan`; then `step` here;
- by Ray: `find_nodes` of `ray/driver/loop`, and `ray/driver/host_actors` for the host on a node; then `step` here.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pollux.backends.dispatch.job_table import DispatchedJob, JobTable
from pollux.backends.dispatch.site import FolderCheck, Site
from pollux.backends.dispatch.slots import FleetSlotAllocator
from pollux.backends.dispatch.worker_thread import WorkerThread
from pollux.backends.fleet.shared_folders import SharedFolders
from pollux.backends.nodes.provider import LentNode, NodeProvider
from pollux.backends.nodes.slot import Slot
from pollux.backends.process.records import read_record, write_record
from pollux.backends.protocol import Launch, NodeDown, NodeUp
from pollux.backends.transport.query import ask_host
from pollux.core import Node
from pollux.core.errors import BackendFailed, PolluxError
from pollux.storage.address import is_address
from pollux.wire.live.messages import AlarmMessage, NodeGoneRequest, NodeLeavingMessage, NodeSilentMessage, ShimMessage
from pollux.wire.live.node_messages import SeeRequest

__all__ = ["NodeWatch"]

_log = logging.getLogger("pollux.backends")
# Warnings that differ only in numbers, such as a duration, are logged once.
_NUMBER = re.compile(r"(?<![\w.-])\d+(\.\d+)?(?![\w.-])")

# How long a job may take to report its loss after its node has gone.
_LOSS_SECONDS = 5.0
# How long after its start a provider may take to find the nodes of an earlier service.
_RETURN_SECONDS = 60.0
_PROBE_SECONDS = 1.0
# A node may be given back once it has been silent for this many times `lost_seconds`.
_GIVE_UP_TIMES = 5.0
_LOG_SECONDS = 5.0


class NodeWatch(Site):
    """Watches the nodes that a provider lends, for a dispatcher; its step reports nodes that come and go.

    `node_alarms`: how many nodes answered after they had been given up.
    """

    def __init__(self, home: Path, slots: FleetSlotAllocator, provider: NodeProvider, shared: SharedFolders) -> None:
        self._slots, self._provider, self._shared = slots, provider, shared
        self.node_alarms = 0
        self._home = home
        self._announced: dict[str, LentNode] = {}
        self._last_hosts: Mapping[str, LentNode] = {}
        # Until when to wait for the losses that jobs report after a node has gone.
        self._losses_until: dict[str, float] = {}
        # Nodes that the engine takes back: no job is placed there, and jobs there save.
        self._leaving: dict[str, LentNode] = {}
        self._last_leaving: Mapping[str, str] = {}
        self._suspects: dict[str, str] = {}
        # The address at which a node does not answer, and since when.
        self._silent_since: dict[str, tuple[tuple[str, int], float]] = {}
        self._prober: threading.Thread | None = None
        self._logged: set[str] = set()

    def attach(self, thread: WorkerThread, table: JobTable) -> None:
        """Keep the dispatcher's thread and its jobs."""
        self._thread, self._table = thread, table

    @property
    def suspects(self) -> Mapping[str, str]:
        """Nodes that do not answer, each with the reason for a warning."""
        with self._thread.lock:
            return dict(self._suspects)

    def nodes(self) -> tuple[Node, ...]:
        """The nodes that jobs may be placed on."""
        with self._thread.lock:
            return tuple(lent.node for lent in self._usable().values())

    def start(self) -> None:
        """Load the nodes that an earlier service recorded, and start the provider."""
        self._load_record()
        self._provider.start(self._slots.secret, self._slots.head, self._thread.wake)

    def close(self) -> None:
        """Close the provider."""
        self._provider.close()

    @property
    def _record_path(self) -> Path:
        return self._home / "run" / "fleet-nodes.json"

    def _load_record(self) -> None:
        """Treat nodes that an earlier service recorded as lent until the provider has had time to find them."""
        recorded = (read_record(self._record_path) or {}).get("nodes", [])
        rows = recorded if isinstance(recorded, list) else []
        found = [lent for lent in map(_lent_node, rows) if lent is not None]
        if len(found) < len(rows):
            _log.warning(
                "%d of the nodes in %s cannot be understood, and are left out until the engine names them; was it "
                "written by another version?", len(rows) - len(found), self._record_path,
            )  # fmt: skip
        self._slots.remembered = {lent.node.id: lent for lent in found}
        self._announced = dict(self._slots.remembered)
        self._thread.after(_RETURN_SECONDS, self._slots.remembered.clear)

    def _write_record(self) -> None:
        nodes = [
            {"node": asdict(lent.node), "address": lent.address, "gpus": lent.gpus}
            for lent in (self._announced | self._leaving).values()
        ]
        try:
            write_record(self._record_path, {"nodes": nodes})
        except BackendFailed as error:
            _log.warning("the list of nodes could not be written: %s", error)

    # Nodes that come and go

    def _usable(self) -> dict[str, LentNode]:
        unusable = {*self._suspects, *self._provider.leaving()}
        return {node: lent for node, lent in self._slots.hosts.items() if node not in unusable}

    def step(self) -> None:
        """Report nodes that came or went since the last step."""
        hosts, taken_back = self._slots.hosts, self._provider.leaving()
        if hosts is not self._last_hosts or taken_back.keys() != self._last_leaving.keys():
            self._last_hosts, self._last_leaving = hosts, taken_back
            self._suspects = {node: why for node, why in self._suspects.items() if node in hosts}
            self._notice_losses(hosts)
            for node in [node for node in self._announced if node in taken_back and node not in self._losses_until]:
                self._leaving[node] = self._announced.pop(node)
                self._thread.report(NodeDown(time.time(), node))
            self._tell_new_nodes()
        if self._losses_until:
            self._tell_gone_nodes()

    def _notice_losses(self, hosts: Mapping[str, LentNode]) -> None:
        """Tell jobs once of their nodes that are gone, or that have a new daemon."""
        for node, lent in (self._announced | self._leaving).items():
            # Once only: later, jobs may already run on the new daemon of the node.
            if node not in self._losses_until and (node not in hosts or hosts[node].address != lent.address):
                self._await_losses(node)
                self._tell_shims(node, f"node '{node}' is gone")

    def _await_losses(self, node: str) -> None:
        if node not in self._losses_until:
            self._losses_until[node] = time.monotonic() + _LOSS_SECONDS
            self._thread.wake_after(_LOSS_SECONDS)

    def _tell_shims(self, node: str, why: str) -> None:
        for job in self._table.jobs.values():
            if job.link is not None and self._counts_on(job, node):
                job.link.send(NodeGoneRequest(node, why))

    def _counts_on(self, job: DispatchedJob, node: str) -> bool:
        """Whether the job has replicas on the node, as far as its shim has reported."""
        now = job.now
        if now is None or now.ended is not None or not now.sent:
            return False
        return any(slot.node == node for slot in now.remaining)

    def _tell_gone_nodes(self) -> None:
        for node, until in [*self._losses_until.items()]:
            waits = any(self._counts_on(job, node) for job in self._table.jobs.values())
            if not waits or time.monotonic() >= until:
                del self._losses_until[node]
                self._leaving.pop(node, None)
                if self._announced.pop(node, None) is not None:
                    self._thread.report(NodeDown(time.time(), node))
                    self._write_record()
        self._tell_new_nodes()

    def _tell_new_nodes(self) -> None:
        changed = False
        for node, lent in self._usable().items():
            if self._announced.get(node) != lent and node not in self._losses_until:
                self._announced[node] = lent
                self._leaving.pop(node, None)
                self._thread.report(NodeUp(time.time(), lent.node))
                changed = True
        if changed:
            self._write_record()

    # Folders

    def check(self, launch: Launch, slots: Sequence[Slot]) -> FolderCheck | None:
        """Whether the nodes of these slots share the job's folders with this machine; None: not known yet."""
        hosts = self._slots.hosts
        nodes = [hosts[node] for node in dict.fromkeys(slot.node for slot in slots) if node in hosts]
        written = launch.env.get("POLLUX_CHECKPOINT_DIR")
        folders = [launch.workdir, *([written] if written and not is_address(written) else [])]
        found = self._shared.check(folders, nodes, self._thread.wake)
        if found is not None and found.silent:
            self._suspect(found.silent, found.why)
        return found

    # Warnings

    def log(self, warnings: Callable[[], Sequence[str]]) -> None:
        """Write warnings into the log as well, from the start on; each once for as long as it lasts."""
        self._thread.after(0.0, lambda: self._log_warnings(warnings))

    def _log_warnings(self, warnings: Callable[[], Sequence[str]]) -> None:
        there = {_NUMBER.sub("#", text): text for text in warnings()}
        for shape in there.keys() - self._logged:
            _log.warning("degraded: %s", there[shape])
        self._logged = {*there}
        self._thread.after(_LOG_SECONDS, lambda: self._log_warnings(warnings))

    # Silent nodes

    def handle_message(self, job: DispatchedJob, message: ShimMessage) -> bool:
        """Handle a shim's message about a node that is silent, leaves, or answers again."""
        match message:
            case NodeSilentMessage(node, why):
                self._suspect(node, why)
                return True
            case NodeLeavingMessage(node, why):
                _log.warning("%s (job '%s')", why, job.id)
                self._provider.check_node(node)
                if node in self._losses_until:
                    # The node answers, and the job saves: report its end now, without waiting for losses.
                    self._losses_until[node] = time.monotonic()
                return True
            case AlarmMessage(replica=None):
                self.node_alarms += 1
        return False

    def _suspect(self, node: str, why: str) -> None:
        """Place no job on a node that did not answer, until it answers the service."""
        if node in self._suspects or node not in self._slots.hosts:
            return
        _log.warning("%s; it is not used until it answers", why)
        self._suspects[node] = why
        # The shims of other jobs there notice the silence by themselves.
        self._await_losses(node)
        if self._prober is None or not self._prober.is_alive():
            self._prober = threading.Thread(target=self._probe, name="pollux-fleet-probe", daemon=True)
            self._prober.start()

    def _probe(self) -> None:
        """Ask silent nodes until they answer or are gone; runs in a thread of its own."""
        while not self._thread.stopping.wait(_PROBE_SECONDS):
            with self._thread.lock:
                left = {node: self._slots.hosts[node] for node in self._suspects if node in self._slots.hosts}
                if not left:
                    self._prober = None
                    self._provider.release_silent(())
                    return
            for node, lent in left.items():
                try:
                    ask_host(lent.address, self._slots.secret, SeeRequest((), node), 2.0)
                except BackendFailed:
                    continue
                with self._thread.lock:
                    if self._suspects.pop(node, None) is not None and node not in self._losses_until:
                        self._tell_new_nodes()
                self._thread.wake()
            self._release_silent(left)

    def _release_silent(self, asked: Mapping[str, LentNode]) -> None:
        """Tell the provider which of these nodes have been silent for long."""
        now, hosts = time.monotonic(), self._slots.hosts
        with self._thread.lock:
            silent = {node: lent for node, lent in asked.items() if node in self._suspects and node in hosts}
        since = {node: self._silent_since.get(node, (lent.address, now)) for node, lent in silent.items()}
        # A new daemon's silence is counted from now on, not from its predecessor's.
        self._silent_since = {
            node: at if at[0] == silent[node].address else (silent[node].address, now) for node, at in since.items()
        }
        most = _GIVE_UP_TIMES * self._slots.lost_seconds
        self._provider.release_silent(
            [silent[node] for node, (_, at) in self._silent_since.items() if now - at >= most]
        )


def _lent_node(row: Any) -> LentNode | None:
    """The node in a row of the record; None for a row that cannot be read, such as one of another version."""
    try:
        address, port = row["address"]
        return LentNode(Node(**row["node"]), (str(address), int(port)), tuple(map(int, row["gpus"])))
    except (TypeError, ValueError, KeyError, AttributeError, PolluxError):
        return None
