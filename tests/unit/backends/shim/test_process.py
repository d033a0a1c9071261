"""The shim's own edges; its life is tested with the local backend."""

import errno
import gc
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pollux.backends.process.records import read_record, record_path
from pollux.backends.protocol import ReplicasEnded
from pollux.backends.shim.process import Shim
from pollux.backends.shim.remote_launcher import NodeLeaving
from pollux.core.errors import BackendFailed
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.live.codec import from_plain
from pollux.wire.live.messages import (
    EndedMessage,
    LaunchOrder,
    LaunchRequest,
    StatusRequest,
    decode_message,
    encode_message,
)


@pytest.fixture
def shim(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        made = Shim(folder, listener, None)
        yield made
        made._loop.close()


def test_an_end_that_cannot_be_written_is_kept_for_later(shim, monkeypatch):
    def full(path, value):
        raise BackendFailed(f"cannot write {path}: no space")

    monkeypatch.setattr("pollux.backends.shim.process.write_record", full)
    shim._unwritten = ended = ReplicasEnded(1.0, "job", 1, "stopped")
    shim._write_end(ended)
    assert shim._is_busy()


def test_a_shim_whose_folder_was_removed_ends(shim):
    shim._unwritten = ended = ReplicasEnded(1.0, "job", 1, "stopped")
    shutil.rmtree(shim._folder)
    shim._write_end(ended)
    assert shim._is_done()


@pytest.mark.parametrize("error", [ValueError("no number"), KeyError("step"), TypeError("None")])
def test_what_no_agent_would_write_ends_the_generation_and_not_the_shim(shim, error):
    told = []

    def found(key, value):
        raise error

    shim._live = SimpleNamespace(key_found=found, end_changes=lambda: told.append("over"))
    shim._generation = SimpleNamespace(end_for_restart=lambda why: told.append(why), outputs=[])
    shim._store = SimpleNamespace(found=lambda: [("beat/1/0", '{"step": "many"}')])
    shim._hear_store()
    assert told == ["over", f"it cannot be followed any more: {error}"]


def test_a_change_under_way_is_over_where_a_node_is_taken_back(shim):
    """Else the end of a replica there would be told as a loss, and answered by an order for what is ending."""
    told = []
    notice = NodeLeaving("n0", "node 'n0' is taken back by its engine", is_ending=True)
    far = SimpleNamespace(keep_connections=lambda: None, events=[notice], false_alarms=[])
    live = SimpleNamespace(end_changes=lambda: told.append("over"))
    generation = SimpleNamespace(told_to_stop=False, end_for_restart=lambda why: told.append(why))
    shim._remote, shim._live, shim._generation = far, live, generation
    shim._handle_node_events()
    assert told == ["over", notice.why]


@pytest.mark.parametrize(
    ("seconds", "idle_for", "connected", "stopped"),
    [(5.0, 6.0, False, [7.0]), (5.0, 1.0, False, []), (5.0, 6.0, True, []), (None, 1e6, False, [])],
)
def test_a_job_whose_owner_is_gone_is_stopped_where_its_order_says_so(shim, seconds, idle_for, connected, stopped):
    told: list[float] = []
    order = SimpleNamespace(grace_seconds=7.0, orphan_seconds=seconds)
    shim._generation = SimpleNamespace(order=order, ended=None, stop=told.append, due=lambda: None)
    ours, theirs = socket.socketpair()
    if connected:
        shim._services.add(theirs)
    shim._services.idle_since = time.monotonic() - idle_for
    waits = shim._due()
    shim._end_if_orphaned()
    shim._end_if_orphaned()
    ours.close()
    theirs.close()
    assert told == stopped
    # Nothing else happens to it, so this is what the loop wakes up for.
    assert (waits is not None) == (seconds is not None and not connected)


def test_every_launch_has_a_store_of_its_own(shim, monkeypatch):
    """Scripts that make their process group themselves would find addresses of replicas that are gone."""
    closed = []

    class NodeDaemon:
        def __init__(self, close_in_fork, fleet):
            self.pid = 1
            self.control, self.other = socket.socketpair()

        def close(self):
            closed.append(self)
            self.control.close()
            self.other.close()

    monkeypatch.setattr("pollux.backends.shim.store.server.StoreHost", NodeDaemon)
    order = SimpleNamespace(fleet=None)
    first = shim._open_store(order)
    second = shim._open_store(order)
    assert second is not first
    assert closed == [first]
    watched = [key.fileobj for key in shim._loop._selector.get_map().values()]
    assert (first.control in watched, second.control in watched) == (False, True)
    second.close()


@pytest.fixture
def order(tmp_path):
    """An order to start two replicas of a live job."""
    return from_plain(
        LaunchOrder,
        {
            "job_id": "job", "generation": 3, "argv": ["true"], "workdir": "/", "environ": {}, "replicas": [{}, {}],
            "cores": [[0], [0]], "places": ["0", "1"], "run_id": "r", "path_was_set": False, "grace_seconds": 1.0,
            "memory_bytes": 0.0, "logs": str(tmp_path / "logs"), "log_cap_bytes": 1000, "live": True,
        }
    )  # fmt: skip


def open_files():
    """How many this process holds, once those that nobody uses are closed."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def tell_launch(shim, order):
    """Have the shim hear of a launch over a connection, and look; what it says then."""
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(PATIENCE_SECONDS)
        shim._services.add(theirs)
        ours.sendall(encode_message(LaunchRequest(order)))
        shim._loop.turn(time.monotonic() + PATIENCE_SECONDS)
        shim._act_on_due()
        said = [decode_message(line) for line in ours.recv(1 << 16).splitlines()]
    shim._loop.turn(time.monotonic() + PATIENCE_SECONDS)
    assert not shim._services, "it has heard that the service is gone"
    return said


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN, errno.ENOMEM])
@pytest.mark.parametrize("live", [True, False])
def test_a_machine_without_room_is_no_fault_of_the_job(shim, order, monkeypatch, number, live):
    """Neither for the store of a live job, nor for the first replica of another; and the shim goes on."""
    error = OSError(number, os.strerror(number))

    def fails(*arguments):
        raise error

    monkeypatch.setattr("pollux.backends.shim.store.server.is_possible", lambda: live)
    monkeypatch.setattr("pollux.backends.shim.store.server.StoreHost", fails)
    monkeypatch.setattr("pollux.backends.process.launcher.start_replica", fails)
    *_, ended = tell_launch(shim, order)
    assert isinstance(ended, EndedMessage)
    assert (ended.ended["outcome"], ended.ended["generation"]) == ("refused", 3)
    assert os.strerror(number) in ended.ended["detail"]
    assert "ulimit -a" in ended.ended["detail"]
    assert read_record(record_path(shim._folder, "ended", 3)) == ended.ended
    assert not shim._is_busy()
    assert not shim._leaving
    error = OSError(errno.ENOMEM, "once more")
    *_, again = tell_launch(shim, replace(order, generation=4))
    assert (again.ended["generation"], again.ended["outcome"]) == (4, "refused")


def test_replicas_that_were_started_end_where_others_cannot_be(shim, order, monkeypatch):
    """Also where there is no file left to look for what they started."""
    pids: list[subprocess.Popen[bytes]] = []

    def start(*arguments):
        if pids:
            raise OSError(errno.EAGAIN, "no processes")
        pids.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
        return pids[0].pid

    def no_files():
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr("pollux.backends.shim.store.server.is_possible", lambda: False)
    monkeypatch.setattr("pollux.backends.process.launcher.start_replica", start)
    with monkeypatch.context() as patch:
        patch.setattr("pollux.backends.process.proc.process_table", no_files)
        tell_launch(shim, order)
        assert pids[0].wait(PATIENCE_SECONDS) == -signal.SIGKILL
    shim._generation.on_exit(pids[0].pid, -signal.SIGKILL)
    monkeypatch.setattr("pollux.backends.process.proc.process_table", dict)
    shim._act_on_due()
    assert shim._generation.ended.outcome == "refused"
    assert shim._generation.ended.detail == "replicas could not be started: [Errno 11] no processes"


@pytest.mark.parametrize("live", [True, False])
def test_a_machine_without_processes_costs_the_shim_no_files_and_no_signals(shim, order, monkeypatch, live):
    def fails():
        raise OSError(errno.EAGAIN, "no processes")

    monkeypatch.setattr("pollux.backends.shim.store.server.is_possible", lambda: live)
    monkeypatch.setattr("os.fork", fails)
    before, masked = open_files(), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for generation in range(3, 8):
        *_, ended = tell_launch(shim, replace(order, generation=generation))
        assert ended.ended["outcome"] == "refused"
    assert open_files() == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == masked


def test_the_meeting_place_of_a_job_that_is_not_live_leaves_no_file_where_nobody_hosts_it(shim, order, monkeypatch):
    def fails(*arguments, **options):
        raise OSError(errno.EAGAIN, "no processes")

    monkeypatch.setattr("pollux.backends.shim.store.server.is_possible", lambda: True)
    monkeypatch.setattr("pollux.backends.shim.store.server.ListeningStore.fork_host", fails)
    before = open_files()
    *_, ended = tell_launch(shim, replace(order, live=False))
    assert ended.ended["outcome"] == "refused"
    assert open_files() == before


def test_a_store_that_nobody_came_to_ends_with_the_launch(shim, order, monkeypatch):
    control, other = socket.socketpair()
    closed = []

    def close():
        closed.append(control)
        control.close()

    def fails(*arguments):
        raise OSError(errno.EAGAIN, "no processes")

    host = SimpleNamespace(pid=None, control=control, address="h:1", port=1, variable="h:1 00", close=close)
    monkeypatch.setattr("pollux.backends.shim.store.server.is_possible", lambda: True)
    monkeypatch.setattr("pollux.backends.shim.store.server.StoreHost", lambda *arguments: host)
    monkeypatch.setattr("pollux.backends.process.launcher.start_replica", fails)
    with other:
        *_, ended = tell_launch(shim, order)
    assert ended.ended["outcome"] == "refused"
    assert closed == [control]
    assert shim._live is None


def say(shim, line):
    """Have the shim hear a line from a service."""
    ours, theirs = socket.socketpair()
    with ours:
        shim._services.add(theirs)
        ours.sendall(line)
        shim._loop.turn(time.monotonic() + PATIENCE_SECONDS)
    shim._loop.turn(time.monotonic() + PATIENCE_SECONDS)


def test_what_cannot_be_done_now_does_not_end_the_shim(shim, monkeypatch, capfd):
    def fails(*arguments):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(shim, "_status", fails)
    say(shim, 2 * encode_message(StatusRequest()))
    assert capfd.readouterr().err.count("could not be done: ") == 2
    assert not shim._leaving


@pytest.mark.parametrize(
    "make", [lambda line: line.replace(b'"argv"', b'"words"'), lambda line: b"[" * 100_000 + b"\n"]
)
def test_an_order_of_another_version_is_refused_and_the_shim_makes_room_for_one_that_knows_it(shim, order, capfd, make):
    say(shim, make(encode_message(LaunchRequest(order))))
    assert capfd.readouterr().err.count("not understood: ") == 1
    assert shim._leaving
