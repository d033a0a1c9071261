"""Keeps an actor on each node, which runs the node's host: starts it, asks for its report, and restarts it.

It reports a host that has ended as gone: the service takes the node for lost until its next host is up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pollux.backends.ray.driver.connection import RayConnection
from pollux.backends.ray.driver.ray_errors import SAME_VERSION, one_line
from pollux.backends.ray.driver_order import DriverOrder
from pollux.backends.ray.node_actor import NodeHost, found_gpus, secret_digest
from pollux.backends.ray.nodes import RayNode

__all__ = ["HostActors"]

_RETRY_SECONDS = 15.0
# The pause after a host has ended.
_RESTART_SECONDS = 1.0
_CHECK_SECONDS = 2.0
# Longer than an actor waits for the start of its host.
_REPORT_SECONDS = 150.0
_REPORTED = frozenset({"address", "port", "gpus", "doubt", "options", "works", "secret"})


@dataclass(frozen=True, slots=True)
class _Absent:
    """The node has no actor; the next one is started `at` this time."""

    at: float


@dataclass(frozen=True, slots=True)
class _Starting:
    """The actor was asked for its report, and has not answered `since` this time."""

    actor: Any
    since: float


@dataclass(frozen=True, slots=True)
class _Up:
    """The host is up. `check_at`: when to ask a host with other options whether it still has work; None for others."""

    actor: Any
    check_at: float | None = None


@dataclass(slots=True)
class _Seat:
    """A node, and the state of its actor."""

    node: RayNode
    state: _Absent | _Starting | _Up

    @property
    def actor(self) -> Any:
        return None if isinstance(self.state, _Absent) else self.state.actor


class HostActors:
    """Keeps an actor on each of the nodes given to `follow`, and reports each host that comes or goes."""

    def __init__(self, connection: RayConnection, order: DriverOrder, clock: Callable[[], float]) -> None:
        self._connection, self._order, self._clock = connection, order, clock
        self._seats: dict[str, _Seat] = {}

    def follow(self, nodes: Mapping[str, RayNode]) -> None:
        """Keep an actor on each of these nodes, by Ray's id, and forget the actors of all others."""
        now = self._clock()
        for ray_id in self._seats.keys() - nodes.keys():
            del self._seats[ray_id]
        for ray_id, node in nodes.items():
            seat = self._seats.setdefault(ray_id, _Seat(node, _Absent(now)))
            seat.node = node
            self._step(seat, now)

    def _step(self, seat: _Seat, now: float) -> None:
        """Do what is due for one node."""
        match seat.state:
            case _Absent(at) if now >= at:
                self._start(seat, now)
            case _Starting(actor, since) if now - since > _REPORT_SECONDS:
                why = f"its actor was not up after {_REPORT_SECONDS:g} s; see 'ray list actors' and Ray's logs there"
                self._end(seat, actor, f"node '{seat.node.name}' cannot be used: {why}", _RETRY_SECONDS)
            case _Up(actor, check_at) if check_at is not None and now > check_at:
                seat.state = _Up(actor, now + _CHECK_SECONDS)
                self.ask_report(seat.node.ray_id, self._end_if_idle)

    def actor_of(self, ray_id: str) -> Any:
        """The actor of a node; None where it has none."""
        return seat.actor if (seat := self._seats.get(ray_id)) is not None else None

    def is_up(self, ray_id: str) -> bool:
        """Whether the host of a node has reported."""
        return (seat := self._seats.get(ray_id)) is not None and isinstance(seat.state, _Up)

    def nodes(self) -> Iterable[RayNode]:
        """The nodes that are followed."""
        return [seat.node for seat in self._seats.values()]

    def actors(self) -> list[Any]:
        """All actors."""
        return [seat.actor for seat in self._seats.values() if seat.actor is not None]

    def ask_report(self, ray_id: str, handle: Callable[..., None]) -> None:
        """Have `handle(report, error, ray_id, actor)` called with the actor's report on the host of a node."""
        actor = self.actor_of(ray_id)
        self._connection.then(actor.report.remote(), handle, ray_id, actor)

    def _start(self, seat: _Seat, now: float) -> None:
        """Find the actor of a node, or start one, and ask for its report."""
        node, ray = seat.node, self._connection.ray
        actor_class = ray.remote(NodeHost).options(
            name=f"host-{node.ray_id}",
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=1000,
            scheduling_strategy=self._connection.on_node(node.ray_id),
        )
        secret, prefix = self._order.secret, self._order.prefix
        actor = actor_class.remote(node.name, listen=node.address, secret=secret, prefix=prefix, **self._options(node))
        seat.state = _Starting(actor, now)
        self.ask_report(node.ray_id, self._reported)

    def _options(self, node: RayNode) -> dict[str, Any]:
        """The options of a host; one that was started with others is not used."""
        return {"places": node.places, "with_gpus": self._order.needs_gpu_numbers, "warm": self._order.warm}

    def _seat_of(self, ray_id: str, actor: Any) -> _Seat | None:
        """The seat of a node, if it still has this actor."""
        seat = self._seats.get(ray_id)
        return seat if seat is not None and seat.actor is actor else None

    def _reported(self, said: Mapping[str, Any] | None, error: Exception | None, ray_id: str, actor: Any) -> None:
        seat = self._seat_of(ray_id, actor)
        if seat is None:
            return
        if said is None:
            # An actor that failed is not asked again: the next try makes a new one.
            self._end(seat, actor, f"node '{seat.node.name}' cannot be used: {one_line(error)}", _RETRY_SECONDS)
        elif not said.keys() >= _REPORTED:
            why = f"node '{seat.node.name}' has a host of another version of pollux-scheduler: {SAME_VERSION}"
            self._end(seat, actor, why, _RETRY_SECONDS)
        elif said["secret"] != secret_digest(self._order.secret):
            why = f"node '{seat.node.name}' had a host with an old secret, which was ended"
            self._end(seat, actor, why, _RESTART_SECONDS)
        elif said["options"] != self._options(seat.node) and not said["works"]:
            why = f"node '{seat.node.name}' had a host with other options, which was ended"
            self._end(seat, actor, why, _RESTART_SECONDS)
        else:
            self._use(seat, actor, said)

    def _use(self, seat: _Seat, actor: Any, said: Mapping[str, Any]) -> None:
        """Report that the host is up, and wait for its end."""
        node, options = seat.node, said["options"]
        odd = ""
        seat.state = _Up(actor)
        if options != self._options(node):
            seat.state = _Up(actor, self._clock() + _CHECK_SECONDS)
            was = ", ".join(f"{name}={value}" for name, value in options.items())
            odd = (
                f"node '{node.name}' has a host that was started with other options ({was}) and still runs "
                "replicas: nothing new is started there, and the host is restarted once they have ended"
            )
        address = [said["address"], said["port"]]
        self._connection.tell("host", node=node.name, address=address, gpus=said["gpus"], odd=odd, doubt=said["doubt"])
        self._watch(node.ray_id, actor)
        if self._order.needs_gpu_numbers:
            # This leaves an idle worker on the node, so that the first claim there does not wait for one.
            strategy = self._connection.on_node(node.ray_id)
            self._connection.ray.remote(found_gpus).options(num_cpus=0, scheduling_strategy=strategy).remote()

    def _watch(self, ray_id: str, actor: Any) -> None:
        self._connection.then(actor.watch.remote(), self._host_ended, ray_id, actor)

    def _end_if_idle(self, said: Mapping[str, Any] | None, error: Exception | None, ray_id: str, actor: Any) -> None:
        """End a host with other options once it has no work; `_host_ended` is then called."""
        if self._seat_of(ray_id, actor) is not None and said is not None and not said["works"]:
            self._connection.ray.kill(actor)

    def _host_ended(self, code: int | None, error: Exception | None, ray_id: str, actor: Any) -> None:
        seat = self._seat_of(ray_id, actor)
        if seat is None:
            return
        if error is None and code is None:
            # The host still runs. `watch` returns after a while even then: the driver that called it may have ended.
            self._watch(ray_id, actor)
            return
        why = f"the host of node '{seat.node.name}' ended ({one_line(error) if error else code})"
        self._end(seat, actor if error is None else None, why, _RESTART_SECONDS)

    def _end(self, seat: _Seat, actor: Any, why: str, pause_seconds: float) -> None:
        """Give up a node's actor, kill it where one is given, and start another one after a pause."""
        if actor is not None:
            self._connection.ray.kill(actor)
        seat.state = _Absent(self._clock() + pause_seconds)
        self._connection.tell("gone", node=seat.node.name, why=why)
