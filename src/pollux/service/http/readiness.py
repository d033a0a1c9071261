"""Whether the service can do what requests need: its engine, its store and the threads that read files of jobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pollux.core.errors import PolluxError, Unreachable
from pollux.service.engine.engine import Engine
from pollux.service.http.foreign_reads import ForeignReads

__all__ = ["ServiceReadiness"]

_KEPT_SECONDS = 1.0


class ServiceReadiness:
    """Tries each part once, with a deadline. Requests within a second share one trial: anybody may ask."""

    def __init__(
        self,
        engine: Engine,
        foreign: ForeignReads,
        seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._foreign = foreign
        self._seconds = seconds
        self._clock = clock
        self._trial: asyncio.Task[None] | None = None
        self._tried_at = 0.0

    async def check(self) -> None:
        """Unreachable, with the part and the remedy, if a part fails."""
        self._check_states()
        trial = self._trial
        if trial is None or (trial.done() and self._clock() - self._tried_at > _KEPT_SECONDS):
            self._tried_at = self._clock()
            trial = self._trial = asyncio.ensure_future(self._try_all())
            # The caller may be gone by then: then nobody reads the error.
            trial.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(trial)

    def _check_states(self) -> None:
        if not self._engine.loop.alive:
            raise Unreachable("the engine is not running; wait, or restart the service")
        if not self._engine.backend.healthy:
            raise Unreachable("the backend fails at its work; the service's log says why, restart it if that goes on")
        if self._engine.stopping:
            raise Unreachable("the service is going down: it takes no new jobs")

    async def _try_all(self) -> None:
        parts = {
            "the engine": asyncio.wrap_future(self._engine.loop.read(lambda: None)),
            "the store": asyncio.to_thread(self._engine.store.setting, "ready"),
            "the threads that read files of jobs": self._foreign.home.run("nothing", "ready", lambda: None),
            "the threads that look at working folders": self._foreign.folders.run("nothing", "ready", lambda: None),
            "the threads that unpack working folders": self._foreign.packages.run("nothing", "ready", lambda: None),
        }
        trials = {asyncio.ensure_future(part): name for name, part in parts.items()}
        done, late = await asyncio.wait(trials, timeout=self._seconds)
        for trial in late:
            trial.cancel()
        for trial in late or done:
            error = None if trial in late else trial.exception()
            if trial in late:
                raise Unreachable(
                    f"{trials[trial]} of the service: no answer within {self._seconds:g} s; its log may say why, "
                    "restart it if that goes on"
                )
            if error is not None:
                what = str(error) if isinstance(error, PolluxError) else repr(error)
                raise Unreachable(f"{trials[trial]} of the service fails: {what}")
