"""Slurm without pilots: the batch job that asks for a job's nodes, and which nodes Slurm could lend now. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
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
)
from pollux.backends.slurm.script import SlurmOptions, batch_script
from pollux.core import Node
from pollux.core.errors import BackendFailed

__all__ = ["SpareNodes", "blamed_nodes", "could_lend", "host_port", "job_script", "lendable_node", "nodes_of_request"]

_FIRST_PORT, _PORTS = 20000, 12000
# When Slurm has refused to take nodes back, it is asked again after this time.
_KEPT_SECONDS = 300.0
_BUSY = ("allocated", "completing")
# Reasons to wait that concern the requested nodes, even if their states show nothing: other nodes may be free.
_OF_THE_NODES = ("Resources", "ReqNodeNotAvail", "Nodes required", "Reservation")
# Reasons to wait that hold for any node.
_OF_THE_USER = ("Assoc", "QOS", "JobHeld", "Dependency", "BeginTime", "MaxJobs", "MaxMem", "Licenses")


def host_port(pool: str, node: str) -> int:
    """The port of a node's host in the pool of this folder: below the ports that systems assign by themselves."""
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
    """The script of the batch job that asks for these nodes. `addresses`: those that Slurm has, else their names."""
    listed, known = fold_nodes(nodes), addresses or {}
    words = {name: name if known.get(name, name) == name else f"{name}={known[name]}" for name in nodes}
    ports = {words[name]: host_port(str(folder), name) for name in nodes}
    return batch_script(options, folder, head, f"{job_id}@{listed}", listed, len(nodes), ports)


def nodes_of_request(row: PilotRow) -> tuple[str, ...]:
    """The nodes of a batch job, also while it waits for them."""
    if row.nodes:
        return row.nodes
    try:
        return expand_nodes(row.comment.partition("@")[2])
    except BackendFailed:
        return ()


def could_lend(options: SlurmOptions, row: NodeRow) -> bool:
    """Whether the node answers Slurm and has enough free resources for one node of a batch job."""
    asked, kind = options.request, gres_type(options.request)
    cpus = row.cpus if row.idle_cpus is None else row.idle_cpus
    return (
        row.stand == "held"
        and NOT_RESPONDING not in row.state
        and not row.state.startswith(_BUSY)
        and (not row.state.startswith("reserved") or "--reservation" in options.words)
        and gres_count(row.gres, kind) - gres_count(row.used, kind) >= gres_count(asked)
        and (not row.cpus or cpus >= max(1, options.cpus))
    )


def lendable_node(options: SlurmOptions, folder: Path, row: NodeRow, up: LentNode | None) -> LentNode:
    """The node as its host reports it, or as Slurm would lend it; with the same address in both cases."""
    address = (row.address or row.name, host_port(str(folder), row.name))
    # Slurm's name of the type, which is known before the host is up: the type of a node must not change then.
    kind = "cpu" if options.slots else gres_type(row.gres) or "gpu"
    if up is not None:
        return LentNode(replace(up.node, gpu_type=kind), address, up.gpus)
    return LentNode(
        Node(row.name, options.places, kind, row.cpus or math.inf, preemptible=options.preemptible), address
    )


def blamed_nodes(options: SlurmOptions, states: Mapping[str, NodeRow], row: PilotRow) -> list[str]:
    """The nodes that keep a batch job waiting; none where it would wait on other nodes, too."""
    if row.reason.startswith(_OF_THE_USER):
        return []
    names = [name for name in nodes_of_request(row) if name in states]
    # If each of them could be lent, their states do not show why they are not.
    blamed = [name for name in names if not could_lend(options, states[name])]
    return names if not blamed and row.reason.startswith(_OF_THE_NODES) else blamed


class SpareNodes:
    """Nodes of running batch jobs that no job needs while other nodes of the same batch job are needed.

    The first node of a batch job runs its script, and stays as long as any other does.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}
        # Batch jobs of which Slurm did not take nodes back, and when to ask again.
        self._kept_until: dict[str, float] = {}

    def due(self, row: PilotRow, needed: Collection[str], now: float, linger_seconds: float) -> set[str]:
        """The nodes of a batch job that have been spare for that time and go back; notes the other spare nodes."""
        is_used = any(name in needed for name in row.nodes)
        spare = {name for name in row.nodes[1:] if name not in needed} if is_used else set()
        since = {name: self._since.get((row.id, name), now) for name in spare}
        for name in row.nodes:
            self._since.pop((row.id, name), None)
        self._since.update({(row.id, name): at for name, at in since.items()})
        may = now >= self._kept_until.get(row.id, now)
        return {name for name, at in since.items() if may and now - at >= linger_seconds}

    def note_kept(self, pilot: str, now: float) -> float:
        """Note that Slurm did not take nodes back; the seconds until it is asked again."""
        self._kept_until[pilot] = now + _KEPT_SECONDS
        return _KEPT_SECONDS

    def note_returned(self, pilot: str) -> None:
        """Note that Slurm has taken nodes back."""
        self._kept_until.pop(pilot, None)

    def forget_others(self, there: Mapping[str, PilotRow]) -> None:
        """Forget all batch jobs but these, which run."""
        self._kept_until = {pilot: at for pilot, at in self._kept_until.items() if pilot in there}
        self._since = {
            (pilot, name): at
            for (pilot, name), at in self._since.items()
            if pilot in there and name in there[pilot].nodes
        }

    def stuck(self) -> set[str]:
        """The batch jobs with spare nodes that Slurm did not take back."""
        return {pilot for pilot, _ in self._since if pilot in self._kept_until}
