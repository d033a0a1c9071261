"""Finds a joining replica that waits in a collective of the script's own, which the other replicas never call.

A script may call a collective such as `dist.barrier()` between `pollux.init` and its loop. At a start all replicas call
it. Replicas that train already do not: they and the joining replica would wait for each other for ever.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from torch.distributed import distributed_c10d

from pollux.agent.distributed import authenticated_store
from pollux.wire.live import exit_codes

__all__ = ["StrayCollectiveCheck", "own_collective"]

# The whole agent, and not only this package.
_OURS = str(Path(__file__).parents[1])
_THEIRS = distributed_c10d.__file__
_COLLECTIVES = frozenset(
    (
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "monitored_barrier",
        "new_group",
        "recv",
        "recv_object_list",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "send",
        "send_object_list",
        "split_group",
    )
)
_log = logging.getLogger("pollux")


def own_collective(thread: int) -> str:
    """The collective of `torch.distributed` that a thread is in, called by the script; empty for none."""
    frame, name = sys._current_frames().get(thread), ""
    while frame is not None:
        code = frame.f_code
        # PyTorch calls our store for collectives of the script too.
        if code.co_filename.startswith(_OURS) and code.co_filename != authenticated_store.__file__:
            return ""
        if code.co_filename == _THEIRS and code.co_name in _COLLECTIVES:
            name = code.co_name
        frame = frame.f_back
    return name


class StrayCollectiveCheck:
    """Watches a joining replica's thread, from another thread, until it comes to its training loop.

    It calls `tell` with the reason why the job cannot change while it runs, then ends the process, which frees the
    other replicas.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._thread: int | None = None

    def watch_this_thread(self) -> None:
        """Watch this thread, which has joined and runs the script from here."""
        self._thread = threading.get_ident()

    def stop_watching(self) -> None:
        """Stop watching: the thread has come to its training loop, like all replicas."""
        self._thread = None

    def check(self) -> None:
        """End this process if the thread waits in a collective of the script's own."""
        name = "" if self._thread is None else own_collective(self._thread)
        if name:
            why = (
                f"the script calls torch.distributed.{name} between pollux.init and its first batch, which "
                "replicas that train already do not call: leave it out, since pollux.init makes replicas alike; "
                "until then the job moves by a restart"
            )
            _log.error("%s", why)
            self._tell(why)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_codes.RESTART)
