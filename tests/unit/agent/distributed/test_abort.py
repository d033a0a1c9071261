"""A group on NCCL that a peer is lost from, with a stand-in for it: what is done, in which order, how often."""

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pollux.agent.distributed import abort as abort_module
from pollux.agent.distributed import process_group
from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.elastic import generation_move as move_module
from pollux.agent.elastic import peer_connections
from pollux.agent.elastic.member import ElasticMember
from pollux.agent.elastic.membership import Membership

NAMES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")


class Group:
    """Notes what it is asked for."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def abort(self) -> None:
        self.calls.append("abort")


class Old:
    """As of a release whose groups cannot, but whose backends can."""

    def __init__(self, calls: list[str], backend: Any) -> None:
        self.calls, self.backend = calls, backend

    def _get_backend(self, device: Any) -> Any:
        return self.backend


@pytest.fixture
def clean(monkeypatch):
    for name in NAMES:
        # Set first, so that what the code under test sets is taken back.
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


@pytest.fixture
def made(monkeypatch, clean):
    """Replicas in a group on NCCL, as far as they can tell; `calls` are what was done to it."""
    calls: list[str] = []
    one: Any = ReplicaGroup(Environment(), torch.device("cpu"), meeting=dist.HashStore())
    one.owns_group, one.calls, one.idle = True, calls, True
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(process_group, "_data_group", lambda: Group(calls))

    def look(device: Any, seconds: float) -> bool:
        calls.append("look")
        return bool(one.idle)

    monkeypatch.setattr(abort_module, "is_idle", look)
    abort_module.keep_watchdog_out()
    return one


def test_it_is_broken_off_before_it_is_destroyed_and_once(made):
    assert made.abort_collectives()
    assert made.abort_collectives()
    assert made.is_broken
    made.disconnect()
    assert made.calls == ["look", "abort", "destroy"]
    assert not made.is_broken
    assert made.abort_collectives(), "there is none any more"
    assert made.calls == ["look", "abort", "destroy"]


def test_what_a_step_that_waited_has_left_is_not_trusted(made):
    made.idle = False
    assert not made.abort_collectives()
    assert not made.abort_collectives(), "nor is it later, when the step has run on"
    assert made.calls == ["look", "abort"]


def test_nor_where_the_library_may_have_broken_it_off_itself(made, monkeypatch):
    monkeypatch.setenv(NAMES[0], "2")
    assert not made.abort_collectives()
    assert made.calls == ["abort"]


def test_on_gloo_nothing_is_broken_off(made, monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert made.abort_collectives()
    assert not made.is_broken
    made.disconnect()
    assert made.calls == ["destroy"]


@pytest.mark.parametrize(("name", "value"), [(NAMES[0], "3"), (NAMES[1], "1")])
def test_what_the_user_set_stands(clean, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    abort_module.keep_watchdog_out()
    assert {each: os.environ[each] for each in NAMES if each in os.environ} == {name: value}
    assert not abort_module.watchdog_is_out()


def test_otherwise_the_watchdog_is_kept_out(clean):
    abort_module.keep_watchdog_out()
    assert os.environ[NAMES[0]] == "0"
    assert abort_module.watchdog_is_out()


def test_releases_without_a_public_way_are_coped_with():
    calls: list[str] = []
    assert abort_module.abort(Old(calls, Group(calls)))  # type: ignore[arg-type]
    assert calls == ["abort"]
    assert not abort_module.abort(Old(calls, object()))  # type: ignore[arg-type]

    class Failing:
        def abort(self) -> None:
            raise RuntimeError("cannot")

    assert not abort_module.abort(Failing())  # type: ignore[arg-type]


class Job:
    """Notes what it is asked for."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def disconnect(self) -> None:
        self.made.disconnect()

    def drop_unfinished_step(self) -> None:
        self.made.calls.append("drop")

    def save_alone(self) -> None:
        self.made.calls.append("save")


@pytest.mark.parametrize("idle", [True, False])
def test_after_a_loss_only_what_can_be_trusted_is_saved(made, monkeypatch, idle):
    monkeypatch.setattr(move_module, "_PATIENCE_SECONDS", 0.05)
    made.idle = idle
    live = ElasticMember(Membership(dist.HashStore(), 0, 0), made, joins=False)
    with pytest.raises(move_module.JobLost):
        live.recover(Job(made), "gone")  # type: ignore[arg-type]
    assert made.calls == ["look", "abort", "destroy", "drop", *(["save"] if idle else [])]


def test_who_is_stuck_is_freed_by_the_thread_that_watches(made, monkeypatch):
    monkeypatch.setattr(peer_connections, "_FREE_SECONDS", 0.0)
    store = dist.HashStore()
    live = ElasticMember(Membership(store, 0, 0), made, joins=False)
    live.move.connections._published = 0, 2
    monkeypatch.setattr(live.membership, "lost", lambda generation: frozenset({1}))
    monkeypatch.setattr(live.membership, "ends", lambda generation, count: frozenset())
    for _ in range(3):
        thread = threading.Thread(target=live.free_from_lost)
        thread.start()
        thread.join()
    assert made.calls == ["look", "abort"]
