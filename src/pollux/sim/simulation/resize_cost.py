"""What a simulated resize costs: how long a job pauses when its GPUs change.

A constant number of seconds, the same for live resizes and restarts; or, with `auto`, a model of its state and of
bandwidths (`PauseModel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pollux.sim.applications.application import Application

__all__ = ["AUTO", "DEFAULT_RESIZE_SECONDS", "DEFAULT_STATE_BYTES", "PauseModel", "Pauses"]

AUTO: Literal["auto"] = "auto"
"""Instead of a number of seconds: the pause is that of the model."""

DEFAULT_RESIZE_SECONDS = 30.0
"""The default pause of every job, however large its state; `SimulationSettings.resize_seconds` replaces it."""

DEFAULT_STATE_BYTES = 1.2e9
"""For an application without a size: 100 million parameters in float32 with Adam's two moments, 12 bytes each."""


@dataclass(frozen=True, slots=True)
class PauseModel:
    """Pauses from bytes of state, in seconds; bandwidths in bytes per second.

    live(b) = live_seconds + b / network_bandwidth: replicas stay, agree on a step, regroup and send the state once.
    restart(b) = start_seconds + 2 b / disk_bandwidth: write, start processes, read. first = start_seconds.
    The defaults: 0.3 s for regrouping and the first step (measured for small states on one machine: 0.03 to 1 s), 30 s
    for new processes on a cluster (as published systems have it), 2.5 GB/s (a 25 Gb/s network at 80 %), 1 GB/s a disk.
    """

    live_seconds: float = 0.3
    start_seconds: float = 30.0
    network_bandwidth: float = 2.5e9
    disk_bandwidth: float = 1.0e9

    def live(self, state_bytes: float) -> float:
        """The pause of a live resize."""
        return self.live_seconds + state_bytes / self.network_bandwidth

    def restart(self, state_bytes: float) -> float:
        """The pause of a restart, including the writing of the checkpoint."""
        return self.start_seconds + 2.0 * state_bytes / self.disk_bandwidth

    def first(self) -> float:
        """The time of a first start."""
        return self.start_seconds


@dataclass(frozen=True, slots=True)
class Pauses:
    """The pauses of one simulation: `seconds` for all, or AUTO for those of `model`."""

    seconds: float | Literal["auto"]
    model: PauseModel = PauseModel()

    def expected(self, application: Application) -> float:
        """The expected pause that policies see."""
        return self.change(application)

    def change(self, application: Application) -> float:
        """The pause of a running job that is resized."""
        return self.model.live(_state_bytes(application)) if self.seconds == AUTO else self.seconds

    def start(self, application: Application, is_first: bool) -> float:
        """The time of a start."""
        if self.seconds != AUTO:
            return self.seconds
        return self.model.first() if is_first else self.model.restart(_state_bytes(application))


def _state_bytes(application: Application) -> float:
    return DEFAULT_STATE_BYTES if application.state_bytes is None else application.state_bytes
