"""Tries once, at submission, whether a job's checkpoints can be written to the store in its request.

A separate process does so with the job's variables, which usually have the keys and addresses of stores.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping

from pollux.core.errors import InvalidInput
from pollux.storage.address import PACKAGES, scheme_of

__all__ = ["note_on_store", "require_store"]

# Less than the timeout of clients.
_SECONDS = 20.0
_STARTERS = ("PYTHON", "LD_")


def require_store(address: str, variables: Mapping[str, str], seconds: float = _SECONDS) -> None:
    """Write, read and remove a small object there; `InvalidInput` if that fails.

    Nothing is tried if the service lacks the package for the store; see `note_on_store`.
    """
    if not _can_try(address):
        return
    # Without variables that change Python itself, which are for the job's interpreter.
    environ = {name: value for name, value in {**os.environ, **variables}.items() if not name.startswith(_STARTERS)}
    command = [sys.executable, "-I", "-m", "pollux.storage.object_store", address]
    try:
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False,
            encoding="utf-8", errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise InvalidInput(
            f"checkpoint: dir: {address} does not answer within {seconds:.0f} s: check its address, the job's key and "
            "the network"
        ) from None
    if done.returncode:
        said = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no reason was given"]
        raise InvalidInput(f"checkpoint: dir: {said[-1]}")


def note_on_store(address: str) -> str:
    """A note for the submitter if the address could not be tried; else empty."""
    if _can_try(address):
        return ""
    return (
        f"whether {address} can be written to was not tried: {PACKAGES[scheme_of(address)]} is not installed beside "
        "the service; the job needs it where it runs"
    )


def _can_try(address: str) -> bool:
    return importlib.util.find_spec(PACKAGES[scheme_of(address)]) is not None
