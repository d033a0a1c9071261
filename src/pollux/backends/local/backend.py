"""This machine as a cluster of one node: a replica per GPU, or per CPU slot where there is no GPU.

The thread in `dispatch` and the jobs' shims do the work; shims go on when the service ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pollux.backends.dispatch.dispatcher import Dispatcher, ShimSettings
from pollux.backends.dispatch.shim_backend import ShimBackend, can_be_warm, seconds_of_hang
from pollux.backends.dispatch.slots import LocalSlotAllocator
from pollux.backends.process import replica_env
from pollux.backends.process.devices import Devices, find_devices
from pollux.backends.process.log_file import DEFAULT_CAP_BYTES
from pollux.backends.protocol import Launch
from pollux.core import Node
from pollux.core.errors import BackendFailed

__all__ = ["LocalBackend"]


class LocalBackend(ShimBackend):
    """Runs jobs on this machine; several objects, one after another, may work in the same `home`.

    `slots`: use this number of CPU slots instead of GPUs; None for the GPUs, or one slot per core without GPUs. `warm`:
    keep a process that has imported PyTorch (some 300 MB), from which `python SCRIPT` jobs start in milliseconds.
    `hang_seconds`: silence after which a replica of a live job is killed as hung; None for POLLUX_HANG_SECONDS, or 30.
    `orphan_seconds`: stop jobs, with their grace, when no service has been connected for this time, as after a
    `kill -9`; None: they go on, and the next object finds them.
    """

    name = "local"

    def __init__(
        self,
        home: Path,
        slots: int | None = None,
        warm: bool = True,
        log_cap_bytes: int = DEFAULT_CAP_BYTES,
        hang_seconds: float | None = None,
        orphan_seconds: float | None = None,
    ) -> None:
        self._devices = find_devices(slots, os.environ)
        home, environ = Path(home).absolute(), replica_env.inherited(os.environ)
        hang = seconds_of_hang(hang_seconds)
        settings = ShimSettings(environ, can_be_warm(warm), hang, orphan_seconds, log_cap_bytes)
        self._slots = LocalSlotAllocator(self._devices, environ)
        super().__init__(
            home,
            Dispatcher(home, self._slots, settings),
            lambda launch, is_change: _check_placement(launch, self._devices),
        )

    @classmethod
    def missing(cls) -> str:
        """See `BackendCapabilities.missing`."""
        if sys.platform.startswith("linux"):
            return ""
        return f"it follows processes through /proc, which {sys.platform} does not have; use Linux, or 'inline'"

    def inventory(self) -> tuple[Node, ...]:
        """The one node; without GPUs its type is `cpu`, and its "GPUs" are CPU slots."""
        return (self._devices.node,)

    @property
    def no_gpus(self) -> tuple[str, str]:
        """Why no GPU was found, and what to do; empty where some were found, or CPU slots were asked for."""
        return self._devices.why_none, self._devices.remedy

    def warnings(self) -> tuple[str, ...]:
        """Warnings: jobs get CPU slots on a machine that has a driver for GPUs, or a GPU is suspect."""
        why, remedy = self.no_gpus
        none = (f"jobs get CPU slots instead of GPUs ({why}): {remedy}",) if why and self._devices.has_driver else ()
        return (*none, *self._slots.warnings())


def _check_placement(launch: Launch, devices: Devices) -> None:
    node = devices.node
    held = launch.placement.on(node.id)
    if launch.placement.num_gpus != held or not 1 <= held <= node.num_gpus:
        what = "CPU slots" if devices.is_cpu else "GPUs"
        raise BackendFailed(
            f"job '{launch.job_id}' cannot be placed at '{launch.placement}': there is only '{node.id}' here, with "
            f"{node.num_gpus} {what}"
        )
