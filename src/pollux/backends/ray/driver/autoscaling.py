"""Asks Ray's autoscaler for nodes, and decides which nodes it may end: Ray ends no node that has an actor."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from pollux.backends.ray.driver.connection import RayConnection
from pollux.backends.ray.driver.host_actors import HostActors
from pollux.backends.ray.driver_messages import DesireNodes, DriverOrder
from pollux.backends.ray.node_actor import ActorReport
from pollux.backends.ray.nodes import RayNode

__all__ = ["Autoscaling"]

# A node that is not needed is left to Ray after this time.
_SPARE_SECONDS = 15.0


class Autoscaling:
    """The number of nodes to ask for, and the nodes beyond it. `claimed_nodes` returns the names of those with claims.

    `look` is called once a node was left to Ray, before its host is ended.
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
        self._desired = order.desired
        self._asked_for: list[dict[str, int]] | None = None
        self._largest = 1
        # Nodes beyond those that were asked for, and since when; those that were left to Ray, which may end them.
        self._spare_since: dict[str, float] = {}
        self._given_up: set[str] = set()

    def desire(self, desired: DesireNodes) -> None:
        """Ask for these nodes."""
        self._desired = desired
        self._spare_since = {}
        self.ask_autoscaler()

    def withdraw(self) -> None:
        """Ask for no nodes: the service ends, and no job runs."""
        if self._desired.num_nodes is not None:
            self._desired = replace(self._desired, num_nodes=0)
            self.ask_autoscaler()

    def ask_autoscaler(self) -> None:
        """Tell the autoscaler how many nodes of which size are desired, if that has changed.

        Ray keeps a request after the process that made it has ended; a request for 0 nodes takes it back.
        """
        if self._desired.num_nodes is None:
            return
        self._largest = max(self._largest, *(node.places for node in self._hosts.nodes()), 1)
        bundle = {"CPU": self._slots} if self._slots is not None else {"GPU": self._desired.size or self._largest}
        wished = [bundle] * self._desired.num_nodes
        if wished != self._asked_for:
            self._asked_for = wished
            importlib.import_module("ray.autoscaler.sdk").request_resources(bundles=wished)

    def needed(self, every: Mapping[str, RayNode]) -> dict[str, RayNode]:
        """The nodes to use: all, or with the autoscaler as many as were asked for, and all with claims.

        The host of any other node is ended once it has no work; a node that is needed again gets a new host. While a
        job waits, all nodes are needed, as the driver does not know which of them suits the job.
        """
        num_nodes = self._desired.num_nodes
        if num_nodes is None or self._desired.awaited:
            self._spare_since, self._given_up = {}, set()
            return dict(every)
        now, spare = self._clock(), self._spare(every.values(), num_nodes)
        self._spare_since = {ray_id: self._spare_since.get(ray_id, now) for ray_id in spare}
        self._given_up &= spare
        for ray_id, since in self._spare_since.items():
            if now - since >= _SPARE_SECONDS and ray_id not in self._given_up:
                self._give_up(ray_id, now)
        return {ray_id: node for ray_id, node in every.items() if ray_id not in self._given_up}

    def _spare(self, nodes: Collection[RayNode], desired: int) -> set[str]:
        """The nodes without claims beyond the desired number: small ones, and those that are not up, come first."""
        claimed = set(self._claimed_nodes())
        ranked = sorted(
            nodes,
            key=lambda node: (node.name not in claimed, not self._hosts.is_up(node.ray_id), -node.places, node.name),
        )
        return {node.ray_id for node in ranked[desired:] if node.name not in claimed}

    def _give_up(self, ray_id: str, now: float) -> None:
        """Leave a node to Ray: at once where it has no actor, else when its host reports that it has no work."""
        if self._hosts.actor_of(ray_id) is None:
            self._given_up.add(ray_id)
        elif self._hosts.is_up(ray_id):
            self._spare_since[ray_id] = now
            self._hosts.ask_report(ray_id, self._end_if_idle)

    def _end_if_idle(self, said: object, error: Exception | None, ray_id: str, actor: Any) -> None:
        """End the host of a node that is still not needed and has no work, and leave the node to Ray."""
        node = next((node for node in self._hosts.nodes() if node.ray_id == ray_id), None)
        report = ActorReport.read(said)
        if node is None or report is None or report.works or self._hosts.actor_of(ray_id) is not actor:
            return
        # The node may have been claimed or asked for meanwhile.
        if ray_id in self._spare_since and node.name not in self._claimed_nodes():
            self._given_up.add(ray_id)
            # The service must not start anything there when the host ends.
            self._look()
            self._connection.ray.kill(actor)
