"""Many things that happen to one running job at random moments, on any backend that changes jobs while they run.

The job is that of `float64_job`. What a service would answer is answered here; nothing else of a service is needed.
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

# A receipt has the last so many passes.
_PASSES_KEPT = 1000
# As slow as a pass may be on a busy machine, all of which may be left.
_EPOCH_SECONDS = 0.1
_POLL_SECONDS = 0.02
# A process that is just importing PyTorch sees only then that nobody needs it any more.
_GONE_SECONDS = 60.0
_WEIGHTS = {"resize": 10, "hasty resize": 3, "kill": 4, "hang": 1, "notice": 1, "new service": 1}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a job: how far its parameters are from plain PyTorch's, relative to the largest of them.

    `samples_lost` and `samples_repeated` are counted by its ledger; `outcomes` say how often what came of an event.
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
    """One job on a backend that `make` gives; each call makes another that finds what the one before had started.

    `home` is the backend's folder, where it has one that no other run uses: nothing of it may be left either.
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
        self.told: collections.deque[BackendEvent] = collections.deque(maxlen=50)
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
        self._new: collections.deque[BackendEvent] = collections.deque()
        self._changed = threading.Condition()
        folder.mkdir(parents=True, exist_ok=True)
        self.backend = make()
        self.backend.start(self._hear)

    # What is told, and what is answered

    def _hear(self, event: BackendEvent) -> None:
        with self._changed:
            self._new.append(event)
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
        """So many, on as few nodes as that takes."""
        shares, left = {}, gpus
        for node in self.backend.inventory():
            if left:
                shares[node.id] = min(left, node.num_gpus)
                left -= shares[node.id]
        return Placement.of(shares)

    def start(self, gpus: int) -> None:
        """Start it, from its checkpoint where it has one."""
        self.backend.submit(self._launch(gpus))

    def stepped(self) -> None:
        """Wait until it trains."""
        self.until("step", lambda: float64_job.living(self.folder, stepped=True) or self.state == "done")

    def resize(self, gpus: int) -> None:
        """Have it go to another size."""
        self.backend.resize(self._launch(gpus))

    def pump(self) -> None:
        """Take in what was told, and answer as a service does."""
        with self._changed:
            if not self._new:
                self._changed.wait(_POLL_SECONDS)
            events = list(self._new)
            self._new.clear()
        for event in events:
            self.told.append(event)
            if (getattr(event, "job_id", ""), getattr(event, "generation", None)) == (self.job_id, self.generation):
                self._take(event)

    def _take(self, event: BackendEvent) -> None:
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

    def until(self, what: str, is_so: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> None:
        """Go on until that is so; `OutOfTime` with all there is to know where it is not in time."""
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                raise OutOfTime(f"stuck for {seconds:g} s: no {what}\n{self.story()}")
            self.pump()

    def settled(self) -> None:
        """Wait until the newest generation runs, or all is done."""
        self.until("generation that runs", lambda: self.state in ("running", "done"))

    def story(self) -> str:
        """What was told last, what runs, and the ends of the logs."""
        lines = [f"generation {self.generation}, {self.state}; {self.backend.running()}", *map(str, self.told)]
        for replica in range(self._most):
            with contextlib.suppress(PolluxError):
                lines += [f"replica {replica}:", self.backend.logs(self.job_id, replica, -3000, 3000).text]
        return "\n".join(lines)

    # Events

    def event(self, chance: random.Random) -> str:
        """One of them, at a random moment; returns what came of it, empty where the job is through."""
        what = chance.choices([*_WEIGHTS], [*_WEIGHTS.values()])[0]
        moment = time.monotonic() + chance.uniform(0.0, 0.25)
        self.until("moment", lambda: time.monotonic() >= moment)
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
            self.backend.start(self._hear)
        else:
            self._hurt(chance, signal.SIGSTOP if what == "hang" else signal.SIGKILL)
        if what != "hasty resize":
            self.settled()
        came = "started anew" if len(self.restarts) > restarts else ""
        came = came or ("recovered" if len(self.losses) > losses else "done")
        self.outcomes[f"{what}: {came}"] += 1
        return f"{what}: {came}"

    def _hurt(self, chance: random.Random, number: int) -> None:
        """Send a signal to one replica, and wait until that is seen."""
        if number == signal.SIGSTOP:
            self.settled()
            self.stepped()
        victims = float64_job.living(self.folder, stepped=number == signal.SIGSTOP)
        if not victims:
            return
        before, victim = self.generation, chance.choice(victims)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, number)

        def seen() -> bool:
            return self.generation > before or self.state == "done" or victim not in float64_job.living(self.folder)

        self.until("answer to a loss", seen)
        calm = time.monotonic() + 0.3
        # Its end is told a moment after it is gone; a joiner's means nothing once its change is over.
        self.until("moment", lambda: self.generation > before or time.monotonic() > calm)

    # The end

    def finish(self) -> Verdict:
        """Let it come to its end, make sure that nothing is left, and compare."""
        self.settled()
        if self.state == "running":
            self.resize(2)
            self.settled()
        (self.folder / "fast").touch()
        self.until("end", lambda: self.state == "done", PATIENCE_SECONDS + _EPOCH_SECONDS * self._epochs)
        self.backend.forget(self.job_id)
        self.close()
        return self._verdict()

    def _verdict(self) -> Verdict:
        """What its replicas have written, compared with plain PyTorch."""
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
        """Let go of the backend; an AssertionError where a process of any kind is left, which is ended."""
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
