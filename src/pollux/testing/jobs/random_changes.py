"""One job that is resized, killed, frozen and stopped at random moments, on any backend with live resizes.

The job is `float64_job`. This module answers the backend's events as a service would; no service runs.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pollux.backends.protocol import (
    Backend,
    BackendEvent,
    Launch,
    ReplicasEnded,
    ReplicasLost,
    ReplicasStarted,
)
from pollux.core import Placement
from pollux.core.errors import PolluxError
from pollux.testing.jobs import float64_job
from pollux.testing.jobs.leftovers import await_none
from pollux.testing.waiting import PATIENCE_SECONDS, OutOfTime

__all__ = ["EventRun", "Verdict"]

# A receipt lists this many passes, the newest.
_PASSES_KEPT = 1000
# The time of a slow pass on a busy machine; at the end of the changes, all passes may still be to do.
_EPOCH_SECONDS = 0.1
_POLL_SECONDS = 0.02
# A process that is importing PyTorch notices only afterwards that it is no longer needed.
_GONE_SECONDS = 60.0
_WEIGHTS = {"resize": 10, "hasty resize": 3, "kill": 4, "hang": 1, "notice": 1, "new service": 1}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a job ended. `largest_difference`: of its parameters from plain PyTorch's, relative to the largest of them.

    The job's ledger counted `samples_lost` and `samples_repeated`; `outcomes` counts each change with its outcome.
    """

    events: int
    outcomes: dict[str, int]
    samples_lost: int
    samples_repeated: int
    largest_difference: float
    exact: bool
    restarts: list[str] = field(default_factory=list)
    pauses: list[tuple[str, float]] = field(default_factory=list)


