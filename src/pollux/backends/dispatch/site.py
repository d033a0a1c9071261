"""What a dispatcher asks of the place where its jobs run: which nodes come and go, and whether a job can run there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pollux.backends.dispatch.job_table import DispatchedJob, JobTable
from pollux.backends.dispatch.worker_thread import WorkerThread
from pollux.backends.nodes.slot import Slot
from pollux.backends.protocol import Launch
from pollux.wire.live.messages import ShimMessage

__all__ = ["FolderCheck", "Site"]


@dataclass(frozen=True, slots=True)
class FolderCheck:
    """Why folders cannot be used on some nodes, empty where they can.

    `silent`: a node that did not answer, so that it is not known. `elsewhere`: other nodes share them.
    """

    why: str = ""
    silent: str = ""
    elsewhere: bool = False


class Site:
    """This machine, where nothing comes or goes; for other nodes see `fleet.node_watch`. Called under the lock."""

    def attach(self, thread: WorkerThread, table: JobTable) -> None:
        """Get to know the dispatcher's thread and its jobs."""

    def start(self) -> None:
        """Begin, before the jobs of a time before are looked for."""

    def step(self) -> None:
        """Follow what came and went, before jobs are moved on."""

    def check(self, launch: Launch, slots: Sequence[Slot]) -> FolderCheck | None:
        """Whether these slots can be used by the job; None: not known yet, and the thread is woken once it is."""
        return FolderCheck()

    def heard(self, job: DispatchedJob, message: ShimMessage) -> bool:
        """Whether what a shim told is about nodes alone, and has been dealt with."""
        return False

    def close(self) -> None:
        """Let go."""
