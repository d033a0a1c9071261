"""A training job on hosts that are processes: `random_changes`, with nodes that come and go."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from pollux.backends.fleet.backend import FleetBackend
from pollux.core import Placement
from pollux.testing.jobs import float64_job
from pollux.testing.jobs.fleet import ProcessFleet
from pollux.testing.jobs.random_changes import EventRun
from pollux.testing.waiting import PATIENCE_SECONDS, OutOfTime

__all__ = ["FleetNodes", "FleetRun"]


class FleetNodes:
    """Hosts with everything imported, of one `secret`, for the homes of many backends; they outlive backends."""

    def __init__(self, folder: Path, num_nodes: int = 3, slots: int = 2, secret: str = "") -> None:
        self.folder = folder
        self.secret = secret or secrets.token_hex(32)
        self.num_nodes = num_nodes
        self._slots = slots
        self.hosts = self._lender(True)

    def start(self) -> None:
        """Start them, and wait until they are up."""
        self.hosts.start(bytes.fromhex(self.secret), "127.0.0.1", lambda: None)
        self.await_all()

    def await_all(self) -> None:
        """Wait until all are up; `OutOfTime` where they are not in time."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self.hosts.hosts()) < self.num_nodes:
            if time.monotonic() > deadline:
                raise OutOfTime(f"of {self.num_nodes} hosts only these are up: {self.hosts.hosts()}")
            time.sleep(0.02)

    def _lender(self, watch: bool) -> ProcessFleet:
        return ProcessFleet(self.folder, self.num_nodes, self._slots, watch)

    def backend(self, home: Path, watch: bool = True, lease_seconds: float = 4.0) -> FleetBackend:
        """A backend at that home, over these hosts; `watch`: whether its engine says that a node is gone."""
        (home / "run").mkdir(parents=True, exist_ok=True)
        (home / "run" / "fleet.secret").write_text(self.secret)
        lender, lost_seconds = self._lender(watch), lease_seconds + 1.0
        return FleetBackend(home, lender, head="127.0.0.1", lease_seconds=lease_seconds, lost_seconds=lost_seconds)


class FleetRun(EventRun):
    """A job whose placements are given by node."""

    def __init__(
        self,
        nodes: FleetNodes,
        folder: Path,
        epochs: int = 12,
        watch: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.nodes = nodes
        super().__init__(
            lambda: nodes.backend(folder / "home", watch), folder, epochs, env={**float64_job.SLOW, **(env or {})}
        )
        self.all_nodes()

    @property
    def fleet(self) -> FleetBackend:
        """The backend now."""
        return cast(FleetBackend, self.backend)

    def all_nodes(self) -> None:
        """Wait until the backend has all nodes."""
        self.until("all nodes", lambda: len(self.backend.inventory()) == self.nodes.num_nodes)

    def begin(self, counts: Mapping[str, int]) -> None:
        """Start it there, and wait until it trains."""
        self.backend.submit(self._launch(Placement.of(counts)))
        self.settled()
        self.stepped()

    def order(self, counts: Mapping[str, int]) -> None:
        """Have it go there."""
        self.backend.resize(self._launch(Placement.of(counts)))

    def go(self, counts: Mapping[str, int]) -> None:
        """Have it go there, and wait until it runs."""
        self.order(counts)
        self.settled()

    def on(self, number: int) -> list[int]:
        """Its replicas on a node."""
        there = self.nodes.hosts.processes(number)
        return [pid for pid in float64_job.living(self.folder) if pid in there]

    def somewhere(self, chance: random.Random, most: int = 3) -> dict[str, int]:
        """A placement of one to `most` replicas on nodes there are."""
        counts: dict[str, int] = {}
        nodes = [node for node in self.backend.inventory() for _ in range(node.num_gpus)]
        for node in chance.sample(nodes, min(len(nodes), chance.randint(1, most))):
            counts[node.id] = counts.get(node.id, 0) + 1
        return counts
