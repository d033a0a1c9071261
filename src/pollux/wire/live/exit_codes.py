"""Exit codes of replicas, which tell the shim why a replica has ended."""

from __future__ import annotations

__all__ = ["RESTART", "STOPPED"]

RESTART = 75
"""The replica cannot go on by itself: its job starts again from the checkpoint."""

STOPPED = 143
"""The replica was asked to stop, and its job can be resumed. It is the code of a process that SIGTERM ended."""
