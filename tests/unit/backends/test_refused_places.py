"""Places that a lender does not give: what was to start there is told as refused, and what runs goes on."""

import collections
import time

import pytest

from pollux.backends.dispatch import changes
from pollux.backends.dispatch.job_table import DispatchedJob, HeldGeneration
from pollux.backends.fleet.backend import FleetBackend
from pollux.backends.fleet.shared_folders import FolderCheck
from pollux.backends.nodes.provider import LentNode, PooledNodeProvider
from pollux.backends.nodes.slot import Slot
from pollux.backends.protocol import Launch, ReplicasEnded, ReplicasLost
from pollux.core import Node, Placement
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.live.messages import ResizeRequest


class Link:
    """A shim that only remembers what it was told."""

    leaving, warm = False, True

    def __init__(self):
        self.sent = []

    def send(self, request):
        self.sent.append(request)

    def close(self):
        pass


def launch(generation=1, **counts):
    return Launch("job", generation, Placement.of(counts), ("python", "x.py"), "/", live=True)


def offered(*names):
    return [LentNode(Node(name, 2, "cpu", num_cpus=4.0), ("127.0.0.1", 1)) for name in names]


@pytest.fixture
def lender():
    made = PooledNodeProvider()
    made.offer(offered("a", "b"))
    return made


@pytest.fixture
def backend(tmp_path, lender):
    return FleetBackend(tmp_path, lender, "test", head="127.0.0.1", warm=False)


@pytest.fixture
def work(backend):
    """A backend that was not started: what its thread would do is done by hand. Job `job` runs at a/0."""
    work = backend._dispatcher
    places = work.slots.allocate("job", Placement.of({"a": 1}), (), ())
    job = work.table.jobs["job"] = DispatchedJob("job", work.home / "run" / "job", newest=1, link=Link())
    job.now = HeldGeneration(1, launch(a=1), places=places, started=True, sent=True, live=True)
    return work


def told(work):
    events, work.thread._events = [*work.thread._events], collections.deque()
    return events


def test_a_change_to_a_node_that_has_just_gone_leaves_the_job_as_it_runs(backend, work, lender):
    lender.offer(offered("a"))
    backend.resize(launch(2, a=1, b=1))
    work.advance()
    (event,) = [each for each in told(work) if isinstance(each, ReplicasLost)]
    assert (event.generation, event.replicas, event.remaining) == (2, (1,), Placement.of({"a": 1}))
    assert (event.refused, event.detail) == (True, "node 'b' is gone")
    job = work.table.jobs["job"]
    assert job.link.sent == [], "the shim need not hear of it"
    assert (job.now.generation, job.now.state, job.next, job.newest) == (1, "running", None, 2)
    backend.resize(launch(3, a=1))
    work.advance()
    assert [type(request) for request in job.link.sent] == [ResizeRequest]
    assert job.now.target == (Slot("a", 0),)


def test_what_others_hold_for_now_is_waited_for(backend, work, lender):
    lender.ask("other", {"b": 2})
    backend.resize(launch(2, b=1, a=1))
    work.advance()
    assert [each for each in told(work) if isinstance(each, ReplicasLost)] == []
    assert work.table.jobs["job"].next.generation == 2


def test_a_start_whose_places_are_refused_is_no_loss(tmp_path, lender):
    lender.refusal = lambda job_id: "other jobs of the engine hold node 'b'"
    lender.ask("other", {"b": 2})
    backend = FleetBackend(tmp_path, lender, "test", head="127.0.0.1", warm=False)
    events: list[object] = []
    backend.start(events.append)
    try:
        backend.submit(Launch("new", 1, Placement.of({"b": 1}), ("python", "x.py"), "/"))
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not any(isinstance(event, ReplicasEnded) for event in events):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        (ended,) = [event for event in events if isinstance(event, ReplicasEnded)]
        assert (ended.outcome, ended.detail) == ("refused", "other jobs of the engine hold node 'b'")
        backend.submit(Launch("new", 3, Placement.of({"a": 1}), ("python", "x.py"), "/"))
        assert [entry.generation for entry in backend.running()] == [3]
        backend.stop("new", 3, 0.0)
    finally:
        backend.close()


@pytest.fixture
def shared(work, monkeypatch):
    """All nodes see the job's folders."""
    monkeypatch.setattr(work.site, "check", lambda launch, slots: FolderCheck())


def test_a_change_that_keeps_no_place_is_sent_to_what_runs(backend, work, shared):
    backend.resize(launch(2, b=1))
    work.advance()
    job = work.table.jobs["job"]
    (request,) = job.link.sent
    assert isinstance(request, ResizeRequest)
    assert request.order.places == ("b/0",)
    assert (job.now.generation, job.now.stop_grace) == (2, None)
    assert set(job.now.places) == {Slot("a", 0), Slot("b", 0)}, "nobody else may have either while it moves"


def test_a_change_that_keeps_no_place_waits_for_who_has_the_new_ones(backend, work, lender, shared):
    lender.ask("other", {"b": 2})
    backend.resize(launch(2, b=1))
    work.advance()
    job = work.table.jobs["job"]
    assert (job.link.sent, job.next.generation, job.now.stop_grace) == ([], 2, None)
    lender.drop("other", {"b": (0, 1)})
    work.advance()
    assert [type(request) for request in job.link.sent] == [ResizeRequest]


@pytest.mark.parametrize(("more", "stops"), [({}, True), ({"a": 1}, False)])
def test_places_that_never_come_are_not_waited_for_without_end_by_who_holds_others(
    backend, work, lender, shared, monkeypatch, more, stops
):
    """Under a quota, say, nobody gets the new ones while it has the old ones."""
    clock = [1000.0]
    monkeypatch.setattr(changes.time, "monotonic", lambda: clock[0])
    lender.ask("other", {"b": 2})
    backend.resize(launch(2, b=1, **more))
    job = work.table.jobs["job"]
    work.advance()
    clock[0] += 299.0
    work.advance()
    assert (job.next.changes, job.now.stop_grace) == (True, None)
    clock[0] += 2.0
    work.advance()
    assert (job.now.stop_grace is not None) == stops
    assert job.next.changes != stops


def test_what_is_to_go_where_nothing_can_be_saves_and_ends(backend, work, lender):
    lender.offer(offered("a"))
    backend.resize(launch(2, b=1))
    work.advance()
    job = work.table.jobs["job"]
    assert (job.next.generation, job.now.stop_grace) == (2, launch(2, b=1).grace_seconds)
