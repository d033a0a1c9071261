"""The part that backends with shims have in common, on one machine or on many."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from pollux.backends.dispatch.dispatcher import Dispatcher
from pollux.backends.process.log_file import read_log
from pollux.backends.process.records import check_job_id, log_folder, run_folder
from pollux.backends.process.run_time import ran_seconds
from pollux.backends.protocol import BackendCapabilities, Launch, Listener, LogChunk, Running
from pollux.core.errors import InvalidInput
from pollux.wire.live.heartbeat import DEFAULT_HANG_SECONDS

__all__ = ["PlacementCheck", "ShimBackend", "can_be_warm", "seconds_from", "seconds_of_hang"]


PlacementCheck = Callable[[Launch, bool], None]
"""Raises BackendFailed for an impossible placement; the second argument is True for the resize of a running job."""


class ShimBackend(BackendCapabilities):
    """A backend over a `Dispatcher`; several objects, one after another, may work in the same `home`."""

    restart_seconds = 5.0
    live_seconds = 1.0

    def __init__(self, home: Path, dispatcher: Dispatcher, check_placement: PlacementCheck) -> None:
        self._home = home
        self._dispatcher = dispatcher
        self._check_placement = check_placement

    @property
    def is_warm(self) -> bool:
        """Whether jobs start from a process that has imported everything; false while that process still imports."""
        forkserver = self._dispatcher.forkserver
        return forkserver is not None and forkserver.is_ready

    @property
    def healthy(self) -> bool:
        """Whether the backend's thread runs, and its work has not failed several turns in a row."""
        return self._dispatcher.thread.healthy

    @property
    def false_alarms(self) -> int:
        """How many nodes or replicas have answered after they had been given up, since this object was made."""
        return self._dispatcher.shims.false_alarms

    @property
    def refusals(self) -> int:
        """How many connections from strangers the jobs' processes here refused since this object was made."""
        return self._dispatcher.shims.refusals

    def start(self, listener: Listener) -> None:
        """Find running jobs, and report the jobs that ended meanwhile; only one object at a time may work in a home."""
        self._dispatcher.start(listener)

    def submit(self, launch: Launch) -> None:
        """Start the job as soon as slots are free; ignore a generation unless it is newer than all known ones."""
        _check_words(launch)
        self._check_placement(launch, False)
        self._dispatcher.submit(launch)

    def resize(self, launch: Launch) -> None:
        """Change the number of replicas: by a live resize where the job was launched `live`, else by a restart.

        Replicas that stay keep their slots. The job goes on while it waits for GPUs that are not free yet.
        """
        _check_words(launch)
        self._check_placement(launch, True)
        self._dispatcher.resize(launch)

    def stop(self, job_id: str, generation: int, grace_seconds: float) -> None:
        """End the job's generations up to that one; a generation that still waits ends at once."""
        self._dispatcher.stop(job_id, generation, grace_seconds)

    def running(self) -> tuple[Running, ...]:
        """Every job that was not forgotten, with its newest generation."""
        return self._dispatcher.running()

    def ran_seconds(self, job_id: str, generation: int) -> float | None:
        """For how long the replicas of a generation have run, as their shim measured; None if not reported."""
        return ran_seconds(run_folder(self._home, check_job_id(job_id)), generation)

    def logs(self, job_id: str, replica: int = 0, offset: int = 0, limit: int = 65536) -> LogChunk:
        """A piece of `home/logs/<job>/<replica>.log`; empty where that replica has written nothing."""
        if replica < 0 or limit < 1:
            raise InvalidInput(f"replica is {replica} and limit {limit}: give 0 or more, and 1 or more")
        return read_log(log_folder(self._home, check_job_id(job_id)) / f"{replica}.log", offset, limit)

    def forget(self, job_id: str) -> None:
        """Remove the job's records, now or once it has ended; its logs stay."""
        self._dispatcher.forget(job_id)

    def close(self) -> None:
        """Stop the thread and close all connections; shims and replicas go on, and a new object finds them."""
        self._dispatcher.close()


def _check_words(launch: Launch) -> None:
    check_job_id(launch.job_id)
    if not launch.argv or launch.generation < 1:
        raise InvalidInput(f"job '{launch.job_id}' needs a command and a generation of 1 or more")
    words = (*launch.argv, launch.workdir, *launch.env, *launch.env.values())
    if any("\0" in word for word in words):
        raise InvalidInput(f"job '{launch.job_id}': its command, folder or variables hold a zero byte; remove it")


def seconds_from(name: str, default: float, environ: Mapping[str, str] = os.environ) -> float:
    """The seconds in an environment variable, or the default; InvalidInput for anything but a number above 0."""
    text = environ.get(name, "")
    try:
        seconds = float(text or default)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise InvalidInput(f"{name} is '{text}': give a number of seconds above 0, or unset it")
    return seconds


def can_be_warm(wanted: bool) -> bool:
    """Whether jobs can start from a process that has imported PyTorch: it is `wanted`, and PyTorch is installed."""
    return wanted and importlib.util.find_spec("torch") is not None


def seconds_of_hang(given: float | None) -> float:
    """The silence after which a replica counts as hung: as given, else POLLUX_HANG_SECONDS, else 30."""
    return seconds_from("POLLUX_HANG_SECONDS", DEFAULT_HANG_SECONDS) if given is None else given
