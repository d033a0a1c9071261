"""Whether a thread waits in a collective of the script's own, seen from another thread."""

import contextlib
import os
import threading
from typing import Any

import pytest
import torch.distributed as dist

from pollux.agent.distributed import authenticated_store
from pollux.agent.elastic import stray_collective
from pollux.agent.elastic.stray_collective import StrayCollectiveCheck, own_collective
from pollux.testing.waiting import PATIENCE_SECONDS


class Ended(BaseException):
    """The process would have ended."""


@pytest.fixture
def waits(monkeypatch):
    """Runs something in a thread, held up inside of `torch.distributed.barrier`; gives that thread's number."""
    held, go, threads = threading.Event(), threading.Event(), []

    def hold(*values: Any) -> None:
        held.set()
        go.wait(PATIENCE_SECONDS)
        raise RuntimeError("there is no group")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", hold)

    def start(run: Any) -> int:
        def work() -> None:
            with contextlib.suppress(RuntimeError):
                run()

        thread = threading.Thread(target=work, daemon=True)
        threads.append(thread)
        thread.start()
        assert held.wait(PATIENCE_SECONDS)
        return int(thread.ident or 0)

    yield start
    go.set()
    for thread in threads:
        thread.join()


@pytest.fixture
def looked(monkeypatch):
    """Looks after a thread; gives what is told, and None where it is left in peace."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)

    def look(thread: int | None) -> str | None:
        told: list[str] = []
        one = StrayCollectiveCheck(told.append)
        one._thread = thread
        code = 0
        try:
            one.check()
        except Ended as ended:
            code = ended.args[0]
        assert code == (75 if told else 0)
        return told[0] if told else None

    return look


def test_a_barrier_of_the_script_is_seen_and_told(waits, looked):
    thread = waits(dist.barrier)
    assert own_collective(thread) == "barrier"
    assert "the script calls torch.distributed.barrier between pollux.init" in looked(thread)
    assert looked(None) is None, "it has come to its loop"


def test_one_of_our_own_is_not(waits, looked):
    names = {"barrier": dist.barrier}
    # As if it came from a module of the agent.
    exec(compile("def ours():\n    barrier()", f"{stray_collective._OURS}/some.py", "exec"), names)
    assert looked(waits(names["ours"])) is None


def test_a_thread_that_does_something_else_is_left_in_peace(looked):
    assert looked(threading.get_ident()) is None
    assert own_collective(-1) == ""


def test_it_is_the_thread_that_began():
    one = StrayCollectiveCheck(lambda why: None)
    one.watch_this_thread()
    assert one._thread == threading.get_ident()
    one.stop_watching()
    assert one._thread is None
    one.check()


def test_the_store_that_a_collective_of_the_scripts_asks_is_no_code_of_ours(waits, monkeypatch):
    """PyTorch makes a group by asking the store, which is this package's, from inside of its own function."""

    def barrier(hold: Any) -> None:
        exec(compile("hold()", authenticated_store.__file__, "exec"), {"hold": hold})

    held = dist.distributed_c10d._get_default_group
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: barrier(held))
    assert own_collective(waits(dist.barrier)) == "barrier"
