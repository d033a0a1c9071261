"""Turns an error of Ray into one line for people."""

from __future__ import annotations

from pollux.core.errors import BackendFailed

__all__ = ["SAME_VERSION", "connection_error", "one_line"]

_LONGEST = 600
_OURS = f"{BackendFailed.__module__}.{BackendFailed.__qualname__}: "

SAME_VERSION = "install the same version of pollux-scheduler on every node"


def one_line(error: Exception | None) -> str:
    """The last line of an error that is not empty, without the class name of our own errors."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = (lines[-1].removeprefix(_OURS) if lines else type(error).__name__)[:_LONGEST]
    # The actor on the node is of another version of Pollux.
    is_other_version = "unexpected keyword argument" in said or "No module named 'pollux" in said
    return f"{said}; {SAME_VERSION}" if is_other_version else said


def connection_error(error: Exception) -> str:
    """Why Ray cannot be reached; with all lines of the error if versions differ."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if type(error).__name__ == "AuthenticationError":
        # The first sentence says what is wrong; the service adds the remedy.
        return one_line(error).partition(". ")[0]
    if not any("mismatch" in line.lower() for line in lines):
        return one_line(error)
    return "; ".join(lines)[:_LONGEST] + "; install the same Ray and the same Python on every node"
