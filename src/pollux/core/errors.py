"""The one tree of errors that people may see.

    PolluxError                 anything we raise on purpose
    ├── InvalidInput            the user can fix it: exit code 2
    │   ├── UnknownName         a name that is not there; suggests the closest
    │   ├── CheckpointMismatch  a checkpoint of another model, optimiser, dataset or version
    │   ├── MisusedJob          a training job's object used out of order
    │   ├── Conflict            it clashes with what is there, such as a name in use
    │   ├── TooLarge            more than is accepted
    │   └── WorkdirMissing      a job's folder that is not where the job is to run
    ├── CheckpointDamaged       checkpoints are there, but none of them is whole
    ├── NonFiniteValue          a loss or gradient that is NaN or infinite
    ├── IllegalTransition       a job was told to do what its state forbids
    ├── Unauthorised            no token, or one that is not known
    ├── Forbidden               a token that may not do this
    ├── Unreachable             the service, or what it needs, is not there now
    │   └── TooOften            it is asked more often than it answers: later it does
    ├── StoreFailed             a fact could not be written or read: disk full, damaged, locked
    ├── BackendFailed           replicas could not be started, or their engine does not answer
    └── BrokenDecision          a policy returned what check() refuses: our bug

The classes carry exit and HTTP codes, so that no caller keeps its own table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BackendFailed",
    "BrokenDecision",
    "CheckpointDamaged",
    "CheckpointMismatch",
    "Conflict",
    "Forbidden",
    "IllegalTransition",
    "InvalidInput",
    "MisusedJob",
    "NonFiniteValue",
    "PolluxError",
    "StoreFailed",
    "TooLarge",
    "TooOften",
    "Unauthorised",
    "UnknownName",
    "Unreachable",
    "WorkdirMissing",
    "choices",
]


def choices(name: str, known: Iterable[str]) -> str:
    """The known names, the closest first: the end of a message about an unknown name."""
    names = sorted(known)
    if not names:
        return "there is none yet"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}known: {', '.join(names)}"


class PolluxError(Exception):
    """Root of the tree; the message names the thing, the value seen and what to do."""

    exit_code: int = 1
    http_status: int = 500
    retryable: bool = False


class InvalidInput(PolluxError):
    """Input that cannot be used as it is."""

    exit_code = 2
    http_status = 422


class UnknownName(InvalidInput):
    """A name that is not among the known ones."""

    http_status = 404

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown {what} '{name}': {choices(name, known)}")


class CheckpointMismatch(InvalidInput):
    """A checkpoint that is whole, but of another model, optimiser, dataset or version."""

    http_status = 409


class MisusedJob(InvalidInput):
    """A call on a training job that its state does not allow, such as a second `init`."""

    http_status = 409


class Conflict(InvalidInput):
    """Something that clashes with what is there already."""

    http_status = 409


class TooLarge(InvalidInput):
    """More than is accepted."""

    http_status = 413


class WorkdirMissing(InvalidInput):
    """The service's machine or its nodes lack a job's working folder; the job can bring it along."""


class Unauthorised(PolluxError):
    """No token was shown, or one that is not known."""

    exit_code = 77
    http_status = 401


class Forbidden(PolluxError):
    """A token that is known, but may not do this."""

    exit_code = 77
    http_status = 403


class Unreachable(PolluxError):
    """The service, or something it needs, does not answer; trying again later may help."""

    exit_code = 69
    http_status = 503
    retryable = True


class TooOften(Unreachable):
    """Asked more often than is answered; a second later it is."""

    http_status = 429


class StoreFailed(PolluxError):
    """A fact could not be written or read: it has no effect."""

    exit_code = 74
    http_status = 507
    retryable = True


class BackendFailed(PolluxError):
    """Replicas could not be started, or their engine does not answer."""

    exit_code = 71
    http_status = 503
    retryable = True


class CheckpointDamaged(PolluxError):
    """Checkpoints exist, but none of them passes its checksums."""


class NonFiniteValue(PolluxError):
    """A loss, gradient or parameter became NaN or infinite."""


class IllegalTransition(PolluxError):
    """A change of state that the lifecycle table does not have."""

    exit_code = 70
    http_status = 409


class BrokenDecision(PolluxError):
    """A decision that breaks a rule on the snapshot it was made from."""

    exit_code = 70
