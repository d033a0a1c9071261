"""The first line that a new driver reads: which cluster, how to start hosts, and the claims of the service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["DriverOrder"]


@dataclass(frozen=True, slots=True)
class DriverOrder:
    """What a driver has to do.

    `secret`: given to hosts. `prefix`: the beginning of the names of the service's placement groups. `slots`: CPU slots
    of each node instead of its GPUs, or None. `with_gpus`: whether Ray's GPUs are real ones. `warm`: whether hosts
    import everything beforehand. `claims`: the name of the node by the name of the placement group. `desired`: how many
    nodes to ask the autoscaler for, None where it is not used; `awaited`: a job without GPUs waits for them; `size`:
    the places of each of these nodes, 0 for as many as the largest node has.
    """

    secret: str
    prefix: str
    address: str = "auto"
    namespace: str = ""
    slots: int | None = None
    with_gpus: bool = True
    warm: bool = True
    claims: Mapping[str, str] = field(default_factory=dict)
    desired: int | None = None
    awaited: bool = False
    size: int = 0

    @property
    def needs_gpu_numbers(self) -> bool:
        """Whether it matters which GPU is behind a claim; to find out takes a process on the node."""
        return self.with_gpus and self.slots is None

    @property
    def bundle(self) -> dict[str, int]:
        """The resources of one place, in Ray's words."""
        return {"CPU": 1} if self.slots is not None else {"GPU": 1}
