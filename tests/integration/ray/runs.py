"""Backends and a training job on the Ray cluster, for tests and for the processes that they start."""

import json
from pathlib import Path

from pollux.backends.protocol import NodeDown, NodeUp
from pollux.backends.ray.backend import RayBackend
from pollux.storage.state_file import write_state
from pollux.testing.jobs.random_changes import EventRun

SECRET = "5a" * 32


def backend_at(home: Path, address: str, service: str, **more) -> RayBackend:
    """A backend under the name of a service; services that follow one another take over each other's hosts."""
    (home / "run").mkdir(parents=True, exist_ok=True)
    write_state(home / "run" / "fleet.secret", SECRET.encode())
    if not (home / "ray.json").exists():
        (home / "ray.json").write_text(json.dumps({"service": service}))
    return RayBackend(home, address=address, **{"cpu_places": True, **more})


class RayRun(EventRun):
    """A training job of the service `training`; `service` another's."""

    def __init__(self, address, folder, epochs=12, service="training", nodes=3, **more):
        self.service = service
        name = f"job-{service}"
        super().__init__(lambda: backend_at(folder / "home", address, service, **more), folder, epochs, job_id=name)
        self.wait_for("nodes", lambda: len(self.backend.inventory()) >= nodes)

    @property
    def names(self):
        """The nodes there are."""
        return [node.id for node in self.backend.inventory()]

    def of_nodes(self, kind):
        """Events about nodes that came (`NodeUp`) or went (`NodeDown`)."""
        assert kind in (NodeUp, NodeDown)
        return [event for event in self.events if isinstance(event, kind)]
