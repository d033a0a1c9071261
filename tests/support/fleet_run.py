"""A training job on node daemons that are processes: `random_changes` with nodes that come and go."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from tests.support.fleet import ProcessFleet

from pollux.backends.fleet.backend import FleetBackend
from pollux.storage.state_file import write_state
from pollux.testing.jobs import float64_job
from pollux.testing.jobs.random_changes import EventRun
from pollux.testing.waiting import PATIENCE_SECONDS, OutOfTime

__all__ = ["FleetNodes", "FleetRun"]


class FleetNodes:
    """Warm node daemons with one `secret`, which serve one backend after another."""

    def __init__(self, folder: Path, num_nodes: int = 3, slots: int = 2, secret: str = "") -> None:
        self.folder = folder
        self.secret = secret or secrets.token_hex(32)
        self.num_nodes = num_nodes
        self._slots = slots
        self.hosts = self._provider(True)

    def start(self) -> None:
        """Start the daemons, and wait until all are up."""
        self.hosts.start(bytes.fromhex(self.secret), "127.0.0.1", lambda: None)
        self.await_all()

    def await_all(self) -> None:
        """Wait until all daemons are up; `OutOfTime` if that takes too long."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self.hosts.hosts()) < self.num_nodes:
            if time.monotonic() > deadline:
                raise OutOfTime(f"of {self.num_nodes} node daemons only these are up: {self.hosts.hosts()}")
            time.sleep(0.02)

    def _provider(self, watch: bool) -> ProcessFleet:
        return ProcessFleet(self.folder, self.num_nodes, self._slots, watch)

    def backend(self, home: Path, watch: bool = True, lease_seconds: float = 20.0) -> FleetBackend:
        """A backend with that home, on these daemons; `watch`: whether its engine reports that a node is gone."""
        (home / "run").mkdir(parents=True, exist_ok=True)
        write_state(home / "run" / "fleet.secret", self.secret.encode())
        provider, lost_seconds = self._provider(watch), lease_seconds + 5.0
        return FleetBackend(home, provider, head="127.0.0.1", lease_seconds=lease_seconds, lost_seconds=lost_seconds)


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
        self.await_nodes()

    @property
    def fleet(self) -> FleetBackend:
        """The present backend."""
        return cast(FleetBackend, self.backend)

    def await_nodes(self) -> None:
        """Wait until the backend has all nodes."""
        self.wait_for("all nodes", lambda: len(self.backend.inventory()) == self.nodes.num_nodes)

    def replicas_on(self, number: int) -> list[int]:
        """The job's replicas on a node."""
        there = self.nodes.hosts.processes(number)
        return [pid for pid in float64_job.living(self.folder) if pid in there]

    def random_placement(self, chance: random.Random, most: int = 3) -> dict[str, int]:
        """A placement of one to `most` replicas on nodes of the inventory."""
        counts: dict[str, int] = {}
        nodes = [node for node in self.backend.inventory() for _ in range(node.num_gpus)]
        for node in chance.sample(nodes, min(len(nodes), chance.randint(1, most))):
            counts[node.id] = counts.get(node.id, 0) + 1
        return counts
