"""The nodes of a Ray cluster: one bundle per replica on the node that was decided, one actor per node as its host.

Here is what may be asked of it; Ray is spoken to by a process of its own (`driver`), through `provider`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

from pollux.backends.fleet.backend import FleetBackend
from pollux.backends.ray.provider import RayLender
from pollux.core.errors import InvalidInput

__all__ = ["OLDEST", "RayBackend", "missing"]

OLDEST = (2, 50)
"""The oldest Ray that takes a node's label for a bundle."""


class RayBackend(FleetBackend):
    """Runs jobs on a Ray cluster, of which this machine must be a node; the package must be installed on every node.

    `address`: of the cluster's head, HOST:PORT; `auto` for the one this machine belongs to. `slots`: so many CPU slots
    of each node instead of its GPUs. `cpu_places`: what Ray calls GPUs are CPU slots, for clusters with made-up GPUs.
    `autoscale`: ask Ray's autoscaler for as many nodes as could be used. `head`, `lease_seconds` and `lost_seconds` as
    for every fleet.
    """

    def __init__(
        self,
        home: Path,
        address: str = "auto",
        slots: int | None = None,
        cpu_places: bool = False,
        autoscale: bool = False,
        head: str | None = None,
        warm: bool = True,
        hang_seconds: float | None = None,
        lease_seconds: float | None = None,
        lost_seconds: float | None = None,
    ) -> None:
        if slots is not None and (isinstance(slots, bool) or slots < 1):
            raise InvalidInput(f"slots is {slots}: give 1 or more CPU slots for each node, or leave it out")
        lender = RayLender(home, _checked(address), slots, not cpu_places, autoscale, warm)
        super().__init__(
            home, lender, "ray", head, warm=warm, hang_seconds=hang_seconds, lease_seconds=lease_seconds,
            lost_seconds=lost_seconds,
        )  # fmt: skip

    @classmethod
    def preview(cls, home: Path, **given: Any) -> str:
        """What Ray will be asked for, in words: how much depends on its nodes and on the jobs."""
        address, slots = _checked(str(given.get("address", "auto"))), given.get("slots")
        place = "{'CPU': 1}" if slots is not None else "{'GPU': 1}"
        lines = [
            f"of the Ray cluster at {address}, by its public interface:",
            f"  on each node with {'CPUs' if slots is not None else 'GPUs'}: one detached actor as host, num_cpus=0",
            f"  for each replica of a job: a detached placement group of one bundle {place} on the node decided for it",
        ]
        if slots is not None:
            lines.append(f"  of each node at most {slots} of its CPUs")
        if given.get("autoscale"):
            lines.append("  of its autoscaler: as many nodes as jobs could use")
        return "\n".join(lines) + "\n"


def missing() -> str | None:
    """What is missing for this backend on this machine, and how to get it; None where it can be used."""
    remedy = "pip install 'pollux-scheduler[ray]'"
    if importlib.util.find_spec("ray") is None:
        return f"there is no Ray for this Python: {remedy}"
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return f"there is something called ray here that is not Ray: {remedy}"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        return f"Ray is {version} and must be {'.'.join(map(str, OLDEST))} or newer, on every node: {remedy}"
    return None


def _checked(address: str) -> str:
    if address.startswith("ray://"):
        raise InvalidInput(
            f"address is '{address}', which is for Ray's client: run the service on a node of the cluster, and give "
            "HOST:PORT of its head, or auto"
        )
    host, colon, port = address.rpartition(":")
    if address != "auto" and not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise InvalidInput(f"address is '{address}': give HOST:PORT of the head, such as 10.0.0.1:6379, or auto")
    return address
