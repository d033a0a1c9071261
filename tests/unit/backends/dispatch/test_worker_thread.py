"""The backend's thread: a turn that does not end is no health, however that came about."""

import socket
import threading

import pytest

from pollux.backends.dispatch.worker_thread import WorkerThread
from pollux.testing.waiting import PATIENCE_SECONDS, wait_until


@pytest.mark.parametrize("where", ["work", "timer", "listener", "socket", "lock"])
def test_a_thread_that_hangs_is_not_healthy(where):
    now, hangs, goes_on = [0.0], threading.Event(), threading.Event()

    def hang(*given):
        if not goes_on.is_set():
            hangs.set()
            assert goes_on.wait(PATIENCE_SECONDS)

    worker = WorkerThread(hang if where == "work" else lambda: None, clock=lambda: now[0])
    ours, theirs = socket.socketpair()
    worker.listener = hang
    assert not worker.healthy, "it was not started"
    if where == "lock":
        threading.Thread(target=lambda: hold(worker.lock, hang)).start()
        assert hangs.wait(PATIENCE_SECONDS)
    worker.start("test")
    if where == "timer":
        worker.after(0.0, hang)
    if where == "listener":
        worker.report("event")
    if where == "socket":
        worker.watch(ours, hang)
        theirs.send(b"x")
    worker.wake()
    assert hangs.wait(PATIENCE_SECONDS)
    wait_until("turn", lambda: worker._busy_since == 0.0)
    assert worker.healthy, "it may only be slow"
    now[0] = 31.0
    assert not worker.healthy
    if where == "socket":
        worker.unwatch(ours)
    goes_on.set()
    wait_until("health", lambda: worker.healthy)
    worker.stop()
    worker.close()
    ours.close()
    theirs.close()


def hold(lock, hang):
    with lock:
        hang()


def test_a_thread_that_has_nothing_to_do_is_healthy():
    now = [0.0]
    worker = WorkerThread(lambda: None, clock=lambda: now[0])
    worker.start("test")
    wait_until("rest", lambda: worker._busy_since is None)
    now[0] = 10_000.0
    wait_until("health", lambda: worker.healthy)
    worker.stop()
    worker.close()
