"""The nodes of a Ray cluster: one bundle per replica on the node that was decided, one actor per node as its host.

A process of its own (`driver`) speaks to Ray; `provider` speaks to that process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from pollux.backends.fleet.backend import FleetBackend
from pollux.backends.ray.options import RayOptions
from pollux.backends.ray.provider import RayNodeProvider

__all__ = ["OLDEST", "RayBackend"]

OLDEST = (2, 50)
"""The oldest Ray that can place a bundle by a label of a node."""


class RayBackend(FleetBackend):
    """Runs jobs on a Ray cluster. This machine must be a node of it, and the package be installed on every node.

    `asked` are the fields of `RayOptions`; the other arguments are those of every fleet.
    """

    options_class: ClassVar[type | None] = RayOptions

    def __init__(
        self,
        home: Path,
        head: str | None = None,
        warm: bool = True,
        hang_seconds: float | None = None,
        lease_seconds: float | None = None,
        lost_seconds: float | None = None,
        **asked: Any,
    ) -> None:
        provider = RayNodeProvider(home, RayOptions(**asked), warm)
        super().__init__(home, provider, "ray", head, warm, hang_seconds, lease_seconds, lost_seconds)

    @classmethod
    def missing(cls) -> str:
        """See `BackendCapabilities.missing`."""
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
        return ""

    @classmethod
    def preview(cls, home: Path, **given: Any) -> str:
        """The requests to Ray in words, without their number, which depends on its nodes and on the jobs."""
        options = RayOptions(**{field.name: given[field.name] for field in fields(RayOptions) if field.name in given})
        is_cpu = options.slots is not None
        place = "{'CPU': 1}" if is_cpu else "{'GPU': 1}"
        lines = [
            f"of the Ray cluster at {options.address}, by its public interface:",
            f"  on each node with {'CPUs' if is_cpu else 'GPUs'}: one detached actor as host, num_cpus=0",
            f"  for each replica of a job: a detached placement group of one bundle {place} on the node decided for it",
        ]
        if is_cpu:
            lines.append(f"  of each node at most {options.slots} of its CPUs")
        if options.autoscale:
            lines.append("  of its autoscaler: as many nodes as jobs could use")
        return "\n".join(lines) + "\n"
