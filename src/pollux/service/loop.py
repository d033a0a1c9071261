"""One thread, one queue, a second thread in which the policy thinks: waits, batches, decides, starts and stops.

The life of a fact is in `runner`; what can be asked is in `engine`.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from pollux.backends.protocol import Backend, BackendEvent
from pollux.controller import HOLDING, GenerationEnded, require
from pollux.core import Decision, Policy, Snapshot
from pollux.core.errors import PolluxError, Unreachable
from pollux.service.clock import Clock, SystemClock
from pollux.service.runner import Ask, Facts, Runner, our_fault
from pollux.service.settings import AtStop, ServiceSettings
from pollux.service.tokens import Tokens
from pollux.store.protocol import Store, Telemetry

__all__ = ["EngineLoop"]

_log = logging.getLogger("pollux.service")

_BATCH = 512
_LONGEST_WAIT_SECONDS = 3600.0
_ANSWER_SECONDS = 120.0
# While the policy thinks, whoever answers requests gets the interpreter back this soon (Python's own is 5 ms).
_SWITCH_SECONDS = 0.0005

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Thought:
    """What the policy answered; None when it failed."""

    snapshot: Snapshot
    decision: Decision | None
    seconds: float


@dataclass(frozen=True, slots=True)
class _Settled:
    """Somebody wants to know when there is nothing left to do at this time."""

    future: Future[None]


@dataclass(frozen=True, slots=True)
class _Stop:
    future: Future[None]


class _Poke:
    """Look at the clock again."""


_Item = Ask | _Thought | _Settled | _Stop | _Poke


class EngineLoop:
    """The loop: waits, batches, decides. What can be asked of it is `Engine`'s."""

    def __init__(
        self,
        policy: Policy,
        backend: Backend,
        store: Store,
        telemetry: Telemetry,
        settings: ServiceSettings,
        clock: Clock | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        require(policy, {"goodput", "remaining"})
        self.settings = settings
        self.store = store
        self.telemetry = telemetry
        self.backend = backend
        self.policy = policy
        self.tokens = tokens or Tokens.random()
        self._clock = clock or SystemClock()
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._thinker = ThreadPoolExecutor(1, "pollux-policy")
        self._writer = ThreadPoolExecutor(1, "pollux-snapshots")
        self._thinking: Future[None] | None = None
        self._writing: Future[None] | None = None
        self._settlers: list[Future[None]] = []
        self._thread = threading.Thread(target=self._loop, name="pollux-engine", daemon=True)
        self._stopped = threading.Event()
        self.runner = Runner(policy, backend, store, telemetry, settings, self.tokens, self._clock.now, self._refused)
        self.started_at = self._clock.now()

    # Life

    def start(self) -> None:
        """Connect the backend, bring it to what the log says, and begin."""
        self.backend.start(self._heard)
        self.runner.reconcile()
        self._thread.start()

    def stop(self, jobs: AtStop | None = None, timeout: float = 600.0) -> None:
        """End. Running jobs are stopped with their grace, so that they go on at the next start, or kept running."""
        if self._stopped.is_set():
            return
        how = jobs or self.settings.at_stop
        if self._thread.is_alive():
            if how == "stop":
                self._stop_jobs(timeout)
            done: Future[None] = Future()
            self._queue.put(_Stop(done))
            done.result(timeout)
            self._thread.join(timeout)
        self._stopped.set()
        self._thinker.shutdown(wait=True, cancel_futures=True)
        self.backend.close()
        self.store.close()
        self.telemetry.close()

    def _stop_jobs(self, timeout: float) -> None:
        grace = self._look(self._begin_stopping).result(_ANSWER_SECONDS)
        until = time.monotonic() + min(timeout, grace + 15.0)
        while time.monotonic() < until and self._num_running():
            time.sleep(0.05)

    def _begin_stopping(self) -> float:
        """Tell every running job to stop; the longest grace of them."""
        self.runner.stopping = True
        grace = 0.0
        for record in self.runner.controller.jobs.values():
            if record.state in HOLDING and record.spec.request is not None:
                grace = max(grace, record.spec.request.grace_seconds)
                self.backend.stop(record.spec.id, record.generation, record.spec.request.grace_seconds)
        return grace

    def _num_running(self) -> int:
        """Jobs with processes, those that end by order of a user among them."""
        return sum(entry.state != "ended" for entry in self.backend.running())

    # Asking

    def now(self) -> float:
        """The service's clock."""
        return self._clock.now()

    def poke(self) -> None:
        """Look at the clock again: somebody has moved it."""
        self._queue.put(_Poke())

    def settle(self, timeout: float = 60.0) -> None:
        """Wait until nothing is left to do at the present time: no ask, no decision, no timer."""
        done: Future[None] = Future()
        self._put(_Settled(done))
        done.result(timeout)

    @property
    def alive(self) -> bool:
        """Whether it takes asks."""
        return self._thread.is_alive() and not self._stopped.is_set()

    def think(self, work: Callable[[], T], answer: Future[T]) -> None:
        """Let the policy's thread do something that takes long."""

        def run() -> None:
            try:
                answer.set_result(work())
            except PolluxError as error:
                answer.set_exception(error)
            except Exception as error:
                _log.exception("a plan failed")
                answer.set_exception(our_fault(error))

        try:
            self._thinker.submit(self._at_ease, run)
        except RuntimeError:
            answer.set_exception(Unreachable("the service is stopping; try again when it is back"))

    @staticmethod
    def _at_ease(work: Callable[[], T]) -> T:
        """Work of the policy's thread, during which others get the interpreter back soon."""
        interval = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_SECONDS, interval))
        try:
            return work()
        finally:
            sys.setswitchinterval(interval)

    def next_due(self) -> float | None:
        """When the engine will do something by itself, if ever; for clocks that are moved by hand."""
        return self._look(lambda: self.runner.next_due(deciding=False)).result(_ANSWER_SECONDS)

    def _look(self, reply: Callable[[], T]) -> Future[T]:
        """Ask without a fact: the answer is made in the engine's thread, from what is durable."""
        return self._ask(lambda at: Facts(), reply)

    def _ask(self, facts: Callable[[float], Facts], reply: Callable[[], T]) -> Future[T]:
        ask = Ask(facts, reply)
        self._put(ask)
        return ask.future

    def _put(self, item: Ask | _Settled) -> None:
        if self._stopped.is_set():
            item.future.set_exception(Unreachable("the service is stopping; try again when it is back"))
        else:
            self._queue.put(item)

    @staticmethod
    def _wait(future: Future[T]) -> T:
        try:
            return future.result(_ANSWER_SECONDS)
        except TimeoutError:
            raise Unreachable(f"no answer after {_ANSWER_SECONDS:g} s; try again later") from None

    def _heard(self, told: BackendEvent) -> None:
        self._queue.put(Ask(lambda at: Facts(self.runner.heard(told)), lambda: None))

    def _refused(self, job_id: str, generation: int, why: str) -> None:
        _log.warning("job '%s' generation %d could not be started: %s", job_id, generation, why)

        def facts(at: float) -> Facts:
            record = self.runner.controller.jobs.get(job_id)
            if record is None or record.state not in HOLDING or record.generation != generation:
                return Facts()
            return Facts(GenerationEnded(at, job_id, generation, "crashed", why))

        self._queue.put(Ask(facts, lambda: None))

    # The loop

    def _loop(self) -> None:
        while True:
            try:
                stop = self._turn()
            except Exception:
                _log.exception("the engine stumbled; it goes on with what the log has")
                continue
            if stop is not None:
                self._finish(stop)
                return

    def _turn(self) -> _Stop | None:
        asks: list[Ask] = []
        for item in self._next_items():
            if isinstance(item, Ask):
                asks.append(item)
            elif isinstance(item, _Settled):
                self._settlers.append(item.future)
            elif isinstance(item, _Stop):
                return item
            elif isinstance(item, _Thought):
                self._take(asks)
                asks = []
                self._thinking = None
                self.runner.decided(item.snapshot, item.decision, item.seconds)
        self._take(asks)
        while self.runner.fire_timer():
            pass
        self._think_if_due()
        if self._writing is None:
            self.runner.save_if_due(self._elsewhere)
        self._tell_settlers()
        return None

    def _take(self, asks: list[Ask]) -> None:
        try:
            if asks:
                self.runner.take(asks)
        except Exception as error:
            for ask in asks:
                if not ask.future.done():
                    ask.future.set_exception(our_fault(error))
            raise

    def _next_items(self) -> list[_Item]:
        due = self.runner.next_due(self._thinking is not None)
        wait = _LONGEST_WAIT_SECONDS if due is None else min(max(due - self._clock.now(), 0.0), _LONGEST_WAIT_SECONDS)
        items: list[_Item] = []
        try:
            items.append(self._queue.get(timeout=wait))
            while len(items) < _BATCH:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return items

    def _elsewhere(self, work: Callable[[], None]) -> None:
        """Write a snapshot while others are answered; one at a time."""

        def done(future: Future[None]) -> None:
            self._writing = None
            self._queue.put(_Poke())

        self._writing = self._writer.submit(work)
        self._writing.add_done_callback(done)

    def _think_if_due(self) -> None:
        if self._thinking is not None:
            return
        snapshot = self.runner.due_snapshot()
        if snapshot is not None:
            self._thinking = self._thinker.submit(self._think, snapshot)

    def _think(self, snapshot: Snapshot) -> None:
        began = time.perf_counter()
        decision: Decision | None = None
        try:
            decision = self._at_ease(lambda: self.policy.allocate(snapshot))
        except Exception:
            _log.exception("policy '%s' failed; everything stays as it is until the next decision", self.policy.name)
        self._queue.put(_Thought(snapshot, decision, time.perf_counter() - began))

    def _tell_settlers(self) -> None:
        busy = self._thinking is not None or self._writing is not None or not self._queue.empty()
        if busy or not self._settlers:
            return
        due = self.runner.next_due(deciding=False)
        if due is None or due > self._clock.now():
            for future in self._settlers:
                future.set_result(None)
            self._settlers = []

    def _finish(self, stop: _Stop) -> None:
        self._stopped.set()
        self._writer.shutdown(wait=True)
        self.runner.close()
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, Ask | _Settled):
                item.future.set_exception(Unreachable("the service is stopping; try again when it is back"))
        stop.future.set_result(None)
