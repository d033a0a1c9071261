"""Applies what happens to nodes: they join, leave, are set aside and taken back; see `node_health` for suspects."""

from __future__ import annotations

from pollux.controller.machine import placing
from pollux.controller.messages.commands import Command
from pollux.controller.messages.events import NodeAdded, NodeRemoved, NodeSetAside, NodeTakenBack
from pollux.controller.state.cluster_state import ClusterState
from pollux.controller.state.records import JobRecord
from pollux.core import Placement, Reason, UnknownName
from pollux.core.errors import Conflict

__all__ = ["NodeEvent", "apply"]

NodeEvent = NodeAdded | NodeRemoved | NodeSetAside | NodeTakenBack
"""Events after which policies have other nodes than before."""


def apply(cluster_state: ClusterState, event: NodeEvent) -> list[Command]:
    """Apply an event about a node, and return the commands for the jobs that ran there. A decision is due after it."""
    match event:
        case NodeAdded():
            cluster_state.add_node(event.node)
        case NodeRemoved():
            return _removed(cluster_state, event)
        case NodeSetAside():
            _check_known(cluster_state, event.node_id)
            cluster_state.trust.put_aside(event.node_id, event.why)
        case NodeTakenBack():
            _taken_back(cluster_state, event.node_id)
    return []


def _removed(cluster_state: ClusterState, event: NodeRemoved) -> list[Command]:
    commands: list[Command] = []
    for record in cluster_state.remove_node(event.node_id):
        before = record.placement
        after = Placement(tuple(share for share in before.shares if share[0] != event.node_id))
        if _goes_on_with(record, after):
            reason = Reason("left-node", placing.gpus_before_and_after(before, after))
            detail = f"node '{event.node_id}' is leaving, or gone"
            commands.append(placing.resize(cluster_state, record, after, reason, detail, event.at))
            continue
        cluster_state.requeue(record, event.at, Reason("node-lost", placing.gpus_before(before)))
        commands += placing.stop(record, before, "node-lost")
    return commands


def _goes_on_with(record: JobRecord, after: Placement) -> bool:
    """Whether the job's replicas on its other nodes, which hold its state, go on without those on the lost node."""
    limits = record.spec.limits
    return record.moves_live and not limits.pinned and after.num_gpus >= limits.min_gpus


def _taken_back(cluster_state: ClusterState, node_id: str) -> None:
    if node_id not in cluster_state.trust.set_aside:
        _check_known(cluster_state, node_id)
        raise Conflict(f"node '{node_id}' is in use; only a node that was set aside can be taken back")
    cluster_state.trust.take_back(node_id)


def _check_known(cluster_state: ClusterState, node_id: str) -> None:
    if node_id not in cluster_state.cluster.by_id:
        raise UnknownName("node", node_id, cluster_state.cluster.by_id)
