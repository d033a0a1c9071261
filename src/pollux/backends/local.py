"""This machine as a cluster of one node: a replica per GPU, or per CPU slot where there is no GPU.

Here is what may be asked of it; the work is done by the thread in `_work`, and by the jobs' shims (`shim`), which go on
when the service ends.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pollux.backends import _variables
from pollux.backends._beats import DEFAULT_HANG_SECONDS
from pollux.backends._devices import find_devices
from pollux.backends._logfile import DEFAULT_CAP_BYTES, read_log
from pollux.backends._records import check_job_id, log_folder
from pollux.backends._work import Work
from pollux.backends.protocol import Launch, Listener, LogChunk, Running
from pollux.core import Node
from pollux.core.errors import BackendFailed, InvalidInput

__all__ = ["LocalBackend"]


class LocalBackend:
    """Runs jobs on this machine; several objects, one after another, may work in the same `home`.

    `slots`: so many CPU slots instead of GPUs; None for the GPUs, or one slot per core without any. `warm`: keep a
    process that has imported PyTorch (some 300 MB), from which `python SCRIPT` jobs start in milliseconds.
    `hang_seconds`: silence after which a replica of a live job is ended as hung; None for POLLUX_HANG_SECONDS, or 30.
    """

    name = "local"
    restart_seconds = 5.0
    live_seconds = 1.0

    def __init__(
        self,
        home: Path,
        slots: int | None = None,
        warm: bool = True,
        log_cap_bytes: int = DEFAULT_CAP_BYTES,
        hang_seconds: float | None = None,
    ) -> None:
        self._home = Path(home).absolute()
        self._devices = find_devices(slots, os.environ)
        can_warm = warm and importlib.util.find_spec("torch") is not None
        environ = _variables.inherited(os.environ)
        hang = _hang_seconds(os.environ) if hang_seconds is None else hang_seconds
        self._work = Work(self._home, self._devices, environ, can_warm, log_cap_bytes, hang)

    @property
    def is_warm(self) -> bool:
        """Whether jobs start from a process that has everything imported; false while that one is on its way."""
        nursery = self._work.nursery
        return nursery is not None and nursery.is_ready

    @property
    def healthy(self) -> bool:
        """Whether its thread runs and gets its work done; false after several turns in a row that failed."""
        return self._work.healthy

    def start(self, listener: Listener) -> None:
        """Find what runs from before and tell how what ended meanwhile did; one object at a time works in a home."""
        self._work.start(listener)

    def inventory(self) -> tuple[Node, ...]:
        """One node; where it has no GPU, its type is `cpu` and its "GPUs" are CPU slots."""
        return (self._devices.node,)

    def render(self, launch: Launch) -> Mapping[str, Any]:
        """Command, folder, and each replica's variables beside what it inherits; which GPUs is seen at the start."""
        self._check(launch)
        places = range(launch.placement.num_gpus)
        identity = _variables.run_id(self._home, launch.job_id, launch.generation)
        common = _variables.common_variables(launch, self._devices, places, identity)
        unknown = {"MASTER_PORT": "chosen at the start"}
        if not self._devices.is_cpu:
            unknown["CUDA_VISIBLE_DEVICES"] = f"{len(places)} of {len(self._devices.gpus)}, chosen at the start"
        if launch.live:
            unknown |= {"POLLUX_STORE": "chosen at the start"}
        return {
            "backend": self.name,
            "node": self._devices.node.id,
            "argv": list(launch.argv),
            "workdir": launch.workdir,
            "grace_seconds": launch.grace_seconds,
            "memory_bytes_per_gpu": launch.memory_bytes_per_gpu,
            "replicas": [{**common, **_variables.replica_variables(number), **unknown} for number in places],
        }

    def submit(self, launch: Launch) -> None:
        """Start it as soon as its places are free; a generation that is not newer than the newest known is ignored."""
        self._check(launch)
        self._work.submit(launch)

    def resize(self, launch: Launch) -> None:
        """Another number of replicas, in living processes where the job was launched `live`; else by a restart.

        Those that stay keep their places. GPUs that are not free yet are waited for while the job goes on.
        """
        self._check(launch)
        self._work.resize(launch)

    def stop(self, job_id: str, generation: int, grace_seconds: float) -> None:
        """End what the job has up to that generation; what still waits ends at once."""
        self._work.stop(job_id, generation, grace_seconds)

    def running(self) -> tuple[Running, ...]:
        """Every job that was not forgotten, with its newest generation."""
        return self._work.running()

    def logs(self, job_id: str, replica: int = 0, offset: int = 0, limit: int = 65536) -> LogChunk:
        """A piece of `home/logs/<job>/<replica>.log`; empty where that replica never wrote anything."""
        if replica < 0 or limit < 1:
            raise InvalidInput(f"replica is {replica} and limit {limit}: give 0 or more, and 1 or more")
        return read_log(log_folder(self._home, check_job_id(job_id)) / f"{replica}.log", offset, limit)

    def forget(self, job_id: str) -> None:
        """Remove its records, now or, where it still runs, when it has ended; its logs stay."""
        self._work.forget(job_id)

    def close(self) -> None:
        """Let go of everything; shims and replicas go on, and a new object with the same home finds them."""
        self._work.close()

    def _check(self, launch: Launch) -> None:
        check_job_id(launch.job_id)
        node = self._devices.node
        held = launch.placement.on(node.id)
        if launch.placement.num_gpus != held or not 1 <= held <= node.num_gpus:
            what = "CPU slots" if self._devices.is_cpu else "GPUs"
            raise BackendFailed(
                f"job '{launch.job_id}' cannot be placed at '{launch.placement}': there is only '{node.id}' here, with "
                f"{node.num_gpus} {what}"
            )
        if not launch.argv or launch.generation < 1:
            raise InvalidInput(f"job '{launch.job_id}' needs a command and a generation of 1 or more")
        words = (*launch.argv, launch.workdir, *launch.env, *launch.env.values())
        if any("\0" in word for word in words):
            raise InvalidInput(f"job '{launch.job_id}': its command, folder or variables hold a zero byte; remove it")


def _hang_seconds(environ: Mapping[str, str]) -> float:
    text = environ.get("POLLUX_HANG_SECONDS", "")
    try:
        seconds = float(text or DEFAULT_HANG_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise InvalidInput(f"POLLUX_HANG_SECONDS is '{text}': give a number of seconds above 0, or unset it")
    return seconds
