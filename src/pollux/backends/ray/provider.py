"""A Ray cluster as a lender of nodes: what was asked of Ray, and what it has given.

Nothing here calls Ray: a driver that loses its cluster may hang or end its process, so it has one of its own
(`driver`), which is started again while it is needed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pollux.backends.nodes.provider import LentNode
from pollux.backends.process.records import read_record, write_record
from pollux.backends.ray.claims import Claim, ClaimBook
from pollux.backends.ray.driver_client import DRIVER, DriverClient
from pollux.backends.ray.nodes import node_from
from pollux.core import Node
from pollux.core.errors import BackendFailed, InvalidInput

__all__ = ["RayNodeProvider", "RayOptions"]

_log = logging.getLogger("pollux.backends")

_SAVE_SECONDS = 0.05
# A node where Ray failed to give a place is asked for another one after so long.
_BARRED_SECONDS = 60.0
_NEW_HEAD = (
    "Ray's head was started anew and knows none of the nodes of before: jobs that ran there go on from their "
    "checkpoints once Ray is started on its nodes again ('ray start --address=HEAD:PORT')"
)


@dataclass(frozen=True, slots=True)
class _Report:
    """What a node's host said of itself."""

    address: tuple[str, int]
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Which Ray cluster lends what.

    `address`: of the cluster's head, HOST:PORT; `auto` for the one this machine belongs to. `slots`: so many CPU slots
    of each node instead of its GPUs. `cpu_places`: what Ray calls GPUs are CPU slots, for clusters with made-up GPUs.
    `autoscale`: ask Ray's autoscaler for as many nodes as could be used.
    """

    address: str = "auto"
    slots: int | None = None
    cpu_places: bool = False
    autoscale: bool = False

    def __post_init__(self) -> None:
        if self.slots is not None and (isinstance(self.slots, bool) or self.slots < 1):
            raise InvalidInput(f"slots is {self.slots}: give 1 or more CPU slots for each node, or leave it out")
        if self.address.startswith("ray://"):
            raise InvalidInput(
                f"address is '{self.address}', which is for Ray's client: run the service on a node of the cluster, "
                "and give HOST:PORT of its head, or auto"
            )
        host, colon, port = self.address.rpartition(":")
        if self.address != "auto" and not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise InvalidInput(
                f"address is '{self.address}': give HOST:PORT of the head, such as 10.0.0.1:6379, or auto"
            )


class RayNodeProvider:
    """Lends the nodes of a Ray cluster; `home` keeps the name of this service and its claims.

    `warm`: hosts import everything beforehand. `command` starts the process that speaks to Ray.
    """

    def __init__(
        self,
        home: Path,
        options: RayOptions,
        warm: bool = True,
        command: tuple[str, ...] = DRIVER,
    ) -> None:
        self._file = Path(home).absolute() / "ray.json"
        self._options, self._warm = options, warm
        self._lock = threading.RLock()
        self._nodes: dict[str, Node] = {}
        self._described: dict[str, dict[str, Any]] = {}
        self._leaving: dict[str, str] = {}
        self._reports: dict[str, _Report] = {}
        self._troubles: dict[str, str] = {}
        self._failures: dict[str, str] = {}
        self._refusals: dict[str, str] = {}
        self._barred: dict[str, float] = {}
        # Hosts that were started with other options: what runs there may stay, and nothing comes to it.
        self._odd: dict[str, str] = {}
        self._doubts: dict[str, str] = {}
        # Groups with other GPUs than the one that is in use, by the claim for that one: kept until Ray has given it.
        self._wrong: dict[str, list[str]] = {}
        self._limits: dict[str, int] = {}
        self._feelers: dict[str, str] = {}
        self._hosts: tuple[LentNode, ...] = ()
        self._stale = False
        self._is_first_look = self._is_new_head = False
        self._desired: int | None = None
        self._awaited, self._size = False, 0
        self._secret = self._service = ""
        self._changed: Callable[[], None] = _nothing
        self._book = ClaimBook("")
        self._unsaved = threading.Event()
        self._closing = False
        self._writer = threading.Thread(target=self._keep_written, daemon=True, name="pollux-ray-books")
        self._link = DriverClient(self._order, self._hear, Path(home).absolute() / "ray-driver.log", command)

    def start(self, secret: bytes, head: str, changed: Callable[[], None]) -> None:
        """Read the claims of before and connect; nodes arrive as Ray and their hosts report."""
        record = read_record(self._file) or {}
        service = str(record.get("service") or secrets.token_hex(4))
        self._book = ClaimBook(f"pollux:{service}:")
        self._book.restore(record)
        self._remember(record.get("nodes", ()))
        self._service, self._secret, self._changed = service, secret.hex(), changed
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._write()
        self._writer.start()
        self._link.start()

    def _remember(self, nodes: Iterable[Mapping[str, Any]]) -> None:
        """Nodes of before on which places are claimed are there until Ray says otherwise, or jobs hear no more of them.

        Ray may be away for long, and what runs there does not need it.
        """
        used = {claim.node_id for claim in self._book.claims.values()}
        for each in nodes:
            with contextlib.suppress(KeyError, IndexError, TypeError, ValueError):
                node, report = node_from(each["described"]), _report(each)
                if node.id in used:
                    self._described[node.id] = dict(each["described"])
                    self._nodes[node.id], self._reports[node.id] = node, report
        self._stale = True

    def hosts(self) -> tuple[LentNode, ...]:
        """Nodes whose host is up; fewer places than Ray has where other Ray jobs hold some."""
        with self._lock:
            for node_id in [node_id for node_id, until in self._barred.items() if time.monotonic() >= until]:
                del self._barred[node_id]
                self._failures.pop(node_id, None)
                self._stale = True
            if self._stale:
                offered, self._stale = self._offered(), False
                if offered != self._hosts:
                    self._hosts = offered
            return self._hosts

    def leaving(self) -> Mapping[str, str]:
        """Nodes that Ray drains: before a preemption, or since its autoscaler or somebody wants them back."""
        with self._lock:
            return self._leaving

    def ask(self, job_id: str, wanted: Mapping[str, int]) -> None:
        """A placement group of one bundle on the named node for every place that is missing."""
        with self._lock:
            self._refusals.pop(job_id, None)
            taken, freed = self._book.ask(job_id, wanted)
            if taken or freed:
                self._save()
            if taken:
                self._link.send({"do": "take", "claims": {claim.name: claim.node_id for claim in taken}})
            self._free(freed)

    def claim(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Stand by what a job uses: its claims are known from before, or are made now."""
        with self._lock:
            before = self._book.held(job_id)
            taken = self._book.adopt(job_id, places)
            if self._book.held(job_id) != before:
                self._save()
            if taken:
                self._link.send({"do": "take", "claims": {claim.name: claim.node_id for claim in taken}})

    def held(self, job_id: str) -> Mapping[str, tuple[int, ...]]:
        """Places whose placement group Ray has created."""
        with self._lock:
            return self._book.held(job_id)

    def refusal(self, job_id: str) -> str:
        """That Ray failed to give it, or that other Ray jobs hold it, once Ray had nothing to give for some seconds."""
        with self._lock:
            return self._refusals.get(job_id) or self._book.refusal(job_id, self._limits)

    def drop(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Remove their placement groups."""
        with self._lock:
            self._refusals.pop(job_id, None)
            freed = self._book.drop(job_id, places)
            if freed:
                self._save()
                self._free(freed)
                again = self._book.wait_anew({claim.node_id for claim in freed})
                if again:
                    self._link.send({"do": "wait anew", "names": again})

    def check_node(self, node: str) -> None:
        """Nothing: Ray tells by itself."""

    def release_silent(self, silent: Collection[LentNode]) -> None:
        """Nothing: Ray sees its end within a minute or so, and what is held there goes with it."""

    def desire(self, num_nodes: int, awaited: bool = False) -> None:
        """Pass the wish to Ray's autoscaler, where that was allowed."""
        with self._lock:
            # Of such nodes are so many: the largest that are up, by which they were counted.
            size = max((self._nodes[name].num_gpus for name in self._reports if name in self._nodes), default=0)
            if self._options.autoscale and (num_nodes, awaited, size) != (self._desired, self._awaited, self._size):
                self._desired, self._awaited, self._size = num_nodes, awaited, size
                self._link.send({"do": "desire", "nodes": num_nodes, "awaited": awaited, "size": size})

    def _without_nodes(self) -> list[str]:
        """What there is to say of a cluster without a node for us; nothing where none is needed and one can be had."""
        what = "CPUs" if self._options.slots is not None else "GPUs"
        if not self._options.autoscale:
            return [f"the Ray cluster has no node with {what}: add one, or give --slots for CPU slots"]
        if not self._desired:
            return []
        return [f"no node with {what} yet; Ray's autoscaler was asked for {self._desired}: see 'ray status'"]

    def warnings(self) -> tuple[str, ...]:
        """Ray out of reach, and nodes that it has but that cannot be used."""
        with self._lock:
            said = [self._link.trouble] if self._link.trouble else []
            if not said and self._is_new_head and self._link.is_connected:
                said.append(_NEW_HEAD)
            elif not said and not self._nodes and self._link.is_connected and not self._is_first_look:
                said += self._without_nodes()
            said += [f"node '{name}' is being left: {why}" for name, why in sorted(self._leaving.items())]
            tables = (self._troubles, self._odd, self._doubts, self._failures)
            return (*said, *(texts[name] for texts in tables for name in sorted(texts)))

    def close(self) -> None:
        """End the driver; actors and placement groups stay in Ray, and the next object finds them.

        Where no job holds anything, no nodes are wished for any more, and hosts end by themselves after a while.
        """
        with self._lock:
            if self._feelers:
                self._link.send({"do": "free", "names": [*self._feelers.values()]})
            if not self._book.claims:
                self._link.send({"do": "part"})
        self._link.close()
        self._closing = True
        self._unsaved.set()
        if self._writer.ident is not None:
            self._writer.join()
            self._write()

    # What the driver is told, and what it tells

    def _order(self) -> dict[str, Any]:
        """The first line for a new driver."""
        with self._lock:
            self._is_first_look = True
            # A new driver removes the groups that it is not told of.
            self._wrong.clear()
            wanted = {claim.name: claim.node_id for claim in self._book.claims.values()}
            return {
                "address": self._options.address,
                "namespace": f"pollux-{self._service}",
                "prefix": self._book.prefix,
                "secret": self._secret,
                "slots": self._options.slots,
                "with_gpus": not self._options.cpu_places,
                "warm": self._warm,
                "desired": self._desired,
                "awaited": self._awaited,
                "size": self._size,
                "claims": wanted | {name: node_id for node_id, name in self._feelers.items()},
            }

    def _hear(self, said: Mapping[str, Any]) -> None:
        """One line of the driver's."""
        kind = said["kind"]
        with self._lock:
            self._stale = True
            if kind == "nodes":
                self._see(said["nodes"])
                self._leaving = {str(name): str(why) for name, why in said.get("leaving", {}).items()}
            elif kind == "host":
                self._reports[said["node"]] = _report(said)
                self._troubles.pop(said["node"], None)
                self._odd.pop(said["node"], None)
                if said.get("odd"):
                    _note(self._odd, said["node"], said["odd"])
                self._doubts.pop(said["node"], None)
                if said.get("doubt"):
                    _note(self._doubts, said["node"], f"node '{said['node']}': {said['doubt']}")
                self._save()
            elif kind == "gone":
                self._reports.pop(said["node"], None)
                self._odd.pop(said["node"], None)
                self._doubts.pop(said["node"], None)
                _note(self._troubles, said["node"], said["why"])
                self._save()
            elif kind == "granted":
                self._grant(said["claim"], said["gpu"])
            elif kind == "waits":
                self._limit(said["claim"])
            elif kind == "failed":
                self._fail(said["claim"], said["why"])
        self._changed()

    def _see(self, described: list[dict[str, Any]]) -> None:
        # Nodes that end one by one are told one by one.
        if self._is_first_look and self._nodes and not described:
            self._is_new_head = True
            _log.warning("%s", _NEW_HEAD)
        self._is_new_head, self._is_first_look = self._is_new_head and not described, False
        self._described = {str(each["name"]): each for each in described}
        self._nodes = {node.id: node for node in map(node_from, described)}
        tables: tuple[dict[str, Any], ...] = (
            self._reports, self._troubles, self._odd, self._doubts, self._failures, self._barred, self._limits,
            self._feelers,
        )  # fmt: skip
        for table in tables:
            for name in table.keys() - self._nodes.keys():
                del table[name]
        gone = self._book.drop_nodes(self._nodes)
        self._save()
        if gone:
            self._let_go([claim.name for claim in gone])

    def _grant(self, name: str, gpu: str | None) -> None:
        if self._end_feeler(name):
            return
        claim = self._book.claims.get(name)
        if claim is None:
            return
        if gpu is not None and not gpu.isdigit():
            why = f"node '{claim.node_id}' lends GPU '{gpu}', which is no whole GPU: it is not used"
            self._bar(claim, why, math.inf)
            return
        place = claim.place if gpu is None else self._place_of(claim, int(gpu))
        other = None if place is None else self._book.at(claim.node_id, place)
        if claim.place is not None and claim.place != place:
            if other is None or other.job_id != claim.job_id:
                self._take_other(claim)
                return
            self._book.swap(name, other.name)
        elif other is not None and other.name != name:
            why = f"Ray gave GPU {gpu} of node '{claim.node_id}', which job '{other.job_id}' uses; asking again"
            self._bar(claim, why, _BARRED_SECONDS)
            return
        self._book.grant(name, place)
        self._link_free(self._wrong.pop(name, []))
        self._limits.pop(claim.node_id, None)
        if claim.node_id not in self._barred:
            self._failures.pop(claim.node_id, None)
        self._save()

    def _place_of(self, claim: Claim, gpu: int) -> int:
        """The place of a GPU on its node; where the host has not said which it has, that of before is believed."""
        report = self._reports.get(claim.node_id)
        if report is not None and gpu in report.gpus:
            return report.gpus.index(gpu)
        return gpu if claim.place is None else claim.place

    def _take_other(self, claim: Claim) -> None:
        """Ray made a group anew for a place in use, and with another GPU: ask for one more, which cannot have that."""
        new = self._book.instead(claim.name)
        self._wrong[new.name] = [*self._wrong.pop(claim.name, []), claim.name]
        self._save()
        self._link.send({"do": "take", "claims": {new.name: new.node_id}})

    def _take_no_other(self, claim: Claim) -> None:
        """Ray has nothing more there: what it gave last stands for the place in its books, and that is said."""
        *others, last = self._wrong.pop(claim.name)
        self._book.instead(claim.name, last)
        self._link_free([claim.name, *others])
        report = self._reports.get(claim.node_id)
        gpus = dict(enumerate(report.gpus)) if report is not None else {}
        gpu = None if claim.place is None else gpus.get(claim.place, claim.place)
        why = (
            f"job '{claim.job_id}' uses GPU {gpu} of node '{claim.node_id}', which Ray has lent to somebody else: "
            "nothing new is started there for a minute; 'ray list placement-groups' and 'ray list actors' show who"
        )
        _note(self._failures, claim.node_id, why)
        self._barred[claim.node_id] = time.monotonic() + _BARRED_SECONDS
        self._save()

    def _end_feeler(self, name: str) -> bool:
        """Whether this is one: its node has something to give, as far as is known, and it is not needed any more."""
        node_id = next((node_id for node_id, feeler in self._feelers.items() if feeler == name), None)
        if node_id is None:
            return False
        del self._feelers[node_id]
        self._limits.pop(node_id, None)
        self._link.send({"do": "free", "names": [name]})
        return True

    def _fail(self, name: str, why: str) -> None:
        """Ray could not make a group, or lost it. The driver claims anew what a job uses already."""
        claim = self._book.claims.get(name)
        if self._end_feeler(name) or claim is None:
            return
        text = f"Ray failed to give a place on node '{claim.node_id}' ({why}): see 'ray list placement-groups'"
        if claim.place is None:
            self._bar(claim, text, _BARRED_SECONDS)
        else:
            _note(self._failures, claim.node_id, text)

    def _bar(self, claim: Claim, why: str, seconds: float) -> None:
        """What came is of no use: the job hears why, and its node has nothing more to offer for so long."""
        _note(self._failures, claim.node_id, why)
        self._refusals[claim.job_id] = why
        self._barred[claim.node_id] = time.monotonic() + seconds
        self._book.remove(claim.name)
        self._let_go([claim.name])
        self._save()

    def _limit(self, name: str) -> None:
        """A claim waits. Where our own jobs do not hold all of the node, others do, and it has that much less to offer.

        Until Ray gives something there again.
        """
        self._book.wait(name)
        claim = self._book.claims.get(name)
        if claim is not None and name in self._wrong:
            self._take_no_other(claim)
            return
        node = None if claim is None else self._nodes.get(claim.node_id)
        if node is not None and self._book.hoped_for(node.id) < node.num_gpus:
            self._limits[node.id] = self._book.hoped_for(node.id)

    def _free(self, claims: list[Claim]) -> None:
        """Give claims back; one that waits at a limited node stays in Ray's queue, to tell when others have left."""
        freed = []
        for claim in claims:
            if claim.waits and claim.node_id in self._limits and claim.node_id not in self._feelers:
                self._feelers[claim.node_id] = claim.name
            else:
                freed.append(claim.name)
        self._let_go(freed)

    def _let_go(self, names: list[str]) -> None:
        """Give groups back, and those that were kept for them."""
        self._link_free([*names, *(wrong for name in names for wrong in self._wrong.pop(name, []))])

    def _link_free(self, names: list[str]) -> None:
        if names:
            self._link.send({"do": "free", "names": names})

    def _offered(self) -> tuple[LentNode, ...]:
        found = []
        for node_id, report in sorted(self._reports.items()):
            node = self._nodes.get(node_id)
            if node is not None:
                is_shut = node_id in self._barred or node_id in self._odd
                most = 0 if is_shut else self._limits.get(node_id, node.num_gpus)
                limit = max(most, self._book.granted_on(node_id))
                found.append(LentNode(replace(node, num_gpus=limit), report.address, report.gpus))
        return tuple(found)

    def _save(self) -> None:
        """Have the claims written soon: what is not, a restart gives back to Ray or claims anew for running jobs."""
        self._unsaved.set()

    def _keep_written(self) -> None:
        """Write the claims whenever they have changed, but not more often than that matters."""
        while not self._closing:
            self._unsaved.wait()
            self._unsaved.clear()
            self._write()
            time.sleep(_SAVE_SECONDS)

    def _write(self) -> None:
        with self._lock:
            nodes = [
                {"described": self._described[name], "address": list(report.address), "gpus": list(report.gpus)}
                for name, report in self._reports.items()
                if name in self._described
            ]
            record = {"service": self._service, **self._book.record(), "nodes": nodes}
        try:
            write_record(self._file, record)
        except BackendFailed as error:
            _log.warning("the claims on Ray's GPUs could not be noted: %s", error)


def _report(said: Mapping[str, Any]) -> _Report:
    return _Report((str(said["address"][0]), int(said["address"][1])), tuple(map(int, said["gpus"])))


def _note(texts: dict[str, str], node_id: str, why: str) -> None:
    """Keep what is wrong with a node, and log it where that is news."""
    if texts.get(node_id) != why:
        _log.warning("%s", why)
    texts[node_id] = why


def _nothing() -> None:
    """Until somebody wants to know."""
