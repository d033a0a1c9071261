"""The made-up day that the page's benchmark serves."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from pollux.controller import HOLDING, Controller
from pollux.store import open_store, open_telemetry
from pollux.wire.home_layout import store_file, telemetry_file

NOW = 1_800_000_000.0


@pytest.fixture(scope="module")
def build_big_store():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
        yield importlib.import_module("big_store").build_big_store


@pytest.fixture(scope="module")
def big(build_big_store, tmp_path_factory):
    return build_big_store(tmp_path_factory.mktemp("big"), 120, 10, 6.0, now=NOW, decide_every=120.0)


def test_the_day_is_one_that_the_controller_takes(big):
    store = open_store(store_file(big.home))
    try:
        saved = store.load()
        assert saved.revision == store.revision == big.num_facts
        replayed = Controller.restored(saved.state)
        events = [event for _, event in store.read()]
    finally:
        store.close()
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert events[-1].at <= NOW
    assert len(replayed.jobs) == 120
    assert len(replayed.active) == big.num_active
    used: dict[str, int] = {}
    for record in replayed.active.values():
        assert (record.state in HOLDING) == bool(record.placement)
        for node, count in record.placement:
            used[node] = used.get(node, 0) + count
    assert max(used.values()) <= 8
    assert sum(used.values()) > 40, "most of 80 GPUs are in use"
    assert any(record.num_restarts for record in replayed.jobs.values()), "some were resized"


def test_jobs_have_measurements(big):
    telemetry = open_telemetry(telemetry_file(big.home))
    try:
        newest = telemetry.latest("report")
        job_id, row = next(iter(newest.items()))
        assert telemetry.series(job_id, "report")[-1].values == row.values
    finally:
        telemetry.close()
    assert len(newest) > 100
    assert all(row.at <= NOW for row in newest.values())
    assert row.values["total_progress"] >= row.values["progress"] > 0


def test_the_same_seed_gives_the_same_day(build_big_store, tmp_path):
    first, again = (build_big_store(tmp_path / name, 30, 4, 2.0, now=NOW) for name in ("a", "b"))
    assert (first.num_facts, first.num_rows, first.num_active) == (again.num_facts, again.num_rows, again.num_active)