class EventRun:
    """One job on a backend that `make` creates; each new backend finds what the one before it had started.

    `home` is the backend's folder if no other run uses it; `close` looks there for leftover processes, too.
    """

    def __init__(
        self,
        make: Callable[[], Backend],
        folder: Path,
        epochs: int,
        most: int = 4,
        env: Mapping[str, str] | None = None,
        job_id: str = "job",
        home: Path | None = None,
    ) -> None:
        self.folder = folder
        self.job_id = job_id
        self.events: collections.deque[BackendEvent] = collections.deque(maxlen=50)
        self.losses: list[str] = []
        self.generation = 0
        self.state = "none"
        self.placement = Placement()
        self.restarts: list[str] = []
        self.pauses: list[tuple[str, float]] = []
        self.outcomes: collections.Counter[str] = collections.Counter()
        self._make = make
        self._epochs = epochs
        self._most = most
        self._env = dict(env or {})
        self._places = [folder] if home is None else [folder, home]
        self._unhandled: collections.deque[BackendEvent] = collections.deque()
        self._changed = threading.Condition()
        folder.mkdir(parents=True, exist_ok=True)
        self.backend = make()
        self.backend.start(self._collect_event)

    # Events of the backend, and the answers to them

    def _collect_event(self, event: BackendEvent) -> None:
        with self._changed:
            self._unhandled.append(event)
            self._changed.notify_all()

    def _launch(self, gpus: int | Placement) -> Launch:
        self.generation += 1
        self.state = "moving"
        env = {"POLLUX_JOB": self.job_id, "POLLUX_GENERATION": str(self.generation)} | self._env
        argv = (sys.executable, float64_job.__file__, str(self.folder), str(self._epochs))
        self.placement = placement = self._placement(gpus) if isinstance(gpus, int) else gpus
        folder, grace = str(self.folder), 40.0
        return Launch(self.job_id, self.generation, placement, argv, folder, env, grace_seconds=grace, live=True)

    def _placement(self, gpus: int) -> Placement:
        """That many GPUs on as few nodes as possible."""
        shares, left = {}, gpus
        for node in self.backend.inventory():
            if left:
                shares[node.id] = min(left, node.num_gpus)
                left -= shares[node.id]
        return Placement.of(shares)

    def start(self, gpus: int) -> None:
        """Start the job, from its checkpoint if it has one."""
        self.backend.submit(self._launch(gpus))

    def train_on(self, counts: Mapping[str, int]) -> None:
        """Start the job on these nodes, and wait for its first step."""
        self.backend.submit(self._launch(Placement.of(counts)))
        self.await_running()
        self.await_step()

    def request_move(self, counts: Mapping[str, int]) -> None:
        """Resize the job to these nodes, without waiting."""
        self.backend.resize(self._launch(Placement.of(counts)))

    def move_to(self, counts: Mapping[str, int]) -> None:
        """Resize the job to these nodes, and wait until it runs there."""
        self.request_move(counts)
        self.await_running()

    def await_step(self) -> None:
        """Wait until a replica has taken a step."""
        self.wait_for("step", lambda: float64_job.living(self.folder, stepped=True) or self.state == "done")

    def resize(self, gpus: int) -> None:
        """Resize the job, without waiting."""
        self.backend.resize(self._launch(gpus))

    def handle_events(self) -> None:
        """Handle the backend's new events as a service does."""
        with self._changed:
            if not self._unhandled:
                self._changed.wait(_POLL_SECONDS)
            events = list(self._unhandled)
            self._unhandled.clear()
        for event in events:
            self.events.append(event)
            if (getattr(event, "job_id", ""), getattr(event, "generation", None)) == (self.job_id, self.generation):
                self._handle(event)

    def _handle(self, event: BackendEvent) -> None:
        if isinstance(event, ReplicasStarted):
            self.state = "running"
            if event.pause_seconds is not None:
                self.pauses.append((event.kind, event.pause_seconds))
        elif isinstance(event, ReplicasLost):
            self.losses.append(event.detail)
            self.backend.resize(self._launch(event.remaining))
        elif isinstance(event, ReplicasEnded):
            if event.outcome == "succeeded":
                self.state = "done"
                return
            self.restarts.append(f"{event.outcome}: {event.detail}")
            self.start(1 + len(self.restarts) % self._most)

    def wait_for(self, what: str, is_so: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> None:
        """Handle events until `is_so`; `OutOfTime`, with the run's story, if that takes too long."""
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                raise OutOfTime(f"stuck for {seconds:g} s: no {what}\n{self.story()}")
            self.handle_events()

    def await_running(self) -> None:
        """Wait until the newest generation runs, or the job is done."""
        self.wait_for("generation that runs", lambda: self.state in ("running", "done"))

    def story(self) -> str:
        """The last events, what runs, and the ends of the logs."""
        lines = [f"generation {self.generation}, {self.state}; {self.backend.running()}", *map(str, self.events)]
        for replica in range(self._most):
            with contextlib.suppress(PolluxError):
                lines += [f"replica {replica}:", self.backend.logs(self.job_id, replica, -3000, 3000).text]
        return "\n".join(lines)

    # Changes

    def change_at_random(self, chance: random.Random) -> str:
        """Make a random change at a random moment; returns the change and its outcome, empty if the job is done."""
        what = chance.choices([*_WEIGHTS], [*_WEIGHTS.values()])[0]
        moment = time.monotonic() + chance.uniform(0.0, 0.25)
        self.wait_for("moment", lambda: time.monotonic() >= moment)
        if self.state == "done":
            return ""
        restarts, losses = len(self.restarts), len(self.losses)
        if what in ("resize", "hasty resize"):
            self.resize(chance.randint(1, self._most))
        elif what == "notice":
            self.state = "moving"
            self.backend.stop(self.job_id, self.generation, 40.0)
        elif what == "new service":
            self.backend.close()
            self.backend = self._make()
            self.backend.start(self._collect_event)
        else:
            self._signal_replica(chance, signal.SIGSTOP if what == "hang" else signal.SIGKILL)
        if what != "hasty resize":
            self.await_running()
        came = "started anew" if len(self.restarts) > restarts else ""
        came = came or ("recovered" if len(self.losses) > losses else "done")
        self.outcomes[f"{what}: {came}"] += 1
        return f"{what}: {came}"

    def _signal_replica(self, chance: random.Random, number: int) -> None:
        """Send a signal to one replica, and wait until the backend has noticed."""
        if number == signal.SIGSTOP:
            self.await_running()
            self.await_step()
        victims = float64_job.living(self.folder, stepped=number == signal.SIGSTOP)
        if not victims:
            return
        before, victim = self.generation, chance.choice(victims)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, number)

        def seen() -> bool:
            return self.generation > before or self.state == "done" or victim not in float64_job.living(self.folder)

        self.wait_for("answer to a loss", seen)
        calm = time.monotonic() + 0.3
        # The event follows the end after a moment. There is none for a joiner whose change is over already.
        self.wait_for("moment", lambda: self.generation > before or time.monotonic() > calm)

    # The end

    def finish(self) -> Verdict:
        """Wait for the job's end, check that no process is left, and compare its results with plain PyTorch's."""
        self.await_running()
        if self.state == "running":
            self.resize(2)
            self.await_running()
        (self.folder / "fast").touch()
        self.wait_for("end", lambda: self.state == "done", PATIENCE_SECONDS + _EPOCH_SECONDS * self._epochs)
        self.backend.forget(self.job_id)
        self.close()
        return self._verdict()

    def _verdict(self) -> Verdict:
        """What the replicas have written, compared with plain PyTorch."""
        ended = float64_job.results(self.folder)
        wanted = float64_job.expected(self._epochs)
        size = max(map(abs, wanted))
        apart = [max(abs(a - b) for a, b in zip(e["parameters"], wanted, strict=True)) / size for e in ended]
        counts = [samples for value in ended for _, samples in value["passes"]]
        whole = [[number, float64_job.SAMPLES] for number in range(self._epochs)][-_PASSES_KEPT:]
        return Verdict(
            sum(self.outcomes.values()),
            dict(sorted(self.outcomes.items())),
            sum(max(float64_job.SAMPLES - count, 0) for count in counts),
            sum(max(count - float64_job.SAMPLES, 0) for count in counts),
            max(apart),
            all(value["exact"] and value["passes"] == whole for value in ended),
            self.restarts,
            self.pauses,
        )

    def close(self) -> None:
        """Stop the job and close the backend; processes that are left are killed, and are an AssertionError."""
        self.backend.stop(self.job_id, self.generation, 0.0)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._runs() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        self.backend.close()
        left = await_none(_GONE_SECONDS, *self._places)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if left:
            raise AssertionError(f"processes {left} were left\n{self.story()}")

    def _runs(self) -> bool:
        return any(each.job_id == self.job_id and each.state != "ended" for each in self.backend.running())
