"""Backends and a training job on the Ray cluster, for tests and for the processes that they start."""

import json
from pathlib import Path

from pollux.backends.protocol import NodeDown, NodeUp
from pollux.backends.ray.backend import RayBackend
from pollux.core import Placement
from pollux.testing.jobs.random_changes import EventRun

SECRET = "5a" * 32


def backend_at(home: Path, address: str, service: str, **more) -> RayBackend:
    """A backend under the name of a service; services that follow one another take over each other's hosts."""
    (home / "run").mkdir(parents=True, exist_ok=True)
    (home / "run" / "fleet.secret").write_text(SECRET)
    if not (home / "ray.json").exists():
        (home / "ray.json").write_text(json.dumps({"service": service}))
    return RayBackend(home, address=address, **{"cpu_places": True, **more})


class RayRun(EventRun):
    """A training job of the service `training`; `service` another's."""

    def __init__(self, address, folder, epochs=12, service="training", nodes=3, **more):
        self.service = service
        name = f"job-{service}"
        super().__init__(lambda: backend_at(folder / "home", address, service, **more), folder, epochs, job_id=name)
        self.until("nodes", lambda: len(self.backend.inventory()) >= nodes)

    @property
    def names(self):
        """The nodes there are."""
        return [node.id for node in self.backend.inventory()]

    def begin(self, **counts):
        """Start it there, and wait until it trains."""
        self.backend.submit(self._launch(Placement.of(counts)))
        self.settled()
        self.stepped()

    def go(self, **counts):
        """Have it go there, and wait until it runs."""
        self.backend.resize(self._launch(Placement.of(counts)))
        self.settled()

    def of_nodes(self, kind):
        """What was told of nodes that came (`NodeUp`) or went."""
        assert kind in (NodeUp, NodeDown)
        return [event for event in self.told if isinstance(event, kind)]
