"""The process that speaks to Ray for the service, which must not end when Ray ends its drivers.

Orders come as JSON lines on its input, what happens goes out as JSON lines; it ends with its input. It keeps an actor
on every node, and a placement group for every claim; who claims what is decided on the other side (`provider`).
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pollux.backends.ray.node_actor import NodeHost, found_gpus, secret_digest
from pollux.backends.ray.nodes import RayNode, lending_nodes
from pollux.core.errors import BackendFailed

__all__ = ["Driver", "main"]

_LOOK_SECONDS = 1.0
_POLL_SECONDS = 0.03
_PATIENCE_SECONDS = 5.0
_AGAIN_SECONDS = 15.0
_ODD_SECONDS = 2.0
# A node that nobody needs is given up after so long: Ray ends none that has an actor.
_SPARE_SECONDS = 15.0
# Longer than an actor waits for its host.
_REPORT_SECONDS = 150.0
# So many groups are asked for one by one: that of all has every group that Ray ever had.
_SINGLY = 4
_CONNECT_CODE = 3
_LONGEST = 600
_OURS = f"{BackendFailed.__module__}.{BackendFailed.__qualname__}: "
_REACH_SECONDS = 10.0
# Less than the other side waits for the end.
_PART_SECONDS = 2.0
_LAST_SECONDS = 4.0


@dataclass(slots=True)
class _Seat:
    """A node that Ray has, its actor, and when to try for another one (None: there is one, or it is on its way).

    `asked_at`: since when its actor has been on its way, None once it is there.
    """

    node: RayNode
    actor: Any = None
    again_at: float | None = 0.0
    asked_at: float | None = None


@dataclass(slots=True)
class _Group:
    """The placement group of a claim. `waits_since` is None once it was granted, or was said to wait."""

    group: Any
    waits_since: float | None
    granted: bool = False


class Driver:
    """One connection to Ray, worked through by one thread; what Ray's own threads have to say comes as events.

    `order` is the first line of the input: `service` and `secret`, `slots` (CPU slots of each node instead of its GPUs,
    or None), `with_gpus` (whether what Ray calls GPUs are any), `warm` (whether hosts import everything beforehand),
    `claims` (node by name of the placement group) and `desired` (nodes to wish for from the autoscaler, or None).
    """

    def __init__(self, ray: Any, order: Mapping[str, Any], tell: Callable[..., None]) -> None:
        self._ray, self._tell = ray, tell
        self._secret, self._slots, self._with_gpus = order["secret"], order["slots"], order["with_gpus"]
        self._prefix, self._warm = order["prefix"], order["warm"]
        self._claims: dict[str, str] = dict(order["claims"])
        self._desired: int | None = order["desired"]
        self._awaited, self._size = bool(order.get("awaited")), int(order.get("size") or 0)
        self._wished: list[dict[str, int]] | None = None
        self._largest = 1
        self._failed_at: dict[str, float] = {}
        self._groups: dict[str, _Group] = {}
        self._seats: dict[str, _Seat] = {}
        # Nodes whose host was started with other options and works: when to ask whether it still does.
        self._odd: dict[str, float] = {}
        # Nodes beyond those that were wished for, and since when; those that were given up, so that Ray may end them.
        self._spare_since: dict[str, float] = {}
        self._given_up: set[str] = set()
        self._by_name: dict[str, RayNode] = {}
        self._told: tuple[list[dict[str, Any]], dict[str, str]] | None = None
        self.events: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        # Which GPU it is matters only where there are any, and costs a process on its node to find out.
        self._probes = self._with_gpus and self._slots is None
        self._strategies = importlib.import_module("ray.util.scheduling_strategies")
        self._groups_of_ray = importlib.import_module("ray.util.placement_group")

    def run(self) -> None:
        """Work until the process ends."""
        self._look()
        self._recover()
        next_look = time.monotonic() + _LOOK_SECONDS
        while True:
            until = next_look if self._probes or not self._pending() else time.monotonic() + _POLL_SECONDS
            try:
                handle, given = self.events.get(timeout=max(0.0, min(until, next_look) - time.monotonic()))
                handle(*given)
            except queue.Empty:
                self._see_groups(self._pending())
            if time.monotonic() >= next_look:
                self.look_around()
                next_look = time.monotonic() + _LOOK_SECONDS

    def look_around(self) -> None:
        """All that is done once a second: see nodes, and what became of claims."""
        self._look()
        self._take_again()
        self._see_groups([name for name, known in self._groups.items() if not known.granted])

    def _pending(self) -> list[str]:
        return [name for name, known in self._groups.items() if known.waits_since is not None]

    def obey(self, order: Mapping[str, Any]) -> None:
        """One line of the input."""
        if order["do"] == "take":
            for name, node_id in order["claims"].items():
                self._claims[name] = node_id
                self._take(name)
        elif order["do"] == "free":
            for name in order["names"]:
                self._claims.pop(name, None)
                self._failed_at.pop(name, None)
                self._free(name)
        elif order["do"] == "wait anew":
            for name in order["names"]:
                if name in self._groups:
                    self._groups[name].waits_since = time.monotonic()
        elif order["do"] == "desire":
            self._desired, self._awaited = int(order["nodes"]), bool(order.get("awaited"))
            self._size = int(order.get("size") or 0)
            self._spare_since = {}
            self._wish()
        elif order["do"] == "part":
            self._part()

    # Nodes and their actors

    def _look(self) -> None:
        """See which nodes there are; say so where that changed, and in any case that all is well."""
        now = time.monotonic()
        every = {node.ray_id: node for node in lending_nodes(self._ray.nodes(), self._slots, self._with_gpus)}
        seen = self._needed(every, now)
        for ray_id in [*self._seats]:
            if ray_id not in seen:
                del self._seats[ray_id]
                self._odd.pop(ray_id, None)
        for ray_id, node in seen.items():
            seat = self._seats.setdefault(ray_id, _Seat(node))
            seat.node = node
            if seat.again_at is not None and now >= seat.again_at:
                self._sit(seat)
            elif seat.asked_at is not None and now - seat.asked_at > _REPORT_SECONDS:
                self._ray.kill(seat.actor)
                why = f"its actor was not up after {_REPORT_SECONDS:g} s; see 'ray list actors' and Ray's logs there"
                self._unseat(seat, f"node '{node.name}' cannot be used: {why}")
            elif self._odd.get(ray_id, now) < now:
                self._odd[ray_id] = now + _ODD_SECONDS
                self._then(seat.actor.report.remote(), self._asked_odd, ray_id, seat.actor)
        self._by_name = {node.name: node for node in seen.values()}
        described, leaving = [node.described() for node in seen.values()], self._drained(seen)
        if (described, leaving) == self._told:
            self._tell("well")
        else:
            self._told = described, leaving
            self._tell("nodes", nodes=described, leaving=leaving)
        self._wish()

    def _drained(self, seen: Mapping[str, RayNode]) -> dict[str, str]:
        """Nodes that Ray drains, by name, with why. Its interface for that is not public: without it none is known."""
        try:
            ends: Mapping[str, int] = self._ray._private.state.state.get_draining_nodes()
        except AttributeError:
            return {}
        return {
            seen[ray_id].name: f"Ray drains it{_at(milliseconds)}"
            for ray_id, milliseconds in sorted(ends.items())
            if ray_id in seen
        }

    def _needed(self, every: Mapping[str, RayNode], now: float) -> dict[str, RayNode]:
        """The nodes that are used: all, or as many as are wished for and all with claims, from the autoscaler.

        Of the others the host is ended once it has no work; who is needed again gets another. While somebody waits, all
        are needed: which of them suits is not known here.
        """
        if self._desired is None or self._awaited:
            self._spare_since, self._given_up = {}, set()
            return dict(every)
        claimed = set(self._claims.values())
        ranked = sorted(
            every.values(),
            key=lambda node: (node.name not in claimed, not self._is_up(node.ray_id), -node.places, node.name),
        )
        spare = {node.ray_id for node in ranked[self._desired :] if node.name not in claimed}
        self._spare_since = {ray_id: self._spare_since.get(ray_id, now) for ray_id in spare}
        self._given_up &= spare
        for ray_id, since in self._spare_since.items():
            seat = self._seats.get(ray_id)
            if now - since < _SPARE_SECONDS or ray_id in self._given_up:
                continue
            if seat is None or seat.actor is None:
                self._given_up.add(ray_id)
            elif seat.asked_at is None:
                self._spare_since[ray_id] = now
                self._then(seat.actor.report.remote(), self._asked_spare, ray_id, seat.actor)
        return {ray_id: node for ray_id, node in every.items() if ray_id not in self._given_up}

    def _is_up(self, ray_id: str) -> bool:
        seat = self._seats.get(ray_id)
        return seat is not None and seat.actor is not None and seat.asked_at is None

    def _asked_spare(self, said: dict[str, Any] | None, error: Exception | None, ray_id: str, actor: Any) -> None:
        """End the host of a node that is still not needed, and has no work; the node is left out."""
        seat = self._seats.get(ray_id)
        # A claim may have come meanwhile.
        needed = seat is None or ray_id not in self._spare_since or seat.node.name in self._claims.values()
        works = said is None or said.get("works", True)
        if not works and not needed and self._seats[ray_id].actor is actor:
            self._given_up.add(ray_id)
            # Nothing may be started there any more by then.
            self._look()
            self._ray.kill(actor)

    def _sit(self, seat: _Seat) -> None:
        """Find the actor of a node, or start one; then wait for what its host says of itself."""
        seat.again_at, seat.asked_at = None, time.monotonic()
        node = seat.node
        pinned = self._strategies.NodeAffinitySchedulingStrategy(node.ray_id, soft=False)
        actor_class = self._ray.remote(NodeHost).options(
            name=f"host-{node.ray_id}",
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=1000,
            scheduling_strategy=pinned,
        )
        seat.actor = actor_class.remote(
            node.name, listen=node.address, secret=self._secret, prefix=self._prefix, **self._options(node)
        )
        self._then(seat.actor.report.remote(), self._seated, node.ray_id, seat.actor)

    def _options(self, node: RayNode) -> dict[str, Any]:
        """What a host is started with, and must have been started with to be used."""
        with_gpus = self._with_gpus and self._slots is None
        return {"places": node.places, "with_gpus": with_gpus, "warm": self._warm}

    def _seated(self, said: dict[str, Any] | None, error: Exception | None, ray_id: str, actor: Any) -> None:
        seat = self._seats.get(ray_id)
        if seat is None or seat.actor is not actor:
            return
        seat.asked_at = None
        is_odd = said is not None and said.get("options", self._options(seat.node)) != self._options(seat.node)
        if said is None:
            # What failed once is not asked again: the next try has an actor of its own.
            self._ray.kill(actor)
            self._unseat(seat, f"node '{seat.node.name}' cannot be used: {_plain(error)}")
        elif said["secret"] != secret_digest(self._secret):
            self._ray.kill(actor)
            self._unseat(seat, f"node '{seat.node.name}' had a host with an old secret, which was ended", 1.0)
        elif is_odd and not said["works"]:
            self._ray.kill(actor)
            self._unseat(seat, f"node '{seat.node.name}' had a host with other options, which was ended", 1.0)
        else:
            odd = ""
            if is_odd:
                self._odd[ray_id] = time.monotonic() + _ODD_SECONDS
                was = ", ".join(f"{name}={value}" for name, value in said["options"].items())
                odd = (
                    f"node '{seat.node.name}' has a host that was started with other options ({was}) and still runs "
                    "replicas: nothing new is started there, and it is started anew once they have ended"
                )
            self._tell(
                "host", node=seat.node.name, address=[said["address"], said["port"]], gpus=said["gpus"],
                boot=said.get("boot"), odd=odd, doubt=said.get("doubt", ""),
            )  # fmt: skip
            self._then(actor.watch.remote(), self._unseated, ray_id, actor)
            if self._probes:
                # Leaves an idle worker on the node, so that the first claim there does not wait for one.
                pinned = self._strategies.NodeAffinitySchedulingStrategy(ray_id, soft=False)
                self._ray.remote(found_gpus).options(num_cpus=0, scheduling_strategy=pinned).remote()

    def _asked_odd(self, said: dict[str, Any] | None, error: Exception | None, ray_id: str, actor: Any) -> None:
        """End a host of other options once it has no work; whoever waits for its end hears of it."""
        seat = self._seats.get(ray_id)
        if seat is not None and seat.actor is actor and said is not None and not said["works"]:
            self._ray.kill(actor)

    def _unseated(self, code: int | None, error: Exception | None, ray_id: str, actor: Any) -> None:
        seat = self._seats.get(ray_id)
        if seat is None or seat.actor is not actor:
            return
        if error is None and code is None:
            self._then(actor.watch.remote(), self._unseated, ray_id, actor)
            return
        if error is None:
            self._ray.kill(actor)
        self._unseat(seat, f"the host of node '{seat.node.name}' ended ({_plain(error) if error else code})", 1.0)

    def _unseat(self, seat: _Seat, why: str, again_seconds: float = _AGAIN_SECONDS) -> None:
        seat.actor, seat.again_at, seat.asked_at = None, time.monotonic() + again_seconds, None
        self._odd.pop(seat.node.ray_id, None)
        self._tell("gone", node=seat.node.name, why=why)

    # Claims and their placement groups

    def _recover(self) -> None:
        """Bring the placement groups of this service in line with its claims."""
        table = self._ray.util.placement_group_table()
        mine = [row for row in table.values() if row["name"].startswith(self._prefix) and row["state"] != "REMOVED"]
        for row in mine:
            name = row["name"]
            group = self._ray.util.get_placement_group(name)
            if name in self._claims:
                self._follow(name, group)
            else:
                self._ray.util.remove_placement_group(group)
        for name in self._claims:
            if name not in self._groups:
                self._take(name)

    def _take(self, name: str) -> None:
        node = self._by_name.get(self._claims[name])
        if node is None or name in self._groups:
            return
        group = self._groups_of_ray.placement_group(
            [{"CPU": 1} if self._slots is not None else {"GPU": 1}],
            name=name,
            lifetime="detached",
            bundle_label_selector=[{"ray.io/node-id": node.ray_id}],
        )
        self._follow(name, group)

    def _take_again(self) -> None:
        """Claims that have no group: Ray failed to give one, or had not seen their node."""
        late = time.monotonic() - _AGAIN_SECONDS
        for name in self._claims.keys() - self._groups.keys():
            if self._failed_at.get(name, late) <= late:
                self._take(name)

    def _follow(self, name: str, group: Any) -> None:
        """Wait for a group; where it matters, by asking from inside its bundle which GPU is behind it."""
        self._groups[name] = _Group(group, time.monotonic())
        if self._probes:
            inside = self._strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            # The GPU is asked for here and not where the task is declared: so its worker may be used again.
            task = self._ray.remote(found_gpus).options(num_cpus=0, num_gpus=1, scheduling_strategy=inside)
            self._then(task.remote(), self._probed, name, group)

    def _probed(self, gpus: list[str] | None, error: Exception | None, name: str, group: Any) -> None:
        known = self._groups.get(name)
        if known is None or known.group is not group:
            return
        if gpus is None:
            self._free(name)
            # Where it is somebody's already, it is claimed anew after a while.
            self._failed_at[name] = time.monotonic()
            self._tell("failed", claim=name, why=_plain(error))
            return
        known.waits_since, known.granted = None, True
        self._tell("granted", claim=name, gpu=gpus[0] if gpus else None)

    def _free(self, name: str) -> None:
        known = self._groups.pop(name, None)
        if known is not None:
            self._ray.util.remove_placement_group(known.group)

    def _see_groups(self, names: list[str]) -> None:
        """See which of these groups Ray has created, and say which it has had nothing for all too long."""
        late = time.monotonic() - _PATIENCE_SECONDS
        since = {name: self._groups[name].waits_since for name in names}
        is_late = {name: at is not None and at < late for name, at in since.items()}
        asked = [name for name in names if is_late[name] or not self._probes]
        created = self._created(asked)
        for name in asked:
            known = self._groups[name]
            if name in created and not self._probes:
                self._probed([], None, name, known.group)
            elif is_late[name] and name not in created:
                known.waits_since = None
                self._tell("waits", claim=name)

    def _created(self, names: list[str]) -> set[str]:
        """Which of these groups are there. One question, however many they are, unless they are few."""
        table = self._ray.util.placement_group_table
        if len(names) <= _SINGLY:
            return {name for name in names if table(self._groups[name].group).get("state") == "CREATED"}
        return {row["name"] for row in table().values() if row["state"] == "CREATED"} & set(names)

    # The end, and the autoscaler

    def _wish(self) -> None:
        """Have the autoscaler know how many nodes are desired, of the size of the largest; once for each such wish.

        Ray keeps a wish when whoever had it is gone; 0 takes it back.
        """
        if self._desired is None:
            return
        self._largest = max(self._largest, *(seat.node.places for seat in self._seats.values()), 1)
        bundle = {"CPU": self._slots} if self._slots is not None else {"GPU": self._size or self._largest}
        wished = [bundle] * self._desired
        if wished != self._wished:
            self._wished = wished
            importlib.import_module("ray.autoscaler.sdk").request_resources(bundles=wished)

    def _part(self) -> None:
        """The service ends with nothing running: no nodes are wished for, and hosts need not wait long."""
        if self._desired is not None:
            self._desired = 0
            self._wish()
        told = [seat.actor.part.remote() for seat in self._seats.values() if seat.actor is not None]
        if told:
            self._ray.wait(told, num_returns=len(told), timeout=_PART_SECONDS)

    def _then(self, ref: Any, handle: Callable[..., None], *given: Any) -> None:
        """Have the result of a call, or its error, handled by this thread once it is there."""

        def done(future: Any) -> None:
            error = future.exception()
            self.events.put((handle, (None if error else future.result(), error, *given)))

        ref.future().add_done_callback(done)


def _at(milliseconds: int) -> str:
    """When it ends it, by its clock; 0 for no such time."""
    return time.strftime(", and ends it at %H:%M:%S", time.localtime(milliseconds / 1000.0)) if milliseconds else ""


def _plain(error: Exception | None) -> str:
    """The last line that says something, of what may be many; what is ours needs no class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = (lines[-1].removeprefix(_OURS) if lines else type(error).__name__)[:_LONGEST]
    # An actor of ours that is not made as we make it.
    older = "unexpected keyword argument" in said or "No module named 'pollux" in said
    return f"{said}; install the same version of pollux-scheduler on every node" if older else said


