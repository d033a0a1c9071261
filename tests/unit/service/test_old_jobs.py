"""Jobs that ended long ago leave memory, snapshots and measurements, and their names are free again."""

from __future__ import annotations

import pytest
from tests.unit.service.test_restarts import restart

from pollux.controller import JobsForgotten
from pollux.core.errors import UnknownName
from pollux.store import TelemetryRow
from pollux.testing.servers.service import result_of

DAY = 86400.0


@pytest.fixture
def world(make_world):
    return make_world(keep_facts_seconds=90 * DAY, snapshot_every_facts=1)


def ended(world, name):
    world.submit(name, max_gpus=1)
    result_of(world.engine.cancel(name))
    world.telemetry.record([TelemetryRow(name, world.clock.time, "report", {"progress": 1.0})])


def test_jobs_that_ended_before_the_kept_facts_are_forgotten(world):
    ended(world, "old")
    world.after(60 * DAY)
    ended(world, "younger")
    world.submit("runs", max_gpus=1)
    world.after(45 * DAY)
    world.submit("new", max_gpus=1)
    assert [entry.record.spec.id for entry in world.engine.views.board.entries()] == ["younger", "runs", "new"]
    assert [entry.record.spec.id for entry in world.engine.views.board.entries(after="younger")] == ["runs", "new"]
    with pytest.raises(UnknownName):
        world.engine.job("old")
    assert world.telemetry.latest("report").keys() == {"younger"}
    assert world.engine.views.job_events.of("old") == ()


def test_a_restart_forgets_them_too_and_their_name_is_free(world):
    ended(world, "old")
    world.after(100 * DAY)
    world.submit("other", max_gpus=1)
    restart(world)
    assert list(world.engine.pipeline.controller.jobs) == ["other"]
    world.submit("old", max_gpus=1)
    assert world.engine.job("old").state in ("queued", "starting")


def test_only_so_many_are_forgotten_at_once_the_oldest_first(world, monkeypatch):
    monkeypatch.setattr("pollux.service.engine.pipeline._FORGOTTEN_AT_ONCE", 2)
    names = [f"old-{number}" for number in range(5)]
    for name in names:
        ended(world, name)
    world.after(100 * DAY)
    for number in range(4):
        world.submit(f"new-{number}", max_gpus=1)
    assert not {*names} & world.engine.pipeline.controller.jobs.keys()
    cuts = [event.ended_before for _, event in world.store.read(0) if isinstance(event, JobsForgotten)]
    assert len(cuts) == 3
    assert cuts == sorted(cuts), "the oldest go first"
