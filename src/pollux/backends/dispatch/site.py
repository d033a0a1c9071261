"""The nodes of a dispatcher: which come and go, and whether a job can use them."""

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
    """Why folders cannot be used on some nodes; empty where they can.

    `silent`: a node that did not answer, so that its folders are unknown. `elsewhere`: other nodes share the folders.
    """

    why: str = ""
    silent: str = ""
    elsewhere: bool = False


class Site:
    """The nodes of a backend on one machine; `fleet.node_watch` has those of a fleet. Called with the lock held."""

    def attach(self, thread: WorkerThread, table: JobTable) -> None:
        """Keep the dispatcher's thread and its jobs."""

    def start(self) -> None:
        """Find nodes, before the dispatcher looks for running jobs."""

    def step(self) -> None:
        """Report nodes that came or went, before the dispatcher advances jobs."""

    def check(self, launch: Launch, slots: Sequence[Slot]) -> FolderCheck | None:
        """Whether the job can use these slots; None: not known yet, the thread is woken once it is."""
        return FolderCheck()

    def handle_message(self, job: DispatchedJob, message: ShimMessage) -> bool:
        """Handle a shim's message about a node; False where the message is about its job."""
        return False

    def close(self) -> None:
        """Release threads and connections."""
