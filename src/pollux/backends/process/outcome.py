"""Judges how a generation ended by the exits of its replicas, with one line for people. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence

from pollux.backends.protocol import Exit, Outcome

__all__ = ["judge", "said_last"]

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (?:can't|not enough)|\bMemoryError\b|std::bad_alloc|Cannot allocate memory"
)
_LONGEST_LINE = 300


def said_last(tail: bytes) -> str:
    """The most useful line at the end of a log: that of an exception where there is one, else the last."""
    # PyTorch puts the rank before an exception.
    plain = (re.sub(r"^\[rank\d+\]:", "", line).strip() for line in tail.decode(errors="replace").splitlines())
    lines = [line for line in plain if line]
    errors = [line for line in lines[-30:] if re.match(r"[\w.]*(?:Error|Exception|Interrupt|Exit)\b", line)]
    chosen = errors[-1] if errors else lines[-1] if lines else ""
    return chosen if len(chosen) <= _LONGEST_LINE else chosen[:_LONGEST_LINE] + "..."


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _line(culprit: Exit, tail: bytes) -> str:
    said = said_last(tail)
    return f"replica {culprit.replica}: {_ending(culprit.code)}" + (f": {said}" if said else "")


def judge(
    exits: Sequence[Exit],
    tails: Mapping[int, bytes],
    told_to_stop: bool,
    ended_by_us: frozenset[int],
    over_memory: str = "",
    kernel_killed: bool = False,
    asked: frozenset[int] = frozenset(),
) -> tuple[Outcome, str]:
    """The outcome, and its detail in one line.

    `over_memory`: a sentence, with numbers, if a replica passed its memory limit. `kernel_killed`: the kernel killed
    processes for lack of memory meanwhile. Replicas in `ended_by_us` were ended because another had failed, so they are
    not the cause. Replicas in `asked` were asked to end: their exit code 0 means that they saved, not that they
    finished.
    """
    if exits and all(exit_.code == 0 and exit_.replica not in asked for exit_ in exits):
        return "succeeded", ""
    if told_to_stop:
        return "stopped", ""
    if over_memory:
        return "out-of-memory", over_memory
    causes = _causes(exits, ended_by_us)
    if not causes:
        return "crashed", "its replicas were ended" if exits else "no replica could be started"
    for cause in causes:
        why = _lack_of_memory(cause, tails.get(cause.replica, b""), kernel_killed)
        if why:
            return "out-of-memory", why
    return "crashed", _line(causes[0], tails.get(causes[0].replica, b""))


def _causes(exits: Sequence[Exit], ended_by_us: frozenset[int]) -> list[Exit]:
    """The failures that can have caused the others, in the order of time."""
    failed = sorted((exit_ for exit_ in exits if exit_.code != 0), key=lambda exit_: (exit_.at, exit_.replica))
    return [exit_ for exit_ in failed if exit_.replica not in ended_by_us] or failed


def _lack_of_memory(cause: Exit, tail: bytes, kernel_killed: bool) -> str:
    """A line that shows that a replica failed for lack of memory; empty where nothing shows it."""
    if _OUT_OF_MEMORY.search("\n".join(tail.decode(errors="replace").splitlines()[-40:])):
        return _line(cause, tail)
    if cause.code == -signal.SIGKILL and kernel_killed:
        return f"replica {cause.replica}: killed by the kernel, which had run out of memory"
    return ""
