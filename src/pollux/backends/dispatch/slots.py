"""Where the places of jobs are: on this machine, or on nodes that a lender has; who holds which, and what they need.

Jobs and their processes are not known here.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from pollux.backends.nodes.provider import LentNode, NodeProvider
from pollux.backends.nodes.slot_table import SlotTable
from pollux.backends.process import proc, replica_env
from pollux.backends.process.devices import Devices
from pollux.backends.process.network import is_loopback
from pollux.backends.process.replica_env import node_of
from pollux.backends.protocol import Launch
from pollux.core import Node, Placement
from pollux.wire.live.messages import FleetAccess

__all__ = ["FleetSlotAllocator", "LocalSlotAllocator", "SlotAllocator", "gone_slot"]

_GONE = "gone:"


class SlotAllocator(Protocol):
    """The places that a backend hands out, by names: a number on this machine, `NODE/number` elsewhere."""

    def take(self, job_id: str, placement: Placement, kept: Sequence[str], busy: Sequence[str]) -> tuple[str, ...]:
        """The places of that placement, the job's from now on; empty while there are too few.

        First those of `kept` that it goes on with, in their order, then others, none of which is `busy`.
        """

    def keep(self, job_id: str, places: Iterable[str]) -> None:
        """The job needs these, and no others that it holds."""

    def hold(self, job_id: str, places: Iterable[str]) -> None:
        """These are in use by a job found running."""

    def refused(self, job_id: str, placement: Placement, kept: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """Why what was taken for will not be had, empty where it may come; and names for it, of places that are not."""

    def placement(self, places: Iterable[str]) -> Placement:
        """The places by node, in their order."""

    def details(self, launch: Launch, places: Sequence[str], identity: str) -> dict[str, Any]:
        """What an order holds that depends on the places."""

    def ends_all(self, record: Mapping[str, Any]) -> bool:
        """Whether nothing can run any more of a generation whose shim is gone; what is left is ended."""


class LocalSlotAllocator:
    """This machine; `environ` is what replicas inherit."""

    def __init__(self, devices: Devices, environ: Mapping[str, str]) -> None:
        self._devices = devices
        self._environ = environ
        self._table = SlotTable(devices.node.num_gpus)
        self._held: dict[str, set[str]] = {}

    def take(self, job_id: str, placement: Placement, kept: Sequence[str], busy: Sequence[str]) -> tuple[str, ...]:
        """Neighbours, where there are some."""
        wanted = placement.num_gpus
        staying = tuple(kept)[:wanted]
        # Places of replicas that are gone are its own still: others may be held by nobody else.
        spare = sorted(self._held.get(job_id, set()) - {*kept, *busy}, key=int)[: wanted - len(staying)]
        missing = wanted - len(staying) - len(spare)
        taken = self._table.take(missing) if missing else ()
        if taken is None:
            return ()
        joining = (*spare, *(str(place) for place in taken))
        self._held.setdefault(job_id, set()).update(joining)
        return (*staying, *joining)

    def keep(self, job_id: str, places: Iterable[str]) -> None:
        """Free the others."""
        held, kept = self._held.get(job_id, set()), set(places)
        self._table.release(int(place) for place in held - kept)
        self._held[job_id] = held & kept
        if not self._held[job_id]:
            del self._held[job_id]

    def hold(self, job_id: str, places: Iterable[str]) -> None:
        """Free again once everyone who holds it has let go."""
        held = self._held.setdefault(job_id, set())
        new = set(places) - held
        self._table.hold(int(place) for place in new)
        held |= new

    def refused(self, job_id: str, placement: Placement, kept: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """Never: what is here comes free some time."""
        return "", ()

    def placement(self, places: Iterable[str]) -> Placement:
        """On the one node there is."""
        return Placement.of({self._devices.node.id: len([*places])})

    def details(self, launch: Launch, places: Sequence[str], identity: str) -> dict[str, Any]:
        """The service's own environment, this machine's cores and GPUs."""
        devices = self._devices
        numbers = [int(place) for place in places]
        common = self.common(launch, places, identity)
        gpus = {str(place): devices.gpus[int(place)] for place in places} if devices.gpus else {}
        return {
            "environ": {**self._environ, **common},
            "replicas": replica_env.rank_variables([str(place) for place in places], gpus),
            "cores": tuple(devices.cores_of(place, launch.cpus_per_gpu) for place in numbers),
            "places": tuple(str(place) for place in places),
            "gpus": gpus,
        }

    def common(self, launch: Launch, places: Sequence[str], identity: str) -> dict[str, str]:
        """What all replicas get beside what they inherit."""
        devices = self._devices
        share = min((len(devices.cores_of(int(place))) for place in places), default=1) if devices.is_cpu else None
        return replica_env.common_variables(launch, identity, threads=share)

    def ends_all(self, record: Mapping[str, Any]) -> bool:
        """Looks for its processes, which a start of the machine has ended too."""
        if record.get("boot") != proc.boot_id():
            return True
        replicas = record.get("replicas", [])
        # Numbers are used again: where another process has one now, its session is a stranger's.
        sessions = {int(pid) for pid, start, _ in replicas if proc.start_time(int(pid)) in (None, start)}
        left = proc.members(
            f"TORCHELASTIC_RUN_ID={record.get('run_id')}",
            sessions,
            {pipe for _, _, pipe in replicas if pipe},
        )
        proc.kill_all(left)
        return not left


class FleetSlotAllocator:
    """Nodes that a lender has. `remembered`: those of a time before, which count as there while it looks for them."""

    def __init__(
        self, lender: NodeProvider, secret: bytes, head: str, lease_seconds: float, lost_seconds: float
    ) -> None:
        self._lender = lender
        self.secret = secret
        self.head = head
        self.remembered: dict[str, LentNode] = {}
        self._merged = 0
        self._lease_seconds = lease_seconds
        self.lost_seconds = lost_seconds
        self._asked: dict[str, dict[str, int]] = {}
        self._ends: dict[str, float] = {}
        self._listed: tuple[LentNode, ...] = ()
        self._by_id: dict[str, LentNode] = {}

    @property
    def hosts(self) -> Mapping[str, LentNode]:
        """Nodes whose host is up, by name; the same object as long as nothing changed."""
        listed = self._lender.hosts()
        if listed is not self._listed or len(self.remembered) != self._merged:
            self._listed = listed
            there = {hosted.node.id: hosted for hosted in listed}
            for node in there:
                self.remembered.pop(node, None)
            self._merged = len(self.remembered)
            self._by_id = {**self.remembered, **there}
        return self._by_id

    def nodes(self) -> tuple[Node, ...]:
        """As the lender lists them."""
        return tuple(hosted.node for hosted in self.hosts.values())

    def _of(self, placement: Placement, kept: Sequence[str]) -> dict[str, list[str]]:
        return {node: [place for place in kept if node_of(place) == node][:count] for node, count in placement}

    def take(self, job_id: str, placement: Placement, kept: Sequence[str], busy: Sequence[str]) -> tuple[str, ...]:
        """Ask the lender once, and look whether it has given everything."""
        staying = self._of(placement, kept)
        lacking = {node: count - len(staying[node]) for node, count in placement}
        used = Counter(map(node_of, busy))
        wanted = {node: used[node] + count for node, count in lacking.items() if count > 0}
        if wanted and self._asked.get(job_id) != wanted:
            self._asked[job_id] = wanted
            self._lender.ask(job_id, wanted)
        if not wanted and self._asked.pop(job_id, None) is not None:
            # An order before this one asked for more: others may need it, and here it would lie idle.
            self._lender.ask(job_id, {})
        held = self._lender.held(job_id) if wanted else {}
        free = {
            node: [name for place in held.get(node, ()) if (name := f"{node}/{place}") not in busy] for node in lacking
        }
        if any(len(free[node]) < count for node, count in lacking.items()):
            return ()
        self._asked.pop(job_id, None)
        first = [place for place in kept if any(place in places for places in staying.values())]
        return (*first, *(place for node, count in lacking.items() for place in free[node][:count]))

    def keep(self, job_id: str, places: Iterable[str]) -> None:
        """Drop the others."""
        kept = set(places)
        if self._asked.pop(job_id, None) is not None:
            # What has not come yet must not come to a job that needs it no more.
            self._lender.ask(job_id, {})
        rest = {
            node: tuple(place for place in held if f"{node}/{place}" not in kept)
            for node, held in self._lender.held(job_id).items()
        }
        if any(rest.values()):
            self._lender.drop(job_id, {node: numbers for node, numbers in rest.items() if numbers})

    def hold(self, job_id: str, places: Iterable[str]) -> None:
        """Tell the lender, whose books may be empty after a restart."""
        by_node: dict[str, tuple[int, ...]] = {}
        for place in places:
            node, _, number = place.rpartition("/")
            if number.isdigit() and not node.startswith(_GONE):
                by_node[node] = (*by_node.get(node, ()), int(number))
        if by_node:
            self._lender.claim(job_id, by_node)

    def refused(self, job_id: str, placement: Placement, kept: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """What the lender says, or that a node is gone."""
        if any(node in self.remembered for node, _ in placement):
            return "", ()
        missing = [node for node, _ in placement if node not in self.hosts]
        why = f"node '{missing[0]}' is gone" if missing else self._lender.refusal(job_id)
        if not why:
            return "", ()
        staying = self._of(placement, kept)
        first = [place for place in kept if any(place in places for places in staying.values())]
        others = (
            f"{_GONE}{node}/{number}" for node, count in placement for number in range(count - len(staying[node]))
        )
        return why, (*first, *others)

    def placement(self, places: Iterable[str]) -> Placement:
        """By node, in the order in which they come first."""
        counts: dict[str, int] = {}
        for place in places:
            counts[node_of(place)] = counts.get(node_of(place), 0) + 1
        return Placement.of(counts)

    def details(self, launch: Launch, places: Sequence[str], identity: str) -> dict[str, Any]:
        """The job's own variables: the rest of the environment is the node's."""
        there = [self.hosts[node_of(place)] for place in places if node_of(place) in self.hosts]
        devices = {hosted.node.id: dict(enumerate(hosted.gpus)) for hosted in there}
        # A node may have named fewer devices than places.
        found = {place: devices.get(node_of(place), {}).get(int(place.rpartition("/")[2])) for place in places}
        gpus = {place: device for place, device in found.items() if device is not None}
        nodes = {hosted.node.id: hosted.address for hosted in there}
        loopback = is_loopback(self.head) and all(is_loopback(address) for address, _ in nodes.values())
        threads = None if gpus else min((_share(hosted.node) for hosted in there), default=1)
        fleet = FleetAccess(self.secret.hex(), self.head, nodes, self._lease_seconds, self.lost_seconds)
        return {
            "environ": replica_env.common_variables(launch, identity, self.head, threads, loopback),
            "replicas": replica_env.rank_variables(places, gpus),
            "cores": tuple(() for _ in places),
            "places": tuple(places),
            "gpus": gpus,
            "fleet": fleet,
        }

    def ends_all(self, record: Mapping[str, Any]) -> bool:
        """Hosts end what nobody asks after, once the lease is over."""
        run = str(record.get("run_id"))
        until = self._ends.setdefault(run, time.monotonic() + self.lost_seconds)
        if time.monotonic() < until:
            return False
        del self._ends[run]
        return True


def gone_slot(place: str) -> str:
    """What a slot that must not be used is called."""
    return place if place.startswith(_GONE) else f"{_GONE}{place}"


def _share(node: Node) -> int:
    return int(node.num_cpus // max(1, node.num_gpus)) if math.isfinite(node.num_cpus) else 1
