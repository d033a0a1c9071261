"""Aborts collectives on NCCL after a replica was lost; only we abort them, so that we know which steps were spoiled.

A collective that waits for a lost replica is a kernel that spins. When it is aborted, the work that the script queued
behind it runs, even an optimiser step, with gradients that were not averaged.
"""

from __future__ import annotations

import logging
import os
import threading

import torch
import torch.distributed as dist

__all__ = ["abort", "is_idle", "keep_watchdog_out", "watchdog_is_out"]

# The second is the older name. Values: 0, PyTorch does nothing; 1, it aborts the collective and ends the process; 2, it
# only aborts; 3, the default, it only ends the process.
_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
_NONE = "0"
_log = logging.getLogger("pollux")


def keep_watchdog_out() -> None:
    """Disable the watchdog of later groups, which would end a process that survives a loss.

    A value that the user has set stays.
    """
    if not any(name in os.environ for name in _HANDLING):
        os.environ[_HANDLING[0]] = _NONE


def watchdog_is_out() -> bool:
    """Whether only `abort` aborts collectives."""
    return next((os.environ[name] for name in _HANDLING if name in os.environ), "") == _NONE


def is_idle(device: torch.device, seconds: float) -> bool:
    """Whether the GPU finishes its queue within that time, so that no collective waits."""
    done = threading.Event()

    def wait() -> None:
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            _log.debug("the GPU did not finish its queue: %s", error)
        else:
            done.set()

    threading.Thread(target=wait, name="pollux-idle", daemon=True).start()
    return done.wait(seconds)


def abort(group: dist.ProcessGroup) -> bool:
    """Abort the collectives of a group on NCCL, from any thread; false where this release of PyTorch cannot."""
    try:
        if hasattr(group, "abort"):
            group.abort()
            return True
        backend = group._get_backend(torch.device("cuda"))
        for name in ("abort", "_abort"):
            if hasattr(backend, name):
                getattr(backend, name)()
                return True
    except RuntimeError as error:
        _log.warning("the collectives of a group on NCCL were not aborted: %s", error)
    return False
