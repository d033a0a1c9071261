"""The known nodes of a Ray cluster: Ray's description of each, the report of its host, and what prevents its use.

Pure: nothing here calls Ray, and times are passed in.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from pollux.backends.nodes.provider import LentNode
from pollux.backends.ray.driver_messages import HostMessage, HostReport
from pollux.backends.ray.nodes import RayNode, described, node_from
from pollux.core import Node
from pollux.wire.live.codec import from_plain

__all__ = ["NEW_HEAD", "KnownNode", "NodeProblem", "RayNodeBook"]

_log = logging.getLogger("pollux.backends")

NEW_HEAD = (
    "Ray's head was restarted and has none of its earlier nodes: jobs that ran there go on from their "
    "checkpoints once Ray is started on its nodes again ('ray start --address=HEAD:PORT')"
)

NodeProblem = Literal["no host", "other options", "doubt", "failure"]
"""A problem of a node. `no host`: it has none. `other options`: its host was started with other options, so that jobs
there go on, and no new ones start. `doubt`: its GPUs are in doubt. `failure`: Ray failed to give a place there."""


@dataclass(slots=True)
class KnownNode:
    """A node of the Ray cluster. `report`: None while its host is not up.

    `problems`: a sentence for people for each. `blocked_until`: no job is placed there until then (monotonic seconds);
    None where the node is not blocked. `limit`: how many places we can have while other Ray jobs hold some; None for
    all.
    """

    node: Node
    report: HostReport | None = None
    problems: dict[NodeProblem, str] = field(default_factory=dict)
    blocked_until: float | None = None
    limit: int | None = None

    def offered(self, num_granted: int) -> LentNode | None:
        """The node with the places that jobs can have, at least the granted ones; None while its host is not up."""
        if self.report is None:
            return None
        places = self.node.num_gpus if self.limit is None else self.limit
        if self.blocked_until is not None or "other options" in self.problems:
            places = 0
        lent = replace(self.node, num_gpus=max(places, num_granted))
        return LentNode(lent, self.report.address, self.report.gpus)

    def block(self, why: str, until: float) -> None:
        """Place no job there until that time."""
        self.note("failure", why)
        self.blocked_until = until

    def unblock(self, now: float) -> bool:
        """End the block if its time is over; whether it ended."""
        if self.blocked_until is None or now < self.blocked_until:
            return False
        self.problems.pop("failure", None)
        self.blocked_until = None
        return True

    def note(self, problem: NodeProblem, why: str) -> None:
        """Keep a problem, and log it if it is new; an empty text removes it."""
        if not why:
            self.problems.pop(problem, None)
        elif self.problems.get(problem) != why:
            self.problems[problem] = why
            _log.warning("%s", why)


class RayNodeBook:
    """Every node of the cluster by its name.

    `leaving`: nodes that Ray takes back, each with the reason. `is_first_look`: a new driver has not reported its nodes
    yet. `has_new_head`: a driver's first report had none of the earlier nodes.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, KnownNode] = {}
        self.leaving: dict[str, str] = {}
        self.is_first_look = False
        self.has_new_head = False

    def __iter__(self) -> Iterator[KnownNode]:
        return iter([self._nodes[name] for name in sorted(self._nodes)])

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def get(self, name: str) -> KnownNode | None:
        """The node of that name; None where there is none."""
        return self._nodes.get(name)

    @property
    def is_empty(self) -> bool:
        """Whether the driver has reported that there is no node."""
        return not self._nodes and not self.is_first_look

    def restore(self, rows: Iterable[Mapping[str, Any]], used: Collection[str]) -> None:
        """Treat recorded nodes with claimed places as present until Ray reports otherwise.

        Jobs run on while Ray does not answer, perhaps for long; if their nodes counted as gone, they would be ended.
        """
        for row in rows:
            with contextlib.suppress(KeyError, IndexError, TypeError, ValueError):
                node = node_from(row["described"])
                report = from_plain(HostReport, {"address": row["address"], "gpus": row["gpus"]})
                if node.id in used:
                    self._nodes[node.id] = KnownNode(node, report)

    def record(self) -> list[dict[str, Any]]:
        """The nodes whose host is up, in the form that `restore` reads."""
        return [
            {"described": described(known.node), "address": list(known.report.address), "gpus": list(known.report.gpus)}
            for known in self
            if known.report is not None
        ]

    def replace_all(self, nodes: Collection[RayNode], leaving: Mapping[str, str]) -> None:
        """Replace the nodes by these, which are all that Ray has now."""
        # Only a new head has lost all nodes at once: others are reported one by one.
        if self.is_first_look and self._nodes and not nodes:
            self.has_new_head = True
            _log.warning("%s", NEW_HEAD)
        self.has_new_head, self.is_first_look = self.has_new_head and not nodes, False
        before, self._nodes = self._nodes, {}
        for each in nodes:
            known = self._nodes[each.name] = before.get(each.name) or KnownNode(each.node)
            known.node = each.node
        self.leaving = dict(leaving)

    def note_host(self, host: HostMessage) -> None:
        """Note that a node's host is up."""
        if (known := self.get(host.node)) is not None:
            known.report = host.report
            known.note("no host", "")
            known.note("other options", host.odd)
            known.note("doubt", f"node '{host.node}': {host.doubt}" if host.doubt else "")

    def note_host_gone(self, name: str, why: str) -> None:
        """Note that a node's host has ended, or could not be started."""
        if (known := self.get(name)) is not None:
            known.report = None
            known.note("other options", "")
            known.note("doubt", "")
            known.note("no host", why)

    def unblock(self, now: float) -> bool:
        """End every block whose time is over; whether one ended."""
        unblocked = [known.unblock(now) for known in self._nodes.values()]
        return any(unblocked)

    def largest(self) -> int:
        """The places of the largest node whose host is up; 0 where there is none."""
        return max((known.node.num_gpus for known in self._nodes.values() if known.report is not None), default=0)

    def limited(self) -> set[str]:
        """The nodes of which other Ray jobs hold a part."""
        return {name for name, known in self._nodes.items() if known.limit is not None}

    def warnings(self) -> list[str]:
        """One sentence for each node that is being left, and for each problem of a node."""
        left = [f"node '{name}' is being left: {why}" for name, why in sorted(self.leaving.items())]
        kinds: tuple[NodeProblem, ...] = get_args(NodeProblem)
        return left + [known.problems[kind] for kind in kinds for known in self if kind in known.problems]
