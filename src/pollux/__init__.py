"""Pollux: a deep-learning cluster scheduler that optimises goodput.

This module imports nothing but the version; the parts live in the sub-packages. `init`, `Job` and `JobStopped`
are the agent's, and are fetched, with PyTorch, when one is first asked for; `PolluxError` needs no PyTorch.
"""

from typing import TYPE_CHECKING, Any

from pollux.core.version import __version__

if TYPE_CHECKING:
    from pollux.agent import Job as Job
    from pollux.agent import JobStopped as JobStopped
    from pollux.agent import init as init
    from pollux.core.errors import PolluxError as PolluxError

__all__ = ["__version__"]

_LAZY = ("Job", "JobStopped", "PolluxError", "init")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'pollux' has no attribute '{name}'")
    if name == "PolluxError":
        from pollux.core.errors import PolluxError

        return PolluxError
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        from pollux.core.errors import InvalidInput

        raise InvalidInput(
            f"pollux.{name} needs PyTorch, which is not installed: pip install 'pollux-scheduler[torch]'"
        )
    import pollux.agent

    return getattr(pollux.agent, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
