"""The options of a Ray cluster that lends nodes, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from pollux.core.errors import InvalidInput

__all__ = ["RayOptions"]


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Which Ray cluster lends nodes, and what of them.

    `address`: of the cluster's head, HOST:PORT; `auto` for the one this machine belongs to. `slots`: how many CPU
    slots each node lends instead of its GPUs. `cpu_places`: what Ray calls GPUs are CPU slots, for clusters with
    made-up GPUs. `autoscale`: ask Ray's autoscaler for as many nodes as could be used.
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
