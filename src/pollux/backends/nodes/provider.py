"""The interface of an engine that lends nodes, and a provider for nodes that nobody else uses.

The shims of jobs start replicas on lent nodes through the node daemons there, not through the engine.
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
    """A node whose daemon is up. `address`: where the daemon listens; `gpus`: the device index behind each slot.

    `gpus` is empty for CPU slots.
    """

    node: Node
    address: tuple[str, int]
    gpus: tuple[int, ...] = ()


class NodeProvider(Protocol):
    """An engine that lends nodes. Providers inherit the methods that have a body here.

    All methods may be called from any thread and return at once: slow work is done in the provider's own thread. A
    place is the number of a slot on its node, from 0.
    """

    def start(self, secret: bytes, head: str, changed: Callable[[], None]) -> None:
        """Find the nodes that were lent before; call `changed` when `hosts`, `held` or `refusal` may differ.

        Node daemons are given the `secret`; nodes reach the service's machine at the address `head`.
        """

    def hosts(self) -> tuple[LentNode, ...]:
        """The nodes for jobs, also those that are being taken back. Cached, since it is called often."""

    def is_up(self, node: str) -> bool:
        """Whether the daemon of a node in `hosts` is up now; False where the engine has to lend the node first."""
        return True

    def leaving(self) -> Mapping[str, str]:
        """Nodes that the engine takes back, each with the reason: no job is placed there, and jobs there save."""
        return {}

    def ask(self, job_id: str, wanted: Mapping[str, int]) -> None:
        """Give the job this many places on each node, counting those it holds; no place is taken away."""

    def claim(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Note that a job found running uses these places; they are its own as if `ask` had given them."""

    def held(self, job_id: str) -> Mapping[str, tuple[int, ...]]:
        """The places that the job holds now, by node."""

    def refusal(self, job_id: str) -> str:
        """Why the job cannot get what was asked for it last, for people; empty while it may still get it."""

    def drop(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Free these places of the job; those that it does not hold are ignored."""

    def check_node(self, node: str) -> None:
        """Look at this node soon: a job has been told that the engine takes the node back."""
        return

    def release_silent(self, silent: Collection[LentNode]) -> None:
        """Give back these nodes where no job works on them: they have long been silent, and all others answer."""
        return

    def desire(self, num_nodes: int, awaited: bool = False) -> None:
        """Note, for engines that scale, how many nodes could be used; `awaited`: a job without GPUs waits for some."""
        return

    def warnings(self) -> tuple[str, ...]:
        """One sentence for each thing that does not work fully now."""
        return ()

    def close(self) -> None:
        """Release threads and files; what was lent stays where a new object can find it."""
        return


class PooledNodeProvider(NodeProvider):
    """Hands out places of nodes that no one else uses, from a table for each node.

    A subclass calls `offer` with all its nodes whenever they may have changed, and extends `start` and `close`.
    """

    def __init__(self) -> None:
        self._books = threading.RLock()
        self._hosts: tuple[LentNode, ...] = ()
        self._sizes: dict[str, int] = {}
        self._tables: dict[str, SlotTable] = {}
        self._held: dict[str, dict[str, tuple[int, ...]]] = {}
        self._wanted: dict[str, dict[str, int]] = {}
        self._changed: Callable[[], None] = lambda: None
        self.secret = b""
        self.head = "127.0.0.1"

    def start(self, secret: bytes, head: str, changed: Callable[[], None]) -> None:
        """Keep what node daemons must know; a subclass then looks for its nodes."""
        self.secret, self.head, self._changed = secret, head, changed

    def offer(self, hosts: Iterable[LentNode]) -> None:
        """Replace the nodes by these. Places on a node that is gone stay noted until their job drops them."""
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

    def ask(self, job_id: str, wanted: Mapping[str, int]) -> None:
        """Give the places as soon as they are free."""
        with self._books:
            if wanted:
                self._wanted[job_id] = dict(wanted)
            else:
                self._wanted.pop(job_id, None)
            changed = self._serve(job_id)
        if changed:
            self._changed()

    def claim(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Note the places as held, also on nodes that have not been offered yet."""
        with self._books:
            held = self._held.setdefault(job_id, {})
            for node, numbers in places.items():
                new = tuple(number for number in numbers if number not in held.get(node, ()))
                self._tables.setdefault(node, SlotTable(0)).mark_held(new)
                held[node] = (*held.get(node, ()), *new)

    def held(self, job_id: str) -> Mapping[str, tuple[int, ...]]:
        """The places that the job was given and has not dropped."""
        with self._books:
            return dict(self._held.get(job_id, {}))

    def refusal(self, job_id: str) -> str:
        """That a node is gone, or is too small."""
        with self._books:
            for node, number in self._wanted.get(job_id, {}).items():
                if node not in self._sizes:
                    return f"node '{node}' is gone"
                if number > self._sizes[node]:
                    return f"node '{node}' has {self._sizes[node]} places, fewer than the {number} asked for"
        return ""

    def drop(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Free the places, and give them to jobs that wait."""
        with self._books:
            held, wanted = self._held.get(job_id, {}), self._wanted.get(job_id, {})
            for node, numbers in places.items():
                mine = {number for number in held.get(node, ()) if number in numbers}
                if mine:
                    self._tables[node].release(mine)
                    held[node] = tuple(number for number in held[node] if number not in mine)
                # The job must not get back at once what it has just dropped.
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

    def nodes_in_use(self) -> set[str]:
        """Nodes on which jobs hold places."""
        with self._books:
            return {node for held in self._held.values() for node, places in held.items() if places}

    def serve_all(self) -> bool:
        """Give every job the wanted places that are free; whether any were given."""
        with self._books:
            served = [self._serve(job_id) for job_id in [*self._wanted]]
            return any(served)

    def _giving(self) -> Container[str]:
        """The nodes whose places can be given now."""
        return self._sizes

    def _serve(self, job_id: str) -> bool:
        """Give a job the wanted places that are free; whether any were given."""
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
