"""A policy that gets a process of its own as soon as its decisions take long; the decisions stay the same."""

from __future__ import annotations

import logging
import math
import pickle
import threading
import time
from collections.abc import Callable

from pollux.core import BatchMode, Decision, Policy, Snapshot
from pollux.core.errors import Unreachable
from pollux.service.deciding.changes import memory_of
from pollux.service.deciding.decision_process import DecisionProcess, PolicyFailed, ProcessLost

__all__ = ["LONG_SECONDS", "ProcessPolicy"]

_log = logging.getLogger("pollux.service")

LONG_SECONDS = 0.005
"""A decision that takes this much processor time gets a process, so that requests do not wait for it."""

# After a process could not be started, the next attempt is this much later.
_RETRY_SECONDS = 300.0


class ProcessPolicy:
    """Asks `policy` in this process until a decision takes `long_seconds`, then in a process that is kept for it.

    A process that ends or hangs is logged and replaced, and the new one is asked the same once. If none can be
    started, decisions are made here. All calls come from one thread, except `close`.
    """

    def __init__(
        self,
        policy: Policy,
        long_seconds: float = LONG_SECONDS,
        start: Callable[[bytes], DecisionProcess] = DecisionProcess,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._long_seconds = long_seconds
        self._start = start
        self._clock = clock
        self._process: DecisionProcess | None = None
        self._is_wanted = long_seconds <= 0.0
        # Until the first process is ready, decisions are made here. After a loss they are not: what ended that process
        # might end the service as well.
        self._is_waited_for = False
        self._not_before = -math.inf
        self._closing = threading.Lock()
        self._closed = False

    @property
    def name(self) -> str:
        """The registered name."""
        return self._policy.name

    @property
    def needs(self) -> frozenset[str]:
        """Optional fields of `JobView` that must be filled."""
        return self._policy.needs

    @property
    def batch(self) -> BatchMode:
        """How jobs choose their batch under this policy."""
        return self._policy.batch

    @property
    def pid(self) -> int | None:
        """The id of the decision process; None if there is none."""
        process = self._process
        return None if process is None else process.pid

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Divide the cluster; Unreachable after `close`."""
        process = self._ready_process()
        if process is None:
            return self._decide_here(snapshot)
        try:
            return self._ask(process, snapshot)
        except ProcessLost:
            self._refuse_if_closed()
        _log.warning("another decision process is started, and asked the same")
        process = self._ready_process()
        return self._decide_here(snapshot) if process is None else self._ask(process, snapshot)

    def _ask(self, process: DecisionProcess, snapshot: Snapshot) -> Decision:
        try:
            return process.decide(snapshot)
        except PolicyFailed:
            raise
        except Exception as error:
            self._process = None
            self._is_waited_for = True
            if not self._closed:
                _log.error("the decision process (%d) is lost: %s", process.pid, error)
            raise

    def _ready_process(self) -> DecisionProcess | None:
        """The process to ask; None if there is none, or the first one is not ready yet."""
        self._refuse_if_closed()
        if self._process is None and self._is_wanted and self._clock() >= self._not_before:
            self._begin_process()
        if self._process is None:
            return None
        try:
            return self._process if self._process.is_ready(self._is_waited_for) else None
        except ProcessLost as error:
            self._do_without(error)
            return None

    def _begin_process(self) -> None:
        try:
            written = pickle.dumps(self._policy)
        except Exception as error:
            # A policy that was written in a test, for instance.
            self._is_wanted = False
            _log.warning("policy '%s' cannot be given to a process of its own (%s): it decides here", self.name, error)
            return
        try:
            process = self._start(written)
        except (OSError, ProcessLost) as error:
            self._do_without(error)
            return
        with self._closing:
            self._process = process
            if self._closed:
                process.kill()

    def _do_without(self, error: Exception) -> None:
        self._process = None
        self._not_before = self._clock() + _RETRY_SECONDS
        _log.warning(
            "no process for decisions could be started (%s): they are made in the service, and requests may wait for "
            "them; the next attempt is in %.0f s",
            error, _RETRY_SECONDS,
        )  # fmt: skip

    def _decide_here(self, snapshot: Snapshot) -> Decision:
        began = time.thread_time()
        decision = self._policy.allocate(memory_of(snapshot))
        if time.thread_time() - began >= self._long_seconds:
            self._is_wanted = True
        return decision

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Unreachable("the service is stopping; no more decisions are made")

    def close(self) -> None:
        """Make no more decisions; one that is being made ends with an error. Callable from any thread."""
        with self._closing:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def end(self) -> None:
        """End the process, and wait until it is gone."""
        self.close()
        process, self._process = self._process, None
        if process is not None:
            process.end()
