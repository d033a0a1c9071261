import os
import signal
import socket
import threading

import pytest

from pollux.backends.process.select_loop import SelectLoop, ended_children
from pollux.testing.waiting import PATIENCE_SECONDS


@pytest.fixture
def loop():
    made = SelectLoop()
    yield made
    made.close()


def test_a_file_that_can_be_read_is_called_and_one_that_is_unwatched_is_not(loop):
    ours, theirs = socket.socketpair()
    called = []
    with ours, theirs:
        loop.watch(ours, lambda: called.append(ours.recv(10)))
        theirs.sendall(b"x")
        for call in loop.ready(PATIENCE_SECONDS):
            call()
        assert called == [b"x"]
        loop.watch(ours, lambda: called.append(b"can be written"), read=False, write=True)
        for call in loop.ready(PATIENCE_SECONDS):
            call()
        assert called == [b"x", b"can be written"]
        loop.unwatch(ours)
        assert loop.ready(0.0) == []
    loop.unwatch(ours)


def test_another_thread_ends_the_sleep(loop):
    thread = threading.Thread(target=loop.wake)
    thread.start()
    loop.turn(None)
    thread.join()
    assert loop.ready(0.0) == []


def test_signals_end_the_sleep(loop):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    told = []
    try:
        loop.listen_to_signals(lambda: told.append("end"))
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        loop.turn(None)
        assert told == ["end"]
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)


def test_children_that_have_ended_are_told_once():
    pid = os.fork()
    if not pid:
        os._exit(7)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert (pid, 7) in [*ended_children()]
    assert (pid, 7) not in [*ended_children()]
