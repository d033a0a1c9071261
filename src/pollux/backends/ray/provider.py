"""The provider of nodes that a Ray cluster lends.

Nothing here calls Ray: a driver that loses its cluster may hang or end its process, so it has a process of its own
(`driver`), which `driver_client` restarts. `node_book` and `grants` handle what the driver reports.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pollux.backends.nodes.provider import LentNode, NodeProvider
from pollux.backends.ray.claim_file import ClaimFile
from pollux.backends.ray.claims import ClaimBook
from pollux.backends.ray.driver_client import DRIVER, DriverClient
from pollux.backends.ray.driver_messages import (
    DesireNodes,
    DriverMessage,
    DriverOrder,
    FailedMessage,
    GrantedMessage,
    HostGoneMessage,
    HostMessage,
    NodesMessage,
    ReleaseHosts,
    WaitsMessage,
)
from pollux.backends.ray.grants import Grants
from pollux.backends.ray.node_book import NEW_HEAD, RayNodeBook
from pollux.backends.ray.options import RayOptions

__all__ = ["RayNodeProvider"]


class RayNodeProvider(NodeProvider):
    """Lends the nodes of a Ray cluster; `home` has the file with the name of this service and its claims.

    `warm`: hosts import everything beforehand. `command` starts the process that speaks to Ray.
    """

    def __init__(
        self,
        home: Path,
        options: RayOptions,
        warm: bool = True,
        command: tuple[str, ...] = DRIVER,
    ) -> None:
        home = Path(home).absolute()
        self._options, self._warm = options, warm
        self._lock = threading.RLock()
        self._nodes = RayNodeBook()
        self._desired = DesireNodes()
        self._hosts: tuple[LentNode, ...] = ()
        self._is_stale = False
        self._service = self._secret = ""
        self._changed: Callable[[], None] = lambda: None
        self._file = ClaimFile(home / "ray.json", self._record)
        self._link = DriverClient(self._first_order, self._hear, home / "ray-driver.log", command)
        self._grants = Grants(ClaimBook(""), self._nodes, self._link.send)

    def start(self, secret: bytes, head: str, changed: Callable[[], None]) -> None:
        """Read the claims of an earlier service, and connect; nodes come as Ray and their hosts report them."""
        record, book = self._file.read(), self._grants.book
        self._service = str(record.get("service") or secrets.token_hex(4))
        book.prefix = f"pollux:{self._service}:"
        book.restore(record)
        self._nodes.restore(record.get("nodes", ()), {claim.node_id for claim in book.claims.values()})
        self._is_stale = True
        self._secret, self._changed = secret.hex(), changed
        self._file.start()
        self._link.start()

    def hosts(self) -> tuple[LentNode, ...]:
        """Nodes whose host is up; with fewer places where other Ray jobs hold some."""
        with self._lock:
            if self._nodes.unblock(time.monotonic()) or self._is_stale:
                book, self._is_stale = self._grants.book, False
                offered = [known.offered(book.granted_on(known.node.id)) for known in self._nodes]
                hosts = tuple(lent for lent in offered if lent is not None)
                # The same object while nothing has changed: callers compare the object, not its nodes.
                self._hosts = self._hosts if hosts == self._hosts else hosts
            return self._hosts

    def leaving(self) -> Mapping[str, str]:
        """Nodes that Ray drains before a preemption, or because its autoscaler or an operator wants them back."""
        with self._lock:
            return self._nodes.leaving

    def ask(self, job_id: str, wanted: Mapping[str, int]) -> None:
        """Ask for a placement group of one bundle on the node for every missing place."""
        with self._lock:
            self._grants.ask(job_id, wanted)
            self._file.note_change()

    def claim(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Keep the places that a job uses: their claims are in the file, or are made now."""
        with self._lock:
            self._grants.adopt(job_id, places)
            self._file.note_change()

    def held(self, job_id: str) -> Mapping[str, tuple[int, ...]]:
        """The places whose placement group Ray has created."""
        with self._lock:
            return self._grants.book.held(job_id)

    def refusal(self, job_id: str) -> str:
        """That Ray failed to give a place, or has had nothing for some seconds because other Ray jobs hold it."""
        with self._lock:
            return self._grants.refusal(job_id)

    def drop(self, job_id: str, places: Mapping[str, tuple[int, ...]]) -> None:
        """Remove the placement groups of these places."""
        with self._lock:
            self._grants.drop(job_id, places)
            self._file.note_change()

    def desire(self, num_nodes: int, awaited: bool = False) -> None:
        """Pass the number on to Ray's autoscaler, if the options allow that."""
        with self._lock:
            # The number of nodes was counted in nodes of the largest size that is up.
            desired = DesireNodes(num_nodes, awaited, self._nodes.largest())
            if self._options.autoscale and desired != self._desired:
                self._desired = desired
                self._link.send(desired)

    def warnings(self) -> tuple[str, ...]:
        """That Ray cannot be reached, and which of its nodes cannot be used."""
        with self._lock:
            return (*self._cluster_warnings(), *self._nodes.warnings())

    def _cluster_warnings(self) -> list[str]:
        """What is wrong with the cluster as a whole; a missing node is no problem where the autoscaler can add one."""
        if self._link.trouble:
            return [self._link.trouble]
        if not self._link.is_connected:
            return []
        if self._nodes.has_new_head:
            return [NEW_HEAD]
        if not self._nodes.is_empty or (self._options.autoscale and not self._desired.num_nodes):
            return []
        what = "CPUs" if self._options.slots is not None else "GPUs"
        if self._options.autoscale:
            num_nodes = self._desired.num_nodes
            return [f"no node with {what} yet; Ray's autoscaler was asked for {num_nodes}: see 'ray status'"]
        return [f"the Ray cluster has no node with {what}: add one, or give --slots for CPU slots"]

    def close(self) -> None:
        """End the driver; actors and placement groups stay in Ray, and the next object finds them.

        If no job holds a place, no nodes are asked for any more, and hosts end by themselves after a while.
        """
        with self._lock:
            self._grants.free_sentinels()
            if not self._grants.book.claims:
                self._link.send(ReleaseHosts())
        self._link.close()
        self._file.close()

    # The driver

    def _first_order(self) -> DriverOrder:
        """The first line for a new driver."""
        with self._lock:
            self._nodes.is_first_look = True
            return DriverOrder(
                secret=self._secret,
                prefix=self._grants.book.prefix,
                address=self._options.address,
                namespace=f"pollux-{self._service}",
                slots=self._options.slots,
                with_gpus=not self._options.cpu_places,
                warm=self._warm,
                claims=self._grants.for_new_driver(),
                desired=self._desired,
            )

    def _hear(self, message: DriverMessage) -> None:
        """Handle one message of the driver, or news of the client's `trouble`, which `warnings` then returns."""
        with self._lock:
            self._is_stale = True
            match message:
                case NodesMessage():
                    self._nodes.replace_all(message.nodes, message.leaving)
                    self._grants.drop_claims_without_node()
                case HostMessage():
                    self._nodes.note_host(message)
                case HostGoneMessage():
                    self._nodes.note_host_gone(message.node, message.why)
                case GrantedMessage():
                    self._grants.note_grant(message.claim, message.gpu)
                case WaitsMessage():
                    self._grants.note_wait(message.claim)
                case FailedMessage():
                    self._grants.note_failure(message.claim, message.why)
            self._file.note_change()
        self._changed()

    def _record(self) -> dict[str, Any]:
        with self._lock:
            return {"service": self._service, **self._grants.book.record(), "nodes": self._nodes.record()}
