"""Random events: a controller that is saved and restored now and then does exactly what one does that never was."""

import json
import math
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.controller import (
    Command,
    Controller,
    ControllerSettings,
    DecisionMade,
    Event,
    GenerationEnded,
    JobCancelled,
    JobFinished,
    JobLimitsChanged,
    JobPaused,
    JobReported,
    JobResumed,
    JobRunning,
    JobSpec,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
    QueueChanged,
    TimerFired,
)
from pollux.controller.machine.retries import MOST_LOSSES
from pollux.controller.state.lifecycle import ENDED, HOLDING
from pollux.core import JobLimits, Node, PolluxError, Queue
from pollux.policies import create
from pollux.testing import cluster, goodput_model

OUTCOMES = ("succeeded", "crashed", "out-of-memory", "stopped", "lost")
MODELS = (goodput_model(), goodput_model(noise_scale=50.0), goodput_model(sync_seconds=0.3))
LIMITS = (
    JobLimits(),
    JobLimits(max_gpus=2),
    JobLimits(min_gpus=2, max_gpus=8),
    JobLimits(min_gpus=9, max_gpus=9),
    JobLimits(max_gpus=4, preemptible=False),
    JobLimits(min_gpus=2, max_gpus=2, pinned=True),
)


@dataclass(frozen=True)
class Step:
    """One thing that happens: which, to whom, with what, how much later."""

    kind: str
    who: int
    what: int
    seconds: float
    restore: bool


KINDS = (
    "submit", "submit", "decide", "decide", "decide", "late", "timer", "running", "report", "ended", "ended", "finish",
    "cancel", "pause", "resume", "limits", "node", "node-gone", "queue",
)  # fmt: skip

STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(KINDS),
        st.integers(0, 7),
        st.integers(0, 59),
        st.sampled_from([0.0, 0.5, 3.0, 70.0, 700.0]),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=20,
    max_size=60,
)


class World:
    """Two controllers side by side; `again` is restored from plain JSON whenever a step says so."""

    def __init__(self, trigger: str, policy: str) -> None:
        self.settings = ControllerSettings(trigger)  # type: ignore[arg-type]
        self.policy = create(policy)
        self.live, self.again = (Controller(cluster(4, 4), self.settings) for _ in range(2))
        self.now = 0.0
        self.pending: DecisionMade | None = None

    def step(self, step: Step) -> None:
        self.now += step.seconds
        if step.restore:
            self.again = Controller.restored(_plain(self.again.state()), self.settings)
        event = self.event(step)
        if event is not None:
            self.apply(event)
        self.check()

    def apply(self, event: Event) -> None:
        before = _plain(self.live.state())
        answers = [_answer(controller, event) for controller in (self.live, self.again)]
        assert answers[0] == answers[1]
        if isinstance(answers[0], str):
            assert _plain(self.live.state()) == before, f"refused ({answers[0]}), but something changed"
        assert _plain(self.live.state()) == _plain(self.again.state())
        assert self.live.snapshot(self.now) == self.again.snapshot(self.now)
        assert self.live.next_timer_at == self.again.next_timer_at

    def event(self, step: Step) -> Event | None:
        at, job_id, what = self.now, f"j{step.who}", step.what
        record = self.live.jobs.get(job_id)
        generation = 0 if record is None else record.generation - what % 3 // 2
        if step.kind == "submit":
            return JobSubmitted(at, self.spec(job_id, what))
        if step.kind in ("decide", "late"):
            return self.decision(step)
        simple: dict[str, Event] = {
            "timer": TimerFired(at if what % 2 else self.live.next_timer_at or at),
            "running": JobRunning(at, job_id, generation),
            "report": JobReported(
                at, job_id, MODELS[what % 3], [None, 1e4 - at, math.nan][what % 7 % 3], None, [None, 64][what % 2]
            ),
            "ended": GenerationEnded(at, job_id, generation, OUTCOMES[what % 5], "exit 1"),  # type: ignore[arg-type]
            "finish": JobFinished(at, job_id, "failed" if what % 2 else "succeeded"),
            "cancel": JobCancelled(at, job_id),
            "pause": JobPaused(at, job_id),
            "resume": JobResumed(at, job_id),
            "limits": JobLimitsChanged(at, job_id, LIMITS[what % len(LIMITS)]),
            "node": NodeAdded(at, Node(f"n{what % 3}", 4)),
            "node-gone": NodeRemoved(at, f"n{what % 3}"),
            "queue": QueueChanged(at, Queue("q", weight=1.0 + what % 2, gpu_quota=None)),
        }
        return simple[step.kind]

    def spec(self, job_id: str, what: int) -> JobSpec:
        after = tuple(list(self.live.jobs)[: what % 3]) if what % 5 == 0 else ()
        return JobSpec(
            job_id,
            LIMITS[what % len(LIMITS)],
            requested_gpus=1 + what % 4,
            queue="q" if what % 2 else "",
            retries=what % 4,
            after=("nobody",) if what == 59 else after,
            time_limit_seconds=100.0 * (what % 7) or None,
        )

    def decision(self, step: Step) -> Event | None:
        """The policy's answer to the present, whole or narrowed; or the answer of some steps ago."""
        if step.kind == "late" and self.pending is not None:
            event, self.pending = self.pending, None
            return DecisionMade(self.now, event.revision, event.decision, event.partial)
        snapshot = self.live.snapshot(self.now)
        answer = self.policy.allocate(snapshot)
        narrow = self.live.narrowed(answer)
        assert narrow == self.again.narrowed(answer)
        event = DecisionMade(self.now, snapshot.revision, narrow if step.what % 2 else answer, bool(step.what % 2))
        if step.kind == "late":
            self.pending = event
            return None
        return event

    def check(self) -> None:
        """What must hold after anything whatsoever."""
        held: dict[str, int] = {}
        for record in self.live.jobs.values():
            for node, count in record.placement:
                held[node] = held.get(node, 0) + count
            assert bool(record.placement) == (record.state in HOLDING)
            if record.placement and record.reason is not None:
                assert record.reason.code in ("started", "grew", "shrank", "moved"), record.reason
            assert (record.spec.id in self.live.active) == (record.state not in ENDED)
            assert (record.ended_at is None) == (record.state not in ENDED)
            assert record.crashes <= record.spec.retries + 1
            assert record.losses <= MOST_LOSSES
        for node, count in held.items():
            assert count <= self.live.cluster.by_id[node].num_gpus, f"{count} GPUs given out on '{node}'"


def _plain(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(state, allow_nan=False))


def _answer(controller: Controller, event: Event) -> list[Command] | str:
    try:
        return controller.apply(event)
    except PolluxError as error:
        return f"{type(error).__name__}: {error}"


@given(steps=STEPS, trigger=st.sampled_from(["rounds", "events"]), policy=st.sampled_from(["las", "fifo", "pollux"]))
@settings(max_examples=60, deadline=None)
def test_saving_and_restoring_changes_nothing(steps, trigger, policy):
    world = World(trigger, policy)
    for step in steps:
        world.step(step)
