"""A job's store for tests, in a process of its own like the store of a real job."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from pathlib import Path

from pollux.backends.shim.store.server import ListeningStore
from pollux.wire.live.store_channel import StoreAccess

__all__ = ["HostedStore"]


class HostedStore:
    """The store at `access`; messages about refused connections go to the file `log`, if there is one."""

    def __init__(self, log: Path | None = None) -> None:
        def redirect_errors() -> None:
            if log is not None:
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)

        listening = ListeningStore()
        self.access: StoreAccess = listening.access
        with warnings.catch_warnings():
            # Python warns of forks in a process with threads; the forked host uses none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process = listening.fork_host(redirect_errors)
        listening.close()

    def close(self) -> None:
        """Kill the store's process."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
