"""Engines that lend nodes: what is asked of them, and books for those whose nodes are wholly ours.

What runs on lent nodes is started by jobs' shims through the nodes' hosts (`daemon`), not by the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pollux.backends.nodes.slot_table import SlotTable
from pollux.core import Node

__all__ = ["LentNode", "NodeProvider", "PooledNodeProvider"]


@dataclass(frozen=True, slots=True)
class LentNode:
    """A node whose host is up. `address`: where the host listens; `gpus`: the device index behind each of its places.

    `gpus` is empty where places are CPU slots.
    """

    node: Node
    address: tuple[str, int]
    gpus: tuple[int, ...] = ()


class NodeProvider(Protocol):
    """An engine that lends nodes. All methods may be called from any thread and return at once.

    Whatever takes time is done in the provider's own thread. A place is a number from 0 to the node's GPUs less one.
    """

    def start(self, secret: bytes, head: str, changed: Callable[[], None]) -> None:
        """Begin, and find what was lent before; `changed` is called when `hosts`, `held` or `refusal` may differ.

        `secret` is what hosts are given, `head` the address by which nodes reach the service's machine.
        """

    def hosts(self) -> tuple[LentNode, ...]:
        """Nodes whose host is up, also those that are being left. Cached: asked often."""

    def leaving(self) -> Mapping[str, str]:
        """Those of them that the engine takes back, with why: nothing is placed there, and what runs may save."""

    def ask(self, job_id: str, wanted: Mapping[str, int]) -> None:
        """So many places by node shall be the job's, counting those it holds; never takes one away."""

    def claim(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """These places are in use by a job found running: they are its own from now on, as if `ask` had given them."""

    def held(self, job_id: str) -> Mapping[str, tuple[int, ...]]:
        """The places that the job holds now, by node."""

    def refusal(self, job_id: str) -> str:
        """Why what was asked last for the job cannot be had, for people; empty while it may come."""

    def drop(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """The job needs these no more; those it does not hold do not matter."""

    def check_node(self, node: str) -> None:
        """A job has heard that this node is taken back: look soon."""

    def release_silent(self, silent: Collection[LentNode]) -> None:
        """These have not answered for long, and all others do: what is held there without work may go back."""

    def desire(self, num_nodes: int, awaited: bool = False) -> None:
        """How many nodes would be used, `awaited` by a job that has none; an engine that cannot scale does nothing."""

    def warnings(self) -> tuple[str, ...]:
        """What is degraded now, a sentence each."""

    def close(self) -> None:
        """Let go; what was lent stays where a new object can find it."""


class PooledNodeProvider:
    """Books for an engine whose nodes are wholly ours: places are given from a table for each node.

    A subclass calls `offer` with all its nodes whenever they may have changed, and fills in `start` and `close`.
    """

    def __init__(self) -> None:
        self._books = threading.RLock()
        self._hosts: tuple[LentNode, ...] = ()
        self._sizes: dict[str, int] = {}
        self._tables: dict[str, SlotTable] = {}
        self._held: dict[str, dict[str, tuple[int, ...]]] = {}
        self._wanted: dict[str, dict[str, int]] = {}
        self._changed: Callable[[], None] = _nothing
        self.secret = b""
        self.head = "127.0.0.1"

    def start(self, secret: bytes, head: str, changed: Callable[[], None]) -> None:
        """Keep what hosts are to be told; a subclass then looks for its nodes."""
        self.secret, self.head, self._changed = secret, head, changed

    def offer(self, hosts: Iterable[LentNode]) -> None:
        """These are all nodes now. What a job holds on a node that is gone stays noted until the job drops it."""
        with self._books:
            new = tuple(hosts)
            if new == self._hosts:
                return
            self._hosts = new
            self._sizes = {hosted.node.id: hosted.node.num_gpus for hosted in new}
            for hosted in new:
                table = self._tables.setdefault(hosted.node.id, SlotTable(hosted.node.num_gpus))
                table.count = hosted.node.num_gpus
            self.serve_all()
        self._changed()

    def hosts(self) -> tuple[LentNode, ...]:
        """The nodes that were offered."""
        return self._hosts

    def leaving(self) -> Mapping[str, str]:
        """None: nobody takes them back."""
        return {}

    def ask(self, job_id: str, wanted: Mapping[str, int]) -> None:
        """Give them as soon as they are free."""
        with self._books:
            if wanted:
                self._wanted[job_id] = dict(wanted)
            else:
                self._wanted.pop(job_id, None)
            changed = self._serve(job_id)
        if changed:
            self._changed()

    def claim(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Note what is in use, also on nodes that have not been seen yet."""
        with self._books:
            held = self._held.setdefault(job_id, {})
            for node, numbers in places.items():
                new = tuple(number for number in numbers if number not in held.get(node, ()))
                self._tables.setdefault(node, SlotTable(0)).mark_held(new)
                held[node] = (*held.get(node, ()), *new)

    def held(self, job_id: str) -> Mapping[str, tuple[int, ...]]:
        """As the books say."""
        with self._books:
            return dict(self._held.get(job_id, {}))

    def refusal(self, job_id: str) -> str:
        """A node that is not there, or is too small, cannot give anything."""
        with self._books:
            for node, number in self._wanted.get(job_id, {}).items():
                if node not in self._sizes:
                    return f"node '{node}' is gone"
                if number > self._sizes[node]:
                    return f"node '{node}' has {self._sizes[node]} places, fewer than the {number} asked for"
        return ""

    def drop(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Free them, and give them to whoever waits."""
        with self._books:
            held, wanted = self._held.get(job_id, {}), self._wanted.get(job_id, {})
            for node, numbers in places.items():
                mine = {number for number in held.get(node, ()) if number in numbers}
                if mine:
                    self._tables[node].release(mine)
                    held[node] = tuple(number for number in held[node] if number not in mine)
                # What was dropped must not be given back at once.
                wanted[node] = min(wanted.get(node, 0), len(held.get(node, ())))
                for known in (held, wanted):
                    if not known.get(node):
                        known.pop(node, None)
            if not held:
                self._held.pop(job_id, None)
            if not wanted:
                self._wanted.pop(job_id, None)
            self.serve_all()
        self._changed()

    def check_node(self, node: str) -> None:
        """Nothing: nobody takes them back."""

    def release_silent(self, silent: Collection[LentNode]) -> None:
        """Nothing: there is nobody to give it to."""

    def desire(self, num_nodes: int, awaited: bool = False) -> None:
        """Nothing: this one has the nodes that it has."""

    def warnings(self) -> tuple[str, ...]:
        """None."""
        return ()

    def close(self) -> None:
        """Let go."""

    def nodes_in_use(self) -> set[str]:
        """Nodes of which jobs hold places."""
        with self._books:
            return {node for held in self._held.values() for node, places in held.items() if places}

    def serve_all(self) -> bool:
        """Give every job what is free of what it wants; whether anything was given."""
        with self._books:
            served = [self._serve(job_id) for job_id in [*self._wanted]]
            return any(served)

    def _giving(self) -> Container[str]:
        """The nodes that can give something now."""
        return self._sizes

    def _serve(self, job_id: str) -> bool:
        """Give a job what is free of what it wants."""
        there = self._giving()
        held = self._held.setdefault(job_id, {})
        changed = False
        for node, number in self._wanted.get(job_id, {}).items():
            lacking = number - len(held.get(node, ()))
            taken = self._tables[node].allocate(lacking) if lacking > 0 and node in there else None
            if taken:
                held[node], changed = (*held.get(node, ()), *taken), True
        if not held:
            del self._held[job_id]
        return changed


def _nothing() -> None:
    """Until somebody wants to know."""
