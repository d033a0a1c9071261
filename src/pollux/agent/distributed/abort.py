"""NCCL when a peer is gone: its collectives are broken off by us, and by nobody else, so that we know what they left.

A collective that waits for a lost peer is a kernel that spins. What the script queued behind it, the optimiser's step
among it, runs on as soon as it is broken off, with gradients that are none.
"""

from __future__ import annotations

import logging
import os
import threading

import torch
import torch.distributed as dist

__all__ = ["abort", "is_idle", "keep_watchdog_out", "watchdog_is_out"]

# The second is its older name. 0: the library reports nothing and ends nothing; 1: it breaks off and ends the process;
# 2: it only breaks off; 3, the default: it only ends the process.
_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
_NONE = "0"
_log = logging.getLogger("pollux")


def keep_watchdog_out() -> None:
    """Before a group is made: its watchdog must not end a process that goes on without the lost ones.

    What the user has set stands.
    """
    if not any(name in os.environ for name in _HANDLING):
        os.environ[_HANDLING[0]] = _NONE


def watchdog_is_out() -> bool:
    """Whether nobody but `abort` breaks collectives off."""
    return next((os.environ[name] for name in _HANDLING if name in os.environ), "") == _NONE


def is_idle(device: torch.device, seconds: float) -> bool:
    """Whether the GPU comes to the end of all that was queued within that time: then no collective waits."""
    done = threading.Event()

    def wait() -> None:
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            _log.debug("the GPU did not come to an end: %s", error)
        else:
            done.set()

    threading.Thread(target=wait, name="pollux-idle", daemon=True).start()
    return done.wait(seconds)


def abort(group: dist.ProcessGroup) -> bool:
    """Break off what waits in a group on NCCL, from any thread; False where this release of PyTorch cannot."""
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
        _log.warning("a group on NCCL was not broken off: %s", error)
    return False
