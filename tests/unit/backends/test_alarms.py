"""False alarms as a backend counts them: what jobs' shims say of replicas and of nodes."""

import socket

import pytest

from pollux.backends.dispatch.job_table import DispatchedJob
from pollux.backends.dispatch.shim_client import ShimClient
from pollux.backends.fleet.backend import FleetBackend
from pollux.backends.local import LocalBackend
from pollux.backends.nodes.provider import PooledNodeProvider
from pollux.wire.live.messages import AlarmMessage

REPLICA = AlarmMessage(1.0, "replica 1 gave a sign of life", replica=1)
NODE = AlarmMessage(1.0, "node 'n0' answers again")


@pytest.fixture
def say(tmp_path):
    """Have the shim of a job say something to a backend."""
    with socket.socket() as peer:
        link = ShimClient("job", peer)
        yield lambda backend, message: backend._dispatcher.shims.handle(DispatchedJob("job", tmp_path), link, message)


def test_replicas_are_counted_on_one_machine(say, tmp_path, caplog):
    backend = LocalBackend(tmp_path, slots=1, warm=False)
    assert backend.false_alarms == 0
    say(backend, REPLICA)
    assert backend.false_alarms == 1
    assert "false alarm 1: replica 1 gave a sign of life (job 'job')" in caplog.text


def test_replicas_and_nodes_are_counted_on_many_and_only_nodes_are_warned_of(say, tmp_path):
    backend = FleetBackend(tmp_path, PooledNodeProvider(), head="127.0.0.1", warm=False)
    say(backend, REPLICA)
    assert (backend.false_alarms, backend.warnings()) == (1, ())
    say(backend, NODE)
    assert backend.false_alarms == 2
    assert any("1 nodes were given up and answered later" in text for text in backend.warnings())
