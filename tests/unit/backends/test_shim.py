"""The shim's own edges; its life is tested with the local backend."""

import shutil
import socket
import time
from types import SimpleNamespace

import pytest

from pollux.backends._far import FarNotice
from pollux.backends._generation import Order
from pollux.backends.protocol import ReplicasEnded
from pollux.backends.shim import Shim


@pytest.fixture
def shim(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        yield Shim(folder, listener, None)


def test_an_end_that_cannot_be_written_is_kept_for_later(shim):
    shim._unwritten = ended = ReplicasEnded(1.0, "job", 1, "stopped")
    shim._folder.joinpath("ended-1.json").mkdir()
    shim._write_end(ended)
    assert shim._is_busy()


def test_a_shim_whose_folder_was_removed_ends(shim):
    shim._unwritten = ended = ReplicasEnded(1.0, "job", 1, "stopped")
    shutil.rmtree(shim._folder)
    shim._write_end(ended)
    assert shim._is_done()


def test_it_says_that_it_can_have_a_job_go_elsewhere_altogether(shim):
    assert shim._status()["hands_over"] is True


def test_a_change_under_way_is_over_where_a_node_is_taken_back(shim):
    """Else the end of a replica there would be told as a loss, and answered by an order for what is ending."""
    told = []
    notice = FarNotice("n0", "node 'n0' is taken back by its engine")
    far = SimpleNamespace(look=lambda: None, told=[notice], false_alarms=[])
    live = SimpleNamespace(over=lambda: told.append("over"))
    generation = SimpleNamespace(told_to_stop=False, give_up=lambda why: told.append(why))
    shim._far, shim._live, shim._generation = far, live, generation
    shim._look_far()
    assert told == ["over", notice.why]


@pytest.mark.parametrize(
    ("seconds", "idle_for", "connected", "stopped"),
    [(5.0, 6.0, False, [7.0]), (5.0, 1.0, False, []), (5.0, 6.0, True, []), (None, 1e6, False, [])],
)
def test_a_job_whose_owner_is_gone_is_stopped_where_its_order_says_so(shim, seconds, idle_for, connected, stopped):
    told: list[float] = []
    order = SimpleNamespace(grace_seconds=7.0, orphan_seconds=seconds)
    shim._generation = SimpleNamespace(order=order, ended=None, stop=told.append, look_again_at=lambda: None)
    shim._idle_since = time.monotonic() - idle_for
    shim._connections = [object()] if connected else []
    waits = shim._timeout()
    shim._look_for_owner()
    shim._look_for_owner()
    assert told == stopped
    # Nothing else happens to it, so this is what the loop wakes up for.
    assert (waits is not None) == (seconds is not None and not connected)


def test_every_launch_has_a_store_of_its_own(shim, monkeypatch):
    """Scripts that make their process group themselves would find addresses of replicas that are gone."""
    closed = []

    class Host:
        def __init__(self, warm, let_go, head):
            self.pid = 1
            self.control, self.other = socket.socketpair()

        def close(self):
            closed.append(self)
            self.control.close()
            self.other.close()

    monkeypatch.setattr("pollux.backends._storehost.StoreHost", Host)
    order = SimpleNamespace(fleet=None)
    first = shim._open_store(order)
    second = shim._open_store(order)
    assert second is not first
    assert closed == [first]
    assert [key.fileobj for key in shim._selector.get_map().values()] == [second.control]
    second.close()


def test_an_order_of_a_newer_service_is_understood_without_what_it_adds(tmp_path):
    """A service that was upgraded while jobs went on talks to shims of the version before."""
    fleet = {"secret": "5a", "head": "h", "nodes": {"a": ["h", 7]}, "lease_seconds": 4.0, "lost_seconds": 5.0}
    plain = {
        "job_id": "job", "generation": 2, "argv": ["true"], "workdir": "/", "environ": {}, "replicas": [{}],
        "cores": [[0]], "places": ["0"], "run_id": "r", "path_was_set": False, "grace_seconds": 1.0,
        "memory_bytes": 0.0, "logs": str(tmp_path), "log_cap_bytes": 1000, "fleet": fleet,
    }  # fmt: skip
    assert Order.of({**plain, "new": 1, "fleet": {**fleet, "newer": 2}}) == Order.of(plain)
    assert Order.of(plain).generation == 2
