import socket
from typing import Any

import pytest

from pollux.agent.distributed import connections as module
from pollux.agent.distributed.connections import cut, cut_other_users, is_possible, listening_ports, own_ends


@pytest.fixture
def pair():
    """A connection over IPv4 whose listening side sees it as one over IPv6, where this machine has that."""
    both = socket.has_dualstack_ipv6()
    where: dict[str, Any] = {"family": socket.AF_INET6, "dualstack_ipv6": True} if both else {}
    with socket.create_server(("::" if both else "127.0.0.1", 0), **where) as server:
        client = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
        accepted, _ = server.accept()
    with client, accepted:
        yield client, accepted


def is_open(connection: Any) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


def end(connection: Any) -> str:
    return f"127.0.0.1 {connection.getsockname()[1]}"


def test_both_sides_call_an_end_the_same(pair):
    client, accepted = pair
    assert accepted.getpeername()[0] in ("::ffff:127.0.0.1", "127.0.0.1")
    assert {end(client), end(accepted)} <= set(own_ends())


def test_an_address_has_one_text():
    assert module._text(("::ffff:10.0.0.5", 80)) == module._text(("10.0.0.5", 80)) == "10.0.0.5 80"
    assert module._text(("FE80::1%eth0", 80)) == "fe80::1 80"


@pytest.mark.parametrize("theirs", [0, 1])
def test_only_connections_to_the_named_ends_are_cut(pair, theirs):
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        beside, _ = server.accept()
    with other, beside:
        assert cut({end(pair[theirs])}) == 1
        assert not is_open(pair[1 - theirs])
        assert is_open(other)


def test_what_other_users_have_connected_is_cut(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as scripts_own:
        ports = {server.getsockname()[1], scripts_own.getsockname()[1]}
        assert ports <= listening_ports()
        clients = [socket.create_connection(each.getsockname()) for each in (server, scripts_own)]
        accepted = [each.accept()[0] for each in (server, scripts_own)]
        gloo = {server.getsockname()[1]}
        assert cut_other_users(gloo) == 0, "it is the user's own"
        monkeypatch.setattr(module.os, "geteuid", lambda: 12345)
        assert cut_other_users(gloo) == 1
        assert not is_open(clients[0])
        assert is_open(clients[1]), "a server of the script's own may have other guests"
        for each in (*clients, *accepted):
            each.close()


def test_a_default_timeout_of_the_scripts_own_is_respected(pair, monkeypatch):
    monkeypatch.setattr(module.socket, "getdefaulttimeout", lambda: 3.0)
    assert not is_possible()
    assert cut({end(pair[0])}) == 0
    assert own_ends() == []
