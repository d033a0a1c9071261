"""Interfaces by their addresses, and what replicas are told of them: names of machines may lead to the loopback."""

import fcntl

import pytest

from pollux.backends.process import network
from pollux.backends.process.network import interface_of, meeting_variables
from pollux.backends.ray import node_actor
from pollux.backends.slurm import node_main


@pytest.fixture
def machine(monkeypatch):
    """Three interfaces; the last has no address."""
    has = {b"lo": b"\x7f\x00\x00\x01", b"ib0": b"\x0a\x00\x00\x07"}

    def answer(number, request, given):
        name = given.rstrip(b"\0")
        if name not in has:
            raise OSError(99, "Cannot assign requested address")
        return given[:20] + has[name] + given[24:]

    monkeypatch.setattr(network.socket, "if_nameindex", lambda: [(1, "lo"), (2, "down0"), (3, "ib0")])
    monkeypatch.setattr(network.fcntl, "ioctl", answer)


def test_the_loopback_of_this_machine_is_found():
    assert fcntl.ioctl is network.fcntl.ioctl
    assert interface_of("127.0.0.1") == "lo"


@pytest.mark.parametrize(
    ("address", "name"), [("10.0.0.7", "ib0"), ("10.0.0.8", ""), ("fe80::1", ""), ("node1", ""), ("", "")]
)
def test_an_interface_is_found_by_its_address(machine, address, name):
    assert interface_of(address) == name


def test_replicas_meet_where_the_host_listens_unless_somebody_says_where(machine):
    assert meeting_variables("10.0.0.7", {}) == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert meeting_variables("10.0.0.7", {"GLOO_SOCKET_IFNAME": "eth1"}) == {}
    assert meeting_variables("127.0.0.1", {}) == {}, "fleets on one machine say so themselves"
    assert meeting_variables("10.0.0.8", {}) == {}


class _Seen(Exception):
    """Instead of a host that is started."""


def test_hosts_of_both_engines_hand_it_to_replicas(machine, monkeypatch, tmp_path):
    def popen(words, env, **more):
        raise _Seen(env["GLOO_SOCKET_IFNAME"])

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(node_main.subprocess, "Popen", popen)
    monkeypatch.setattr(node_actor.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    (tmp_path / "pilots").mkdir()
    node = node_main._Node(tmp_path, "1_0", "node1")
    with pytest.raises(_Seen, match="ib0"):
        node.start({"places": 1, "gpus": []}, node_main.Where("0.0.0.0:20001", "10.0.0.7"), warm=False)
    with pytest.raises(_Seen, match="ib0"):
        node_actor.NodeHost("node1", 1, "10.0.0.7", "5a" * 16, with_gpus=False, warm=False)
