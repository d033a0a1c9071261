"""Which of the jobs that wait for slots of one another is restarted."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pollux.backends.dispatch import changes
from pollux.backends.dispatch.changes import JobChanges
from pollux.backends.dispatch.job_table import DispatchedJob, HeldGeneration, JobTable
from pollux.backends.nodes.slot import Slot
from pollux.backends.protocol import Launch
from pollux.core import Placement

CIRCLE = {"second": ({"n2": 3}, {"n3": 4}), "third": ({"n3": 4}, {"n2": 2})}
GROWER = {"first": ({"n1": 4, "n2": 1}, {"n1": 4, "n2": 2})}


class Busy:
    """Nodes on which no slot is free."""

    def allocate(self, job_id, placement, kept, busy):
        return ()

    def refused(self, job_id, placement, kept):
        return "", ()

    def placement(self, places):
        return Placement.of(Counter(place.node for place in places))


class Thread:
    def __getattr__(self, name):
        return lambda *given: None


def job_that_waits(name, order, had, wanted):
    places = tuple(Slot(node, index) for node, count in had.items() for index in range(count))
    now = HeldGeneration(1, places=places, started=True, sent=True, live=True)
    launch = Launch(name, 2, Placement.of(wanted), ("true",), "/", live=True)
    link: Any = object()
    return DispatchedJob(name, Path("/"), 2, now, HeldGeneration(2, launch, order=order, changes=True, live=True), link)


def restarted(jobs):
    """The jobs that are told to save and end, once all have waited for long, in the order of their decisions."""
    anything: Any = Thread()
    slots: Any = Busy()
    table = JobTable(slots, anything)
    table.jobs.update((name, job_that_waits(name, order, *moves)) for order, (name, moves) in enumerate(jobs.items()))
    mover = JobChanges(table, anything, anything, anything)
    for _ in range(2):
        for job in table.jobs.values():
            if job.awaits_change:
                mover.advance(job)
    return [name for name, job in table.jobs.items() if job.now and job.now.stop_grace is not None]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(changes, "_DEADLOCK_SECONDS", 0.0)


def test_one_that_leaves_slots_to_others_and_never_one_that_only_grows():
    for order in itertools.permutations({**CIRCLE, **GROWER}.items()):
        jobs = dict(order)
        assert restarted(jobs) == [next(name for name in jobs if name in CIRCLE)], jobs


def test_none_where_nobody_else_waits():
    for name, moves in {**CIRCLE, **GROWER}.items():
        assert restarted({name: moves}) == []
