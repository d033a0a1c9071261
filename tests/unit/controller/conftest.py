"""A controller under the hand: short words for events, and decisions made by hand."""

from typing import Any

import pytest

from pollux.controller import (
    Command,
    Controller,
    ControllerSettings,
    DecisionMade,
    Event,
    JobSpec,
    JobSubmitted,
)
from pollux.core import Cluster, Decision, JobLimits, Queue
from pollux.testing import cluster, place


class Desk:
    """Keeps the events that were taken in, so that they can be replayed."""

    def __init__(self, nodes: Cluster | None = None, queues: tuple[Queue, ...] = (), **settings: Any) -> None:
        self._made_of = (nodes or cluster(4, 4), ControllerSettings(**settings), queues)
        self.controller = Controller(*self._made_of)
        self.events: list[Event] = []
        self.commands: list[Command] = []

    def __call__(self, event: Event) -> list[Command]:
        commands = self.controller.apply(event)
        self.events.append(event)
        self.commands += commands
        return commands

    def submit(self, at: float, *job_ids: str, **fields: Any) -> list[Command]:
        limits = {name: fields.pop(name) for name in list(fields) if name in JobLimits.__dataclass_fields__}
        commands = []
        for job_id in job_ids:
            commands += self(JobSubmitted(at, JobSpec(job_id, JobLimits(**limits), **fields)))
        return commands

    def decide(self, at: float, revision: int | None = None, memory: object = None, **wanted: str) -> list[Command]:
        """As if a policy had answered; at the current revision unless told otherwise."""
        decision = Decision({job_id: place(text) for job_id, text in wanted.items()}, memory=memory)
        return self(DecisionMade(at, self.controller.revision if revision is None else revision, decision))

    def fresh(self) -> "Desk":
        desk = Desk()
        desk._made_of = self._made_of
        desk.controller = Controller(*self._made_of)
        return desk


@pytest.fixture
def desk():
    return Desk()


@pytest.fixture
def make_desk():
    return Desk
