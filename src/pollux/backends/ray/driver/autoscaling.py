"""How many nodes Ray's autoscaler is asked for, and which nodes it may end again: Ray ends none that has an actor."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pollux.backends.ray.driver.connection import RayConnection
from pollux.backends.ray.driver.host_actors import HostActors
from pollux.backends.ray.driver_order import DriverOrder
from pollux.backends.ray.nodes import RayNode

__all__ = ["Autoscaling"]

# A node that is not needed is given up after this time.
_SPARE_SECONDS = 15.0


class Autoscaling:
    """The wish for nodes, and the nodes beyond it. `claimed_nodes` gives the names of those with claims.

    `look` is called once a node was given up, before its host is ended.
    """

    def __init__(
        self,
        connection: RayConnection,
        order: DriverOrder,
        hosts: HostActors,
        claimed_nodes: Callable[[], Collection[str]],
        look: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._connection, self._slots, self._hosts, self._clock = connection, order.slots, hosts, clock
        self._claimed_nodes, self._look = claimed_nodes, look
        self._desired, self._awaited, self._size = order.desired, order.awaited, order.size
        self._asked_for: list[dict[str, int]] | None = None
        self._largest = 1
        # Nodes beyond those that were wished for, and since when; those that were given up, so that Ray may end them.
        self._spare_since: dict[str, float] = {}
        self._given_up: set[str] = set()

    def desire(self, num_nodes: int, awaited: bool, size: int) -> None:
        """Wish for this number of nodes, each with `size` places."""
        self._desired, self._awaited, self._size = num_nodes, awaited, size
        self._spare_since = {}
        self.ask_autoscaler()

    def withdraw(self) -> None:
        """The service ends with nothing running: no nodes are wished for."""
        if self._desired is not None:
            self._desired = 0
            self.ask_autoscaler()

    def ask_autoscaler(self) -> None:
        """Tell the autoscaler how many nodes are desired, of the size of the largest; only where that has changed.

        Ray keeps a wish when the process that made it has ended; 0 nodes take it back.
        """
        if self._desired is None:
            return
        self._largest = max(self._largest, *(node.places for node in self._hosts.nodes()), 1)
        bundle = {"CPU": self._slots} if self._slots is not None else {"GPU": self._size or self._largest}
        wished = [bundle] * self._desired
        if wished != self._asked_for:
            self._asked_for = wished
            importlib.import_module("ray.autoscaler.sdk").request_resources(bundles=wished)

    def needed(self, every: Mapping[str, RayNode]) -> dict[str, RayNode]:
        """The nodes that are used: all, or as many as are wished for and all with claims, from the autoscaler.

        The host of any other node is ended once it has no work; a node that is needed again gets a new host. While a
        job waits, all nodes are needed: which of them suits the job is not known here.
        """
        if self._desired is None or self._awaited:
            self._spare_since, self._given_up = {}, set()
            return dict(every)
        now, spare = self._clock(), self._spare(every.values(), self._desired)
        self._spare_since = {ray_id: self._spare_since.get(ray_id, now) for ray_id in spare}
        self._given_up &= spare
        for ray_id, since in self._spare_since.items():
            if now - since >= _SPARE_SECONDS and ray_id not in self._given_up:
                self._give_up(ray_id, now)
        return {ray_id: node for ray_id, node in every.items() if ray_id not in self._given_up}

    def _spare(self, nodes: Collection[RayNode], desired: int) -> set[str]:
        """Nodes beyond those desired and without claims: of the others the small ones, and those that are not up."""
        claimed = set(self._claimed_nodes())
        ranked = sorted(
            nodes,
            key=lambda node: (node.name not in claimed, not self._hosts.is_up(node.ray_id), -node.places, node.name),
        )
        return {node.ray_id for node in ranked[desired:] if node.name not in claimed}

    def _give_up(self, ray_id: str, now: float) -> None:
        """Leave a node to Ray: at once where it has no actor, else when its host says that it has no work."""
        if self._hosts.actor_of(ray_id) is None:
            self._given_up.add(ray_id)
        elif self._hosts.is_up(ray_id):
            self._spare_since[ray_id] = now
            self._hosts.ask_report(ray_id, self._end_if_idle)

    def _end_if_idle(self, said: Mapping[str, Any] | None, error: Exception | None, ray_id: str, actor: Any) -> None:
        """End the host of a node that is still not needed, and has no work; the node is left out."""
        node = next((node for node in self._hosts.nodes() if node.ray_id == ray_id), None)
        if node is None or said is None or said["works"] or self._hosts.actor_of(ray_id) is not actor:
            return
        # A claim, or a wish, may have come meanwhile.
        if ray_id in self._spare_since and node.name not in self._claimed_nodes():
            self._given_up.add(ray_id)
            # Nothing may be started there any more by then.
            self._look()
            self._connection.ray.kill(actor)
