"""One thread, one queue, a second thread in which the policy thinks: waits, batches, decides, starts and stops.

The life of a fact is in `event_log`; what can be asked is in `engine`.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pollux.backends.protocol import Backend, BackendEvent
from pollux.controller import HOLDING, GenerationEnded, require
from pollux.core import Policy, Snapshot
from pollux.core.errors import StoreFailed, Unreachable
from pollux.service.auth.tokens import Tokens
from pollux.service.clock import Clock, SystemClock
from pollux.service.engine.decision_thread import STOPPING, Thinker, Thought
from pollux.service.engine.event_log import Ask, Facts, Runner, our_fault
from pollux.service.settings import AtStop, ServiceSettings
from pollux.store.protocol import Store, Telemetry

__all__ = ["EngineLoop"]

_log = logging.getLogger("pollux.service")

_BATCH = 512
_ANSWER_SECONDS = 120.0
# How long running jobs may take to end beyond their grace.
_BEYOND_GRACE_SECONDS = 15.0
# After stumbling again and again, this long at most until the next attempt; and until a backend is asked again.
_LONGEST_PAUSE_SECONDS = 5.0
_WORTH_SAYING_SECONDS = 2.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Settled:
    """Somebody wants to know when there is nothing left to do at this time."""

    future: Future[None]


@dataclass(frozen=True, slots=True)
class _Stop:
    future: Future[None]


@dataclass(frozen=True, slots=True)
class _Move:
    """Somebody moves the clock."""

    action: Callable[[], None]
    future: Future[None]


class _Wake:
    """Look again at what is to be done."""


_Item = Ask | Thought | _Settled | _Stop | _Move | _Wake


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
        require(policy, {"goodput", "remaining", "prior"})
        self.settings = settings
        self.store = store
        self.telemetry = telemetry
        self.backend = backend
        self.policy = policy
        self.tokens = tokens or Tokens.random()
        self._clock = clock or SystemClock()
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._writer = ThreadPoolExecutor(1, "pollux-snapshots")
        self._thinking: Snapshot | None = None
        self._writing: Future[None] | None = None
        self._settlers: list[Future[None]] = []
        self._thread = threading.Thread(target=self._loop, name="pollux-engine", daemon=True)
        self._stopped = threading.Event()
        self._stumbles = 0
        self._unheard: list[Callable[[float], Facts]] = []
        self._reconcile_after = -math.inf
        self._going_down = self._wound_down = False
        self.runner = Runner(policy, backend, store, telemetry, settings, self.tokens, self._clock.now, self._refused)
        self._begin_after_the_last_fact()
        self._thinker = Thinker(policy, self.runner.desk.board.records)
        self.started_at = self._clock.now()

    def _begin_after_the_last_fact(self) -> None:
        """Where the machine's clock was put back, time goes on from what the log has: it must not stand still."""
        if isinstance(self._clock, SystemClock):
            behind = self._clock.begin_at(self.runner.newest_at)
            if behind > _WORTH_SAYING_SECONDS:
                _log.warning(
                    "the log has facts of %.0f s from now: the machine's clock was put back, or was wrong then. "
                    "Times shown are ahead by as much",
                    behind,
                )

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
        if self._thread.is_alive():
            self.wind_down(jobs or self.settings.at_stop, timeout)
            done: Future[None] = Future()
            self._queue.put(_Stop(done))
            done.result(timeout)
            self._thread.join(timeout)
        self._stopped.set()
        self._thinker.stop()
        self.backend.close()
        self.store.close()
        self.telemetry.close()

    def wind_down(self, jobs: AtStop, timeout: float = 600.0) -> None:
        """Take no new jobs and begin nothing; with `stop`, wait until what runs has ended with its grace.

        Everything else is answered as before, until `stop`. A second call does nothing.
        """
        if self._wound_down:
            return
        self._going_down = self._wound_down = True
        seconds = self.stopping_seconds(jobs)
        self._look(lambda: self._begin_stopping(jobs)).result(_ANSWER_SECONDS)
        until = time.monotonic() + min(timeout, seconds)
        while jobs == "stop" and time.monotonic() < until and not self._stopped.is_set() and self._num_running():
            time.sleep(0.05)

    def stopping_seconds(self, jobs: AtStop) -> float:
        """How long an orderly end may take: the longest grace of jobs that hold GPUs, and a little more."""
        records = self.runner.desk.board.records.values() if jobs == "stop" else ()
        held = (record.spec.request for record in records if record.state in HOLDING)
        return max((request.grace_seconds for request in held if request is not None), default=0.0) + (
            _BEYOND_GRACE_SECONDS
        )

    def _begin_stopping(self, jobs: AtStop) -> None:
        """Decide nothing any more, and tell every running job to stop unless they are kept."""
        self.runner.stopping = True
        for record in self.runner.controller.active.values() if jobs == "stop" else ():
            if record.state in HOLDING and record.spec.request is not None:
                try:
                    self.backend.stop(record.spec.id, record.generation, record.spec.request.grace_seconds)
                except Exception:
                    _log.exception("job '%s' could not be told to stop", record.spec.id)

    def _num_running(self) -> int:
        """Jobs with processes, those that end by order of a user among them."""
        return sum(entry.state != "ended" for entry in self.backend.running())

    # Asking

    def now(self) -> float:
        """The service's clock."""
        return self._clock.now()

    def move_clock(self, action: Callable[[], None]) -> None:
        """Call `action`, which moves the clock, in the engine's thread between two requests; for clocks moved by hand.

        Moved by another thread, the time would change while the engine still works at what was due before.
        """
        done: Future[None] = Future()
        self._put(_Move(action, done))
        done.result(_ANSWER_SECONDS)

    def settle(self, timeout: float = 60.0) -> None:
        """Wait until nothing is left to do at the present time: no ask, no decision, no timer."""
        done: Future[None] = Future()
        self._put(_Settled(done))
        done.result(timeout)

    @property
    def alive(self) -> bool:
        """Whether it takes asks."""
        return self._thread.is_alive() and not self._stopped.is_set()

    @property
    def stopping(self) -> bool:
        """Whether it is on its way down: it answers, but takes no new jobs and begins nothing."""
        return self._going_down or self._stopped.is_set()

    def go_down(self) -> None:
        """Take no new jobs from now on; `wind_down` or `stop` must follow."""
        self._going_down = True

    def next_due(self) -> float | None:
        """When the engine will do something by itself, if ever; for clocks that are moved by hand."""
        return self._look(lambda: self._next_due(deciding=False)).result(_ANSWER_SECONDS)

    def _next_due(self, deciding: bool) -> float | None:
        due = self.runner.next_due(deciding)
        if self.runner.doubtful or self._unheard:
            due = min(self._again_at(), math.inf if due is None else due)
        return due

    def _look(self, reply: Callable[[], T]) -> Future[T]:
        """Ask without a fact: the answer is made in the engine's thread, from what is durable."""
        return self._ask(lambda at: Facts(), reply)

    def _ask(self, facts: Callable[[float], Facts], reply: Callable[[], T]) -> Future[T]:
        ask = Ask(facts, reply)
        self._put(ask)
        return ask.future

    def _put(self, item: Ask | _Settled | _Move) -> None:
        if not self._stopped.is_set():
            self._queue.put(item)
        # Asked again: the loop may have emptied the queue for the last time just before.
        if self._stopped.is_set():
            _refuse(item.future)

    @staticmethod
    def _wait(future: Future[T]) -> T:
        try:
            return future.result(_ANSWER_SECONDS)
        except TimeoutError:
            raise Unreachable(f"no answer after {_ANSWER_SECONDS:g} s; try again later") from None

    def _heard(self, told: BackendEvent) -> None:
        self._tell(lambda at: Facts(self.runner.heard(told)))

    def _tell(self, facts: Callable[[float], Facts]) -> None:
        """Ask for something that nobody will say twice: where it cannot be written, it is asked again later."""
        ask = Ask(facts, lambda: None)

        def done(future: Future[Any]) -> None:
            if isinstance(future.exception(), StoreFailed):
                self._unheard.append(facts)

        ask.future.add_done_callback(done)
        self._queue.put(ask)

    def _refused(self, job_id: str, generation: int, why: str, own_fault: bool) -> None:
        _log.warning("job '%s' generation %d could not be started: %s", job_id, generation, why)

        def facts(at: float) -> Facts:
            record = self.runner.controller.jobs.get(job_id)
            if record is None or record.state not in HOLDING or record.generation != generation:
                return Facts()
            return Facts(GenerationEnded(at, job_id, generation, "crashed" if own_fault else "refused", why))

        self._tell(facts)

    # The loop

    def _loop(self) -> None:
        while True:
            try:
                stop = self._turn()
                if stop is not None:
                    self._finish(stop)
                    return
                self._reconcile_if_doubtful()
                self._tell_settlers()
                self._stumbles = 0
            except Exception:
                _log.exception("the engine stumbled; it goes on with what the log has")
                self.runner.doubtful = True
                self._stumbles += 1
                # Once is nothing; again and again must not keep everybody else from the processor.
                time.sleep(min(0.05 * 2.0 ** min(self._stumbles, 10) - 0.1, _LONGEST_PAUSE_SECONDS))

    def _reconcile_if_doubtful(self) -> None:
        if not self.runner.doubtful or self._clock.now() < self._again_at():
            return
        try:
            self.runner.reconcile()
        except Exception:
            _log.exception("the backend could not be brought to what the log says; that is tried again")
            self.runner.doubtful = True
            self._reconcile_after = self._clock.now() + _LONGEST_PAUSE_SECONDS

    def _again_at(self) -> float:
        return max(self._reconcile_after, self.runner.held_until)

    def _turn(self) -> _Stop | None:
        asks: list[Ask] = []
        stop: _Stop | None = None
        for item in self._next_items():
            if isinstance(item, Ask):
                asks.append(item)
            elif isinstance(item, _Settled):
                self._settlers.append(item.future)
            elif isinstance(item, _Stop):
                stop = item
            elif isinstance(item, Thought):
                self._thinking = None
                self._take(asks)
                asks = []
                self._decided(item)
            elif isinstance(item, _Move):
                self._take(asks)
                asks = []
                item.action()
                item.future.set_result(None)
        self._take(asks)
        if stop is not None:
            return stop
        while self.runner.fire_timer():
            pass
        self._think_if_due()
        if self._writing is None:
            self.runner.save_if_due(self._elsewhere)
        return None

    def _take(self, asks: list[Ask]) -> None:
        """Have them done; a mistake of ours is theirs to hear, and keeps nobody else of this turn from being served."""
        try:
            if asks:
                self.runner.take(asks)
        except Exception as error:
            _log.exception("requests failed; what the log has counts")
            self.runner.doubtful = True
            for ask in asks:
                if not ask.future.done():
                    ask.future.set_exception(our_fault(error))

    def _decided(self, thought: Thought) -> None:
        if self.runner.stopping:
            return
        try:
            self.runner.decided(thought.snapshot, thought.decision, thought.seconds)
        except Exception:
            _log.exception("a decision could not be taken in; the next one follows")
            self.runner.doubtful = True

    def _next_items(self) -> list[_Item]:
        due = self._next_due(self._thinking is not None)
        wait = None if due is None else self._clock.seconds_until(due)
        items: list[_Item] = []
        try:
            items.append(self._queue.get(timeout=wait))
            while len(items) < _BATCH:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        if self._unheard and self._clock.now() >= self.runner.held_until:
            unheard, self._unheard = self._unheard, []
            for facts in unheard:
                self._tell(facts)
        return items

    def _elsewhere(self, work: Callable[[], None]) -> None:
        """Write a snapshot while others are answered; one at a time."""

        def done(future: Future[None]) -> None:
            self._writing = None
            self._queue.put(_Wake())

        self._writing = self._writer.submit(work)
        self._writing.add_done_callback(done)

    def _think_if_due(self) -> None:
        if self._thinking is not None:
            return
        snapshot = self.runner.due_snapshot()
        if snapshot is not None:
            due = self.runner.controller.next_decision_at or snapshot.now
            self._thinking = snapshot
            self._thinker.decide(snapshot, lambda: self.runner.thinking_begins(due), self._queue.put)

    def _tell_settlers(self) -> None:
        busy = self._thinking is not None or self._writing is not None or not self._queue.empty()
        if busy or not self._settlers:
            return
        due = self._next_due(deciding=False)
        if due is None or due > self._clock.now():
            for future in self._settlers:
                future.set_result(None)
            self._settlers = []

    def _finish(self, stop: _Stop) -> None:
        self._stopped.set()
        self._writer.shutdown(wait=True)
        try:
            self.runner.close()
        except Exception:
            _log.exception("the state could not be kept at the end; the log has all of it")
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, Ask | _Settled | _Move):
                _refuse(item.future)
        for future in self._settlers:
            _refuse(future)
        stop.future.set_result(None)


def _refuse(future: Future[Any]) -> None:
    with suppress(InvalidStateError):
        future.set_exception(Unreachable(STOPPING))
