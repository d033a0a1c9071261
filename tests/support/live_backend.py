"""One backend for the tests of a file, and the check of a job that was changed live."""

from __future__ import annotations

from typing import Any

from pollux.testing.jobs.random_changes import EventRun


class SharedBackend:
    """One backend for many tests, as each of them sees it."""

    def __init__(self, backend: Any, listeners: list[Any]) -> None:
        self._backend, self._listeners = backend, listeners

    def start(self, listener: Any) -> None:
        self._listeners.append(listener)

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def check_exact(run: EventRun, restarts: int = 0) -> None:
    """The job ends with the parameters of plain PyTorch, each sample used once, after so many restarts."""
    verdict = run.finish()
    assert verdict.exact
    assert (verdict.samples_lost, verdict.samples_repeated) == (0, 0)
    assert verdict.largest_difference < 1e-11
    assert len(verdict.restarts) == restarts, verdict.restarts