def _unreachable(error: Exception) -> str:
    """Why Ray cannot be reached. That versions differ is said over several lines, and needs all of them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if type(error).__name__ == "AuthenticationError":
        # Its first sentence says what is wrong; what to do is said here for all cases alike.
        return _plain(error).partition(". ")[0]
    if not any("mismatch" in line.lower() for line in lines):
        return _plain(error)
    return "; ".join(lines)[:_LONGEST] + "; install the same Ray and the same Python on every node"


def main() -> None:
    """Connect, and work until the input ends."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What Ray prints must not get between the lines.
    os.dup2(2, 1)
    lock = threading.Lock()

    def tell(kind: str, **more: Any) -> None:
        with lock:
            output.write(json.dumps({"kind": kind, **more}) + "\n")
            output.flush()

    order = json.loads(sys.stdin.readline())
    ray: Any = importlib.import_module("ray")
    try:
        _reach(order["address"])
        ray.init(
            address=order["address"], namespace=order["namespace"], log_to_driver=False, logging_level="ERROR",
            configure_logging=False,
        )  # fmt: skip
    except Exception as error:
        tell("unreachable", why=_unreachable(error))
        sys.exit(_CONNECT_CODE)
    tell("connected", version=str(ray.__version__))
    driver = Driver(ray, order, tell)
    threading.Thread(target=_listen, args=(driver,), daemon=True).start()
    driver.run()


def _reach(address: str) -> None:
    """Fail at once where nobody listens; Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if host:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS):
            pass


def _listen(driver: Driver) -> None:
    for line in sys.stdin:
        driver.events.put((driver.obey, (json.loads(line),)))
    # The service is gone: what it has ordered is done, but no more; Ray's own end may take its time.
    driver.events.put((os._exit, (0,)))
    time.sleep(_LAST_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    main()
