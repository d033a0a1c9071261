"""A job's store for tests, hosted by a process of its own as that of a real job is."""

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
    """The store at `access`; what it says about those whom it refused goes to the file `log`, if one is given."""

    def __init__(self, log: Path | None = None) -> None:
        def settle() -> None:
            if log is not None:
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)

        listening = ListeningStore()
        self.access: StoreAccess = listening.access
        with warnings.catch_warnings():
            # Tests have threads; the host runs nothing but what it was forked for.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process = listening.fork_host(settle)
        listening.close()

    def close(self) -> None:
        """End its host."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
