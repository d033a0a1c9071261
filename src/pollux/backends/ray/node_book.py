"""What is known of each node of a Ray cluster: Ray's description, the report of its host, and what keeps it from use.

Bookkeeping only: nothing here calls Ray, and times are passed in.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from pollux.backends.nodes.provider import LentNode
from pollux.backends.ray.nodes import node_from
from pollux.core import Node

__all__ = ["NEW_HEAD", "HostReport", "KnownNode", "NodeProblem", "RayNodeBook"]

_log = logging.getLogger("pollux.backends")

NEW_HEAD = (
    "Ray's head was started anew and knows none of the nodes of before: jobs that ran there go on from their "
    "checkpoints once Ray is started on its nodes again ('ray start --address=HEAD:PORT')"
)

NodeProblem = Literal["no host", "other options", "doubt", "failure"]
"""What can be wrong with a node: it has no host; its host was started with other options, so that what runs there may
stay and nothing new comes; its GPUs are in doubt, and are used; Ray failed to give a place there."""


@dataclass(frozen=True, slots=True)
class HostReport:
    """Where a node's host listens, and the GPUs that it was started with."""

    address: tuple[str, int]
    gpus: tuple[int, ...]

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> HostReport:
        """From the driver's message, or from the record on disk."""
        return cls((str(said["address"][0]), int(said["address"][1])), tuple(map(int, said["gpus"])))


@dataclass(slots=True)
class KnownNode:
    """A node that Ray has. `report` is None while its host is not up; `described` is Ray's description, for the record.

    `problems` holds a sentence for people for each. `blocked_until`: nothing new is placed there until then (monotonic
    seconds), None where it is not blocked. `limit`: how many places the node has for us while other Ray jobs hold some;
    None for all.
    """

    node: Node
    described: Mapping[str, Any]
    report: HostReport | None = None
    problems: dict[NodeProblem, str] = field(default_factory=dict)
    blocked_until: float | None = None
    limit: int | None = None

    def offered(self, num_granted: int) -> LentNode | None:
        """The node with the places that jobs may have there, at least those granted; None while its host is not up."""
        if self.report is None:
            return None
        places = self.node.num_gpus if self.limit is None else self.limit
        if self.blocked_until is not None or "other options" in self.problems:
            places = 0
        lent = replace(self.node, num_gpus=max(places, num_granted))
        return LentNode(lent, self.report.address, self.report.gpus)

    def block(self, why: str, until: float) -> None:
        """Place nothing new there for a while."""
        self.note("failure", why)
        self.blocked_until = until

    def unblock(self, now: float) -> bool:
        """End a block whose time has come; whether there was one."""
        if self.blocked_until is None or now < self.blocked_until:
            return False
        self.problems.pop("failure", None)
        self.blocked_until = None
        return True

    def note(self, problem: NodeProblem, why: str) -> None:
        """Keep what is wrong, and log it where that is news; empty for nothing."""
        if not why:
            self.problems.pop(problem, None)
        elif self.problems.get(problem) != why:
            self.problems[problem] = why
            _log.warning("%s", why)


class RayNodeBook:
    """Every node of the cluster by its name.

    `leaving`: nodes that Ray takes back, with why. `is_first_look`: a new driver has yet to say which nodes there are.
    `has_new_head`: at its first look a driver found none of the nodes that were there before.
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
        """The node of that name; None where Ray has none."""
        return self._nodes.get(name)

    @property
    def is_empty(self) -> bool:
        """Whether the driver has looked, and found no node."""
        return not self._nodes and not self.is_first_look

    def restore(self, rows: Iterable[Mapping[str, Any]], used: Collection[str]) -> None:
        """Nodes of the record on which places are claimed count as there until Ray says otherwise.

        Ray may be away for long, and what runs there does not need it; but jobs on nodes that are gone are ended.
        """
        for row in rows:
            with contextlib.suppress(KeyError, IndexError, TypeError, ValueError):
                node, report = node_from(row["described"]), HostReport.read(row)
                if node.id in used:
                    self._nodes[node.id] = KnownNode(node, dict(row["described"]), report)

    def record(self) -> list[dict[str, Any]]:
        """The nodes whose host is up, as `restore` reads them."""
        return [
            {"described": known.described, "address": list(known.report.address), "gpus": list(known.report.gpus)}
            for known in self
            if known.report is not None
        ]

    def replace_all(self, described: Collection[Mapping[str, Any]], leaving: Mapping[str, str]) -> None:
        """These are all nodes that Ray has now."""
        # Nodes that end one by one are told one by one.
        if self.is_first_look and self._nodes and not described:
            self.has_new_head = True
            _log.warning("%s", NEW_HEAD)
        self.has_new_head, self.is_first_look = self.has_new_head and not described, False
        before, self._nodes = self._nodes, {}
        for each in described:
            node = node_from(each)
            known = self._nodes[node.id] = before.get(node.id) or KnownNode(node, each)
            known.node, known.described = node, each
        self.leaving = dict(leaving)

    def note_host(self, said: Mapping[str, Any]) -> None:
        """A node's host is up."""
        name, report = said["node"], HostReport.read(said)
        if (known := self.get(name)) is not None:
            known.report = report
            known.note("no host", "")
            known.note("other options", said["odd"])
            known.note("doubt", f"node '{name}': {said['doubt']}" if said["doubt"] else "")

    def note_host_gone(self, name: str, why: str) -> None:
        """A node's host has ended, or does not come up."""
        if (known := self.get(name)) is not None:
            known.report = None
            known.note("other options", "")
            known.note("doubt", "")
            known.note("no host", why)

    def unblock(self, now: float) -> bool:
        """End every block whose time has come; whether there was one."""
        unblocked = [known.unblock(now) for known in self._nodes.values()]
        return any(unblocked)

    def largest(self) -> int:
        """The places of the largest node whose host is up; 0 where there is none."""
        return max((known.node.num_gpus for known in self._nodes.values() if known.report is not None), default=0)

    def limited(self) -> set[str]:
        """Nodes of which other Ray jobs hold a part."""
        return {name for name, known in self._nodes.items() if known.limit is not None}

    def warnings(self) -> list[str]:
        """Nodes that are being left, and what is wrong with others, a sentence each."""
        left = [f"node '{name}' is being left: {why}" for name, why in sorted(self.leaving.items())]
        kinds: tuple[NodeProblem, ...] = get_args(NodeProblem)
        return left + [known.problems[kind] for kind in kinds for known in self if kind in known.problems]
