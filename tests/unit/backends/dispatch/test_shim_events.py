"""What the service makes of what a shim says, without a shim."""

from pathlib import Path
from typing import Any

from pollux.backends.dispatch.job_table import DispatchedJob, HeldGeneration, JobTable
from pollux.backends.dispatch.shim_events import ShimEvents
from pollux.backends.dispatch.site import Site
from pollux.backends.protocol import ReplicasStarted
from pollux.wire.live.heartbeat import PauseReport
from pollux.wire.live.messages import StatusMessage

PAUSE = PauseReport(0.4, "grow")


class Slots:
    def release_except(self, job_id, places):
        """Nothing is freed here."""


def handled(held, message):
    """What is told of a message, for a job that has this generation."""
    told: list[Any] = []
    table: Any = JobTable(Slots(), told.append)  # type: ignore[arg-type]
    thread: Any = None
    link: Any = type("Link", (), {"warm": None})()
    job = DispatchedJob("job", Path("/nowhere"), newest=held.generation, now=held)
    ShimEvents(table, thread, Site()).handle(job, link, message)
    return [(event.generation, event.pause_seconds, event.kind) for event in told if isinstance(event, ReplicasStarted)]


def test_a_change_that_came_about_without_a_service_is_told_with_its_pause():
    found_running = HeldGeneration(2, started=True, sent=True, live=True)
    assert handled(found_running, StatusMessage(True, 2, pause=PAUSE)) == [(2, 0.4, "grow")]


def test_a_change_that_came_about_while_the_connection_was_broken_is_told_with_its_pause():
    ordered: Any = HeldGeneration(2, launch=object(), sent=True, live=True)  # type: ignore[arg-type]
    assert handled(ordered, StatusMessage(True, 2, pause=PAUSE)) == [(2, 0.4, "grow")]
    assert handled(ordered, StatusMessage(True, 2, pause=PAUSE)) == [], "it was told"
