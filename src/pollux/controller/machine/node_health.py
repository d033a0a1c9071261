"""What the end of a generation says of its node, and what policies are shown of nodes that are set aside; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pollux.controller.machine.retries import ran_well
from pollux.controller.messages.events import GenerationEnded
from pollux.controller.state.node_trust import NodeTrust, script_of
from pollux.controller.state.records import JobRecord
from pollux.core import Cluster, Snapshot

__all__ = ["note_end", "without_set_aside"]

# Running out of memory is the job's fault, and a stop is no failure.
_AGAINST_A_NODE = ("crashed", "lost", "refused")


def note_end(trust: NodeTrust, record: JobRecord, event: GenerationEnded) -> None:
    """Count the end of a job's present generation for or against its node; call it before the record changes."""
    nodes = [node_id for node_id, _ in record.placement.shares]
    if event.generation != record.generation or len(nodes) != 1:
        return
    if event.outcome == "succeeded" or (event.outcome != "refused" and ran_well(record, event)):
        trust.note_good(nodes[0], script_of(record))
    elif event.outcome in _AGAINST_A_NODE:
        trust.note_failure(nodes[0], script_of(record))


def without_set_aside(snapshot: Snapshot, set_aside: Mapping[str, str]) -> Snapshot:
    """The snapshot in which nodes that are set aside keep what runs there, and take nothing new."""
    if not any(node_id in snapshot.cluster.by_id for node_id in set_aside):
        return snapshot
    nodes = (
        replace(node, schedulable=False) if node.id in set_aside and node.schedulable else node
        for node in snapshot.cluster.nodes
    )
    return replace(snapshot, cluster=Cluster.of(nodes))
