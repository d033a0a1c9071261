"""What people are told of the errors that Ray raises."""

from __future__ import annotations

from pollux.core.errors import BackendFailed

__all__ = ["SAME_VERSION", "connection_error", "one_line"]

_LONGEST = 600
_OURS = f"{BackendFailed.__module__}.{BackendFailed.__qualname__}: "

SAME_VERSION = "install the same version of pollux-scheduler on every node"


def one_line(error: Exception | None) -> str:
    """The last line that says something, of what may be many; what is ours needs no class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = (lines[-1].removeprefix(_OURS) if lines else type(error).__name__)[:_LONGEST]
    # An actor of ours that is not made as we make it.
    is_other_version = "unexpected keyword argument" in said or "No module named 'pollux" in said
    return f"{said}; {SAME_VERSION}" if is_other_version else said


def connection_error(error: Exception) -> str:
    """Why Ray cannot be reached. That versions differ is said over several lines, and needs all of them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if type(error).__name__ == "AuthenticationError":
        # Its first sentence says what is wrong; what to do is said by the service for all cases alike.
        return one_line(error).partition(". ")[0]
    if not any("mismatch" in line.lower() for line in lines):
        return one_line(error)
    return "; ".join(lines)[:_LONGEST] + "; install the same Ray and the same Python on every node"
