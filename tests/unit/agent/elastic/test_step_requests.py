"""Requests from outside, and the step at which all replicas serve them."""

import os
import random
import signal
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.elastic import step_requests as module
from pollux.agent.elastic.step_requests import CHECKPOINT, STOP, StepRequests


class Store:
    """What the job's store does, in one process."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)

    def add(self, key, amount):
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        return total


class Place:
    def __init__(self, replica: int, num_replicas: int, store: Any):
        self.replica = replica
        self.num_replicas = num_replicas
        self.store = store
        self.is_first = replica == 0
        self.device = torch.device("cpu")


def place(replica: int, num_replicas: int, store: Any) -> Any:
    """For a part that is given less than all of what `ReplicaGroup` is."""
    return Place(replica, num_replicas, store)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def watches(num_replicas, every=None, clock=None):
    """Watches whose threads never look: the test does."""
    store = Store()
    made = []
    for replica in range(num_replicas):
        one = StepRequests(place(replica, num_replicas, store), every, (), clock or Clock())
        one._closed.set()
        if one._thread is not None:
            one._thread.join()
        made.append(one)
    return made


def test_alone_a_request_is_served_at_the_next_boundary():
    (one,) = watches(1)
    assert one.at_boundary(1) == set()
    one.request(STOP)
    assert one.at_boundary(2) == {STOP}
    assert one.at_boundary(3) == set()


def test_alone_the_clock_asks_for_checkpoints():
    clock = Clock()
    (one,) = watches(1, 10.0, clock)
    clock.now = 9.9
    assert one.at_boundary(1) == set()
    clock.now = 10.1
    assert one.at_boundary(2) == {CHECKPOINT}
    clock.now = 15.0
    assert one.at_boundary(3) == set()
    clock.now = 20.2
    assert one.at_boundary(4) == {CHECKPOINT}


def test_without_a_period_the_clock_asks_for_nothing():
    clock = Clock()
    (one,) = watches(1, None, clock)
    clock.now = 1e12
    assert one.at_boundary(1) == set()


@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.integers(1, 25), st.integers(0, 4), st.sampled_from([STOP, CHECKPOINT])), max_size=6),
    st.integers(0, 2**32 - 1),
)
def test_all_replicas_serve_the_same_at_the_same_step(num_replicas, requests, seed):
    """In every step replicas reach the boundary in any order, and look at the store at any moment, or not at all."""
    chance = random.Random(seed)
    made = watches(num_replicas)
    served: list[dict[int, set[str]]] = [{} for _ in made]
    for step in range(1, 60):
        order = list(range(num_replicas))
        chance.shuffle(order)
        for replica in order:
            for when, who, what in requests:
                if when == step and who % num_replicas == replica:
                    made[replica].request(what)
            for other in made:
                if step > 30 or chance.random() < 0.3:
                    other._check_once()
            now = made[replica].at_boundary(step)
            if now:
                served[replica][step] = now
    assert all(one == served[0] for one in served)
    wanted = {what for _, _, what in requests}
    assert set().union(*served[0].values()) == wanted if wanted else served[0] == {}
    assert not any(one.armed for one in made)


def test_only_replica_0s_clock_counts():
    clock = Clock()
    made = watches(2, 10.0, clock)
    clock.now = 11.0
    made[1]._check_once()
    assert not made[1].armed
    made[0]._check_once()
    assert made[0].armed
    for step in range(1, 5):
        results = []
        for one in made:
            one._check_once()
            results.append(one.at_boundary(step))
        if results[0]:
            assert results == [{CHECKPOINT}, {CHECKPOINT}]
            break
    else:
        pytest.fail("never served")
    made[0]._check_once()
    assert not made[0].armed, "the next one is due a period later"


def test_a_store_that_is_gone_is_no_error_of_ours():
    made = watches(2)
    made[0]._replicas.store.check = lambda keys: (_ for _ in ()).throw(RuntimeError("Connection reset by peer"))
    made[0]._check_once()
    assert not made[0].armed


def test_a_signal_requests_a_stop_and_the_handler_comes_back():
    before = signal.getsignal(signal.SIGUSR1)
    one = StepRequests(place(0, 1, None), None, (signal.SIGUSR1,))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert one.at_boundary(1) == {STOP}
    one.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_outside_of_the_main_thread_no_signal_is_taken():
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: StepRequests(place(0, 1, None), None).close())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_thread_looks_and_ends(monkeypatch):
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.001)
    store = Store()
    one = StepRequests(place(1, 2, store), None, ())
    store.set("watch/0/request", "1")
    deadline = threading.Event()
    for _ in range(2000):
        if one.armed:
            break
        deadline.wait(0.005)
    assert one.armed
    one.close()
    assert one._thread is not None
    assert not one._thread.is_alive()


def test_a_second_signal_after_a_while_is_for_the_process_itself():
    now = [0.0]
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(now[0]))
    try:
        watch = StepRequests(ReplicaGroup(Environment(), torch.device("cpu")), None, clock=lambda: now[0])
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] = 3.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == []
        now[0] = 6.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [6.0]
        watch.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_signal_while_it_saves_changes_nothing():
    """A save may take minutes; launchers repeat themselves."""
    clock = Clock()
    watch = StepRequests(ReplicaGroup(Environment(), torch.device("cpu")), None, clock=clock)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.at_boundary(1) == {STOP}
        clock.now += 100.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert not watch.armed
    finally:
        watch.close()


def test_a_stop_is_wanted_until_the_process_ends():
    """What it is served by may fail midway, with a replica that dies."""
    watch = StepRequests(ReplicaGroup(Environment(), torch.device("cpu")), None)
    try:
        assert not watch.wants(STOP)
        watch.request(STOP)
        watch.request(CHECKPOINT)
        assert watch.at_boundary(1) == {STOP, CHECKPOINT}
        assert watch.wants(STOP)
        assert not watch.wants(CHECKPOINT)
    finally:
        watch.close()


def test_one_that_saves_alone_is_not_ended_by_being_asked_again():
    clock = Clock()
    watch = StepRequests(ReplicaGroup(Environment(), torch.device("cpu")), None, clock=clock)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        watch.mark_stopping()
        clock.now += 100.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == watch._on_signal
    finally:
        watch.close()


def test_a_sign_of_life_is_given_before_the_script_goes_on(monkeypatch):
    class Beating:
        told = 0

        def send_heartbeat(self) -> None:
            self.told += 1

    # Who hangs before the thread first looks is known all the same.
    monkeypatch.setattr(module, "_LIVE_POLL_SECONDS", 3600.0)
    mover: Any = Beating()
    watch = StepRequests(place(0, 1, None), None, (), mover=mover)
    assert mover.told == 1
    watch._closed.set()


def test_what_is_saved_ahead_counts_from_the_last_checkpoint_and_never_makes_them_rarer():
    clock = Clock()
    watch = StepRequests(place(0, 1, None), 600.0, (), clock)
    watch.save_ahead(60.0)
    clock.now = 60.0
    assert watch.at_boundary(1) == {CHECKPOINT}
    clock.now = 70.0
    watch.save_ahead(None)
    clock.now = 659.0
    assert watch.at_boundary(2) == set(), "as was asked for"
    watch.save_ahead(30.0)
    assert watch.at_boundary(3) == {CHECKPOINT}
    watch.save_ahead(9000.0)
    clock.now = 1258.0
    assert watch.at_boundary(4) == set()
    clock.now = 1259.0
    assert watch.at_boundary(5) == {CHECKPOINT}


def test_without_checkpoints_nothing_is_saved_ahead():
    clock = Clock()
    watch = StepRequests(place(0, 1, None), None, (), clock)
    watch.save_ahead(1.0)
    clock.now = 100.0
    assert watch.at_boundary(1) == set()
