"""Gives slots to jobs, on this machine or on lent nodes, and knows how replicas are started there."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pollux.backends.nodes.provider import LentNode, NodeProvider
from pollux.backends.nodes.slot import Slot
from pollux.backends.nodes.slot_table import SlotTable
from pollux.backends.nodes.slot_trust import SlotTrust
from pollux.backends.process import proc, replica_env
from pollux.backends.process.devices import Devices
from pollux.backends.process.network import is_loopback
from pollux.backends.protocol import Launch, Outcome
from pollux.core import Node, Placement
from pollux.wire.live.messages import FleetAccess

__all__ = ["FleetSlotAllocator", "LocalSlotAllocator", "SlotAllocator", "SlotDetails"]

_Slots = tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class SlotDetails:
    """The fields of a `LaunchOrder` that depend on its slots."""

    environ: Mapping[str, str]
    replicas: tuple[Mapping[str, str], ...]
    cores: tuple[tuple[int, ...], ...]
    places: tuple[str, ...]
    gpus: Mapping[str, int]
    fleet: FleetAccess | None = None


class SlotAllocator(Protocol):
    """The slots that a backend hands out."""

    def allocate(self, job_id: str, placement: Placement, kept: Sequence[Slot], busy: Sequence[Slot]) -> _Slots:
        """Give the job slots for that placement and return them; none while too few are free.

        First come those of `kept` that fit the placement, in their order, then others that are not `busy`.
        """

    def release_except(self, job_id: str, places: Iterable[Slot]) -> None:
        """Free every slot that the job holds, except for these."""

    def mark_held(self, job_id: str, places: Iterable[Slot]) -> None:
        """Note that a job found running uses these slots."""

    def refused(self, job_id: str, placement: Placement, kept: Sequence[Slot]) -> tuple[str, _Slots]:
        """Why slots are not available, and all slots of the placement, with the missing ones marked as gone.

        Both are empty while they may still come.
        """

    def placement(self, places: Iterable[Slot]) -> Placement:
        """How many of these slots are on each node; nodes in the order of their first slot."""

    def details(self, launch: Launch, places: Sequence[Slot], identity: str) -> SlotDetails:
        """What a `LaunchOrder` says of these slots."""

    def ends_all(self, record: Mapping[str, Any]) -> bool:
        """Kill what is left of a generation whose shim is gone; whether no process of it can run any more."""

    def note_end(self, launch: Launch, places: Sequence[Slot], outcome: Outcome) -> str:
        """Note how a generation ended on these slots; what to add to that, such as that a device is suspect."""


class LocalSlotAllocator:
    """This machine; `environ` is what replicas inherit."""

    def __init__(self, devices: Devices, environ: Mapping[str, str]) -> None:
        self._devices = devices
        self._environ = environ
        self._table = SlotTable(devices.node.num_gpus)
        self._trust = SlotTrust([Slot("", index) for index in range(len(devices.gpus))])
        # Each with the line about it; made anew at each end of a generation.
        self._suspects: Mapping[Slot, str] = {}
        self._held: dict[str, set[Slot]] = {}

    def allocate(self, job_id: str, placement: Placement, kept: Sequence[Slot], busy: Sequence[Slot]) -> _Slots:
        """See `SlotAllocator.allocate`; neighbouring slots where possible."""
        wanted = placement.num_gpus
        staying = tuple(kept)[:wanted]
        # The job still holds the slots of replicas that have ended.
        spare = sorted(self._held.get(job_id, set()) - {*kept, *busy})[: wanted - len(staying)]
        missing = wanted - len(staying) - len(spare)
        taken = self._table.allocate(missing, {slot.index for slot in self._suspects}) if missing else ()
        if taken is None:
            return ()
        joining = (*spare, *(Slot("", index) for index in taken))
        self._held.setdefault(job_id, set()).update(joining)
        return (*staying, *joining)

    def release_except(self, job_id: str, places: Iterable[Slot]) -> None:
        """See `SlotAllocator.release_except`."""
        held, kept = self._held.get(job_id, set()), set(places)
        self._table.release(slot.index for slot in held - kept)
        self._held[job_id] = held & kept
        if not self._held[job_id]:
            del self._held[job_id]

    def mark_held(self, job_id: str, places: Iterable[Slot]) -> None:
        """See `SlotAllocator.mark_held`; a slot that several jobs hold is free once all of them have released it."""
        held = self._held.setdefault(job_id, set())
        new = set(places) - held
        self._table.mark_held(slot.index for slot in new)
        held |= new

    def refused(self, job_id: str, placement: Placement, kept: Sequence[Slot]) -> tuple[str, _Slots]:
        """Always empty: every slot of this machine becomes free some time."""
        return "", ()

    def placement(self, places: Iterable[Slot]) -> Placement:
        """All slots are on the one node."""
        return Placement.of({self._devices.node.id: len([*places])})

    def details(self, launch: Launch, places: Sequence[Slot], identity: str) -> SlotDetails:
        """The service's own environment, this machine's cores and GPUs."""
        devices = self._devices
        names = tuple(map(str, places))
        gpus = {str(slot): devices.gpus[slot.index] for slot in places} if devices.gpus else {}
        share = min((len(devices.cores_of(slot.index)) for slot in places), default=1) if devices.is_cpu else None
        return SlotDetails(
            environ={**self._environ, **replica_env.common_variables(launch, identity, threads=share)},
            replicas=replica_env.rank_variables(names, gpus),
            cores=tuple(devices.cores_of(slot.index, launch.cpus_per_gpu) for slot in places),
            places=names,
            gpus=gpus,
        )

    def ends_all(self, record: Mapping[str, Any]) -> bool:
        """Kill its processes: those with its name, and those in the record unless the machine has booted since."""
        replicas = record.get("replicas", []) if record.get("boot") == proc.boot_id() else []
        # Pids are reused: if another process has this pid now, its session is not ours.
        sessions = {int(pid) for pid, start, _ in replicas if proc.start_time(int(pid)) in (None, start)}
        left = proc.members(
            f"TORCHELASTIC_RUN_ID={record.get('run_id')}",
            sessions,
            {pipe for _, _, pipe in replicas if pipe},
        )
        proc.kill_all(left)
        return not left

    def note_end(self, launch: Launch, places: Sequence[Slot], outcome: Outcome) -> str:
        """See `SlotAllocator.note_end`; with GPUs only: a slot of CPU cores does not break."""
        self._trust.note_end(places, " ".join([launch.workdir, *launch.argv[:2]]), outcome)
        self._suspects = {
            slot: f"GPU {self._devices.gpus[slot.index]} of this machine is suspect: {why}; it is used last; see what "
            "'nvidia-smi' says, and leave it out by starting the service with CUDA_VISIBLE_DEVICES"
            for slot, why in self._trust.suspects.items()
        }
        return "; ".join(line for slot, line in self._suspects.items() if outcome == "crashed" and slot in places)

    def warnings(self) -> tuple[str, ...]:
        """A line for each GPU that is suspect; such a one is used last."""
        return tuple(self._suspects.values())


class FleetSlotAllocator:
    """Nodes that a provider lends.

    `remembered`: nodes that an earlier service used, kept until the provider has found them.
    """

    def __init__(
        self, provider: NodeProvider, secret: bytes, head: str, lease_seconds: float, lost_seconds: float
    ) -> None:
        self._provider = provider
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
        """Nodes whose daemon is up, by name; the same object as long as nothing has changed."""
        listed = self._provider.hosts()
        if listed is not self._listed or len(self.remembered) != self._merged:
            self._listed = listed
            there = {hosted.node.id: hosted for hosted in listed}
            for node in there:
                self.remembered.pop(node, None)
            self._merged = len(self.remembered)
            self._by_id = {**self.remembered, **there}
        return self._by_id

    def nodes(self) -> tuple[Node, ...]:
        """The nodes as values, in the provider's order."""
        return tuple(hosted.node for hosted in self.hosts.values())

    def allocate(self, job_id: str, placement: Placement, kept: Sequence[Slot], busy: Sequence[Slot]) -> _Slots:
        """See `SlotAllocator.allocate`; asks the provider once, and returns no slots until it has given all."""
        staying, lacking = _staying(placement, kept)
        self._ask(job_id, lacking, busy)
        held = self._provider.held(job_id) if any(lacking.values()) else {}
        joining: list[Slot] = []
        for node, count in lacking.items():
            free = [slot for index in held.get(node, ()) if (slot := Slot(node, index)) not in busy]
            if len(free) < count:
                return ()
            joining += free[:count]
        self._asked.pop(job_id, None)
        return (*staying, *joining)

    def _ask(self, job_id: str, lacking: Mapping[str, int], busy: Sequence[Slot]) -> None:
        """Ask the provider for the slots that the job lacks on each node, in addition to the busy ones."""
        used = Counter(slot.node for slot in busy)
        wanted = {node: used[node] + count for node, count in lacking.items() if count > 0}
        if wanted and self._asked.get(job_id) != wanted:
            self._asked[job_id] = wanted
            self._provider.ask(job_id, wanted)
        if not wanted and self._asked.pop(job_id, None) is not None:
            # An earlier order asked for more slots, which this job would keep idle.
            self._provider.ask(job_id, {})

    def release_except(self, job_id: str, places: Iterable[Slot]) -> None:
        """See `SlotAllocator.release_except`."""
        kept = set(places)
        if self._asked.pop(job_id, None) is not None:
            # The job must not get slots later that it no longer needs.
            self._provider.ask(job_id, {})
        rest = {
            node: tuple(index for index in held if Slot(node, index) not in kept)
            for node, held in self._provider.held(job_id).items()
        }
        if any(rest.values()):
            self._provider.drop(job_id, {node: numbers for node, numbers in rest.items() if numbers})

    def mark_held(self, job_id: str, places: Iterable[Slot]) -> None:
        """See `SlotAllocator.mark_held`; tells the provider, which may have started without records."""
        by_node: dict[str, tuple[int, ...]] = {}
        for slot in places:
            if not slot.is_gone:
                by_node[slot.node] = (*by_node.get(slot.node, ()), slot.index)
        if by_node:
            self._provider.claim(job_id, by_node)

    def refused(self, job_id: str, placement: Placement, kept: Sequence[Slot]) -> tuple[str, _Slots]:
        """The provider's reason, or that a node is gone."""
        if any(node in self.remembered for node, _ in placement):
            return "", ()
        missing = [node for node, _ in placement if node not in self.hosts]
        why = f"node '{missing[0]}' is gone" if missing else self._provider.refusal(job_id)
        if not why:
            return "", ()
        staying, lacking = _staying(placement, kept)
        others = (Slot(node, index).gone for node, count in lacking.items() for index in range(count))
        return why, (*staying, *others)

    def placement(self, places: Iterable[Slot]) -> Placement:
        """See `SlotAllocator.placement`."""
        return Placement.of(Counter(slot.node for slot in places))

    def details(self, launch: Launch, places: Sequence[Slot], identity: str) -> SlotDetails:
        """The job's own variables: replicas inherit the rest of their environment from their node."""
        there = [self.hosts[slot.node] for slot in places if slot.node in self.hosts]
        gpus = self._gpus_of(places)
        names = tuple(map(str, places))
        nodes = {hosted.node.id: hosted.address for hosted in there}
        loopback = is_loopback(self.head) and all(is_loopback(address) for address, _ in nodes.values())
        threads = None if gpus else min((_share(hosted.node) for hosted in there), default=1)
        fleet = FleetAccess(self.secret.hex(), self.head, nodes, self._lease_seconds, self.lost_seconds)
        return SlotDetails(
            environ=replica_env.common_variables(launch, identity, self.head, threads, loopback),
            replicas=replica_env.rank_variables(names, gpus),
            cores=tuple(() for _ in names),
            places=names,
            gpus=gpus,
            fleet=fleet,
        )

    def _gpus_of(self, slots: Iterable[Slot]) -> dict[str, int]:
        """The device index behind each slot, by the slot's name; a node may have fewer devices than slots."""
        hosts = self.hosts
        known = [slot for slot in slots if slot.node in hosts and slot.index < len(hosts[slot.node].gpus)]
        return {str(slot): hosts[slot.node].gpus[slot.index] for slot in known}

    def ends_all(self, record: Mapping[str, Any]) -> bool:
        """Node daemons end the replicas by themselves once the lease is over: wait for that."""
        run = str(record.get("run_id"))
        until = self._ends.setdefault(run, time.monotonic() + self.lost_seconds)
        if time.monotonic() < until:
            return False
        del self._ends[run]
        return True

    def note_end(self, launch: Launch, places: Sequence[Slot], outcome: Outcome) -> str:
        """Empty: the controller counts ends by node."""
        return ""


def _staying(placement: Placement, kept: Sequence[Slot]) -> tuple[_Slots, dict[str, int]]:
    """The kept slots that fit the placement, in their order; and how many slots each node lacks then."""
    lacking = dict(placement)
    staying = []
    for slot in kept:
        if lacking.get(slot.node, 0) > 0:
            lacking[slot.node] -= 1
            staying.append(slot)
    return tuple(staying), lacking


def _share(node: Node) -> int:
    return int(node.num_cpus // max(1, node.num_gpus)) if math.isfinite(node.num_cpus) else 1
