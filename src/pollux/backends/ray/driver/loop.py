"""The driver's one thread: it looks at the cluster every second, and carries out the service's orders.

A lost node is noticed by `find_nodes`: Ray does not list it as alive any more. `fleet/node_watch` then tells the jobs.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from typing import Any

from pollux.backends.ray.driver.autoscaling import Autoscaling
from pollux.backends.ray.driver.connection import RayConnection
from pollux.backends.ray.driver.host_actors import HostActors
from pollux.backends.ray.driver.placement_groups import PlacementGroups
from pollux.backends.ray.driver_messages import (
    DesireNodes,
    DriverMessage,
    DriverOrder,
    DriverRequest,
    FreeClaims,
    NodesMessage,
    ReleaseHosts,
    RetryClaims,
    TakeClaims,
    WellMessage,
)
from pollux.backends.ray.nodes import RayNode, lending_nodes

__all__ = ["Driver"]

_LOOK_SECONDS = 1.0
_POLL_SECONDS = 0.03
# Shorter than the service waits for the driver's end.
_PART_SECONDS = 2.0


class Driver:
    """One connection to Ray in one thread; results from Ray's own threads come as events.

    `tell` sends a message to the service. `clock` (monotonic seconds) can be replaced in tests.
    """

    def __init__(
        self,
        ray: Any,
        order: DriverOrder,
        tell: Callable[[DriverMessage], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._order, self._clock = order, clock
        self._connection = RayConnection(ray, tell)
        self.events = self._connection.events
        self.groups = PlacementGroups(self._connection, order, clock)
        self._hosts = HostActors(self._connection, order, clock)
        self._autoscaling = Autoscaling(
            self._connection, order, self._hosts, lambda: self.groups.claims.values(), self.find_nodes, clock
        )
        self._told: NodesMessage | None = None

    def run(self) -> None:
        """Handle events until the process ends."""
        self.recover()
        next_look = self._clock() + _LOOK_SECONDS
        while True:
            polls = not self._order.needs_gpu_numbers and bool(self.groups.pending())
            until = min(next_look, self._clock() + _POLL_SECONDS) if polls else next_look
            try:
                handle, given = self.events.get(timeout=max(0.0, until - self._clock()))
                handle(*given)
            except queue.Empty:
                self.groups.check(self.groups.pending())
            if self._clock() >= next_look:
                self.look_around()
                next_look = self._clock() + _LOOK_SECONDS

    def recover(self) -> None:
        """Find the nodes, and adopt the placement groups of an earlier driver."""
        self.find_nodes()
        self.groups.recover()

    def look_around(self) -> None:
        """Do what is due once a second: look for nodes, and ask for the state of claims."""
        self.find_nodes()
        self.groups.make_missing()
        self.groups.check(self.groups.not_granted())

    def find_nodes(self) -> None:
        """Find the nodes, and report a change to the service, or that the connection works."""
        rows = self._connection.ray.nodes()
        every = {node.ray_id: node for node in lending_nodes(rows, self._order.slots, self._order.with_gpus)}
        used = self._autoscaling.needed(every)
        self._hosts.follow(used)
        self.groups.nodes = {node.name: node for node in used.values()}
        found = NodesMessage(tuple(used.values()), self._drained(used))
        self._connection.tell(WellMessage() if found == self._told else found)
        self._told = found
        self._autoscaling.ask_autoscaler()

    def _drained(self, used: Mapping[str, RayNode]) -> dict[str, str]:
        """Nodes that Ray drains, by name, with the reason; none where Ray lacks its private interface for that."""
        try:
            ends: Mapping[str, int] = self._connection.ray._private.state.state.get_draining_nodes()
        except AttributeError:
            return {}
        return {
            used[ray_id].name: f"Ray drains it{_end_time(milliseconds)}"
            for ray_id, milliseconds in sorted(ends.items())
            if ray_id in used
        }

    def obey(self, request: DriverRequest) -> None:
        """Carry out one request of the service."""
        match request:
            case TakeClaims(claims):
                self.groups.take(claims)
            case FreeClaims(names):
                self.groups.free(names)
            case RetryClaims(names):
                self.groups.retry(names)
            case DesireNodes():
                self._autoscaling.desire(request)
            case ReleaseHosts():
                self._release()

    def _release(self) -> None:
        """Ask for no nodes, and let hosts end soon: the service ends, and no job runs."""
        self._autoscaling.withdraw()
        told = [actor.release.remote() for actor in self._hosts.actors()]
        if told:
            self._connection.ray.wait(told, num_returns=len(told), timeout=_PART_SECONDS)


def _end_time(milliseconds: int) -> str:
    """The time of day when Ray ends a node, as a part of a sentence; empty for 0."""
    return time.strftime(", and ends it at %H:%M:%S", time.localtime(milliseconds / 1000.0)) if milliseconds else ""
