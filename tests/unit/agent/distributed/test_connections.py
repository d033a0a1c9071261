import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pollux.agent.distributed import connections as module
from pollux.agent.distributed.connections import cut, cut_other_users, is_possible, listening_ports, own_ends
from pollux.testing.waiting import wait_until


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


def test_addresses_of_this_machine():
    assert [module._is_here(host) for host in ("127.0.0.1", "::ffff:127.0.0.1", "192.0.2.1", "2001:db8::1")] == [
        True, True, False, False,
    ]  # fmt: skip


def say_and(ending, where):
    """In the process of a stranger: connect, say something, and end it that way."""
    line = socket.create_connection(where)
    line.sendall(b"12345678")
    if ending == "shut":
        line.shutdown(socket.SHUT_WR)
    elif ending == "close":
        line.close()
    return line


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("ending", ["stay", "shut", "close"])
def test_a_stranger_is_cut_however_its_connection_stands(ending):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        told, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(go)
                os.setuid(65534)
                line = say_and(ending, ("127.0.0.1", port))
                os.read(told, 1)
                line.close()
            finally:
                os._exit(0)
        strange, _ = server.accept()
        own = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        wait_until("bytes", lambda: strange.recv(8, socket.MSG_PEEK) == b"12345678")
        if ending != "stay":
            wait_until("its end", lambda: state_of(strange) == CLOSE_WAIT)
        assert cut_other_users({port}) == 1
        assert is_open(own)
        strange.setblocking(False)
        with pytest.raises(BrokenPipeError):
            strange.sendall(b"x")
        os.close(go)
        os.close(told)
        os.waitpid(pid, 0)
        for each in (strange, own, accepted):
            each.close()


CLOSE_WAIT = 8


def state_of(line):
    return line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


RANK = """
import os, sys, torch, torch.distributed as dist
from pollux.agent.distributed import connections
before = connections.listening_ports()
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
cut = connections.cut_other_users(connections.listening_ports() - before)
total = torch.ones(1)
dist.all_reduce(total)
print(cut, int(total), flush=True)
sys.stdin.read()
"""
STRANGER = """
import encodings.idna, os, socket, sys
os.setuid(65534)
lines = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:]]
print(len(lines), flush=True)
for line in lines:
    line.settimeout(300)
    assert line.recv(1) == b""
print("cut", flush=True)
"""


def ports_of(process):
    """Where that process listens, as the kernel lists it."""
    files = Path(f"/proc/{process.pid}/fd")
    sockets = {os.readlink(each)[8:-1] for each in files.iterdir() if os.path.islink(each)}
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [str(int(row[1].rpartition(":")[2], 16)) for row in rows if row[3] == "0A" and row[9] in sockets]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_stranger_at_the_ports_of_a_real_group_is_cut_before_it_carries_anything(tmp_path):
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    def start(*words):
        command = [sys.executable, "-c", *map(str, words)]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=environ, text=True, cwd="/", stdin=pipe, stdout=pipe))
        return processes[-1]

    processes: list[Any] = []
    try:
        first = start(RANK, 0, tmp_path / "store")
        ports = wait_until("listening", lambda: ports_of(first))
        stranger = start(STRANGER, *ports)
        assert stranger.stdout.readline() == f"{len(ports)}\n"
        second = start(RANK, 1, tmp_path / "store")
        assert first.stdout.readline() == f"{len(ports)} 2\n"
        assert second.stdout.readline() == "0 2\n"
        assert stranger.stdout.readline() == "cut\n"
    finally:
        for process in processes:
            process.stdin.close()
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_default_timeout_of_the_scripts_own_is_respected(pair, monkeypatch):
    monkeypatch.setattr(module.socket, "getdefaulttimeout", lambda: 3.0)
    assert not is_possible()
    assert cut({end(pair[0])}) == 0
    assert own_ends() == []
