import os
import socket
import sys

import pytest
from tests.support.network import has_ipv6

from pollux.core.errors import Unreachable
from pollux.wire import socket_owners as module
from pollux.wire.socket_owners import check_server, end_of, owner_of, tcp_sockets

OWN, STRANGER = 1000, 4321
LISTENS, CONNECTED = "0A", "01"


@pytest.fixture(params=["asked", "read"])
def way(request, monkeypatch):
    """The kernel is asked for one connection; only a sandbox that cannot answer has its table read."""
    if request.param == "asked":
        assert module._answers(), "tests run on Linux"
        monkeypatch.setattr(module, "tcp_sockets", None)
    else:
        monkeypatch.setattr(module, "_answers", lambda: False)
        monkeypatch.setattr(module, "_ask", None)


# Not every machine has the second kind.
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("family", [socket.AF_INET, *([socket.AF_INET6] if has_ipv6() else [])])
def test_the_user_behind_a_connection_is_known_while_it_lasts(family):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = listener.getsockname()
        mine = socket.socket(family)
        mine.connect(here if family is socket.AF_INET else (f"::ffff:{here[0]}", here[1]))
        theirs, where = listener.accept()
        with theirs:
            assert owner_of(where, here) == os.geteuid()
            assert owner_of((where[0], where[1] ^ 1), here) is None
            mine.close()
            assert owner_of(where, here) is None, "what is left of a closed socket belongs to nobody"


def test_ends_are_read_as_the_kernel_lists_them():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        here, there = end_of(server.getsockname()), end_of(client.getsockname())
        rows = list(tcp_sockets({here.port}))
    assert {(each.own, each.other, each.listens) for each in rows} == {
        (here, end_of(("0.0.0.0", 0)), True),
        (there, here, False),
    }
    assert {each.user for each in rows} == {os.geteuid()}


def row(own: tuple[str, int], other: tuple[str, int], state: str, user: int, inode: int = 7) -> str:
    """A line of the kernel's table."""

    def text(end):
        packed = socket.inet_pton(socket.AF_INET6 if ":" in end[0] else socket.AF_INET, end[0])
        words = [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4)]
        return "".join(f"{word:08X}" for word in words) + f":{end[1]:04X}"

    return f"   0: {text(own)} {text(other)} {state} 00000000:00000000 00:00000000 00000000 {user} 0 {inode} 1 0 100 0"


@pytest.fixture
def connection(monkeypatch, tmp_path):
    """A connection to a server, and how to say who the kernel says has which sockets at its port."""
    tables = tmp_path / "tcp", tmp_path / "tcp6"
    monkeypatch.setattr(module, "_TABLES", tuple(map(str, tables)))
    monkeypatch.setattr(module.os, "geteuid", lambda: OWN)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        here, there = server.getsockname(), client.getsockname()
        any_port = {"0.0.0.0": "0.0.0.0", "::": "::", "::1": "::"}

        def listed(*rows):
            lines = {table: ["  sl  local_address ..."] for table in tables}
            for host, state, user in rows:
                own = (host, here[1])
                other = (any_port.get(host, "0.0.0.0"), 0) if state == LISTENS else there
                lines[tables[":" in host]].append(row(own, other, state, user, 0 if user is None else 7))
            for table, text in lines.items():
                table.write_text("\n".join(text) + "\n")
            return client

        yield listed


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([("127.0.0.1", LISTENS, OWN)], id="our own"),
        pytest.param([("127.0.0.1", LISTENS, OWN), ("127.0.0.1", CONNECTED, OWN)], id="our own, accepted"),
        pytest.param([("0.0.0.0", LISTENS, 0), ("127.0.0.1", CONNECTED, STRANGER)], id="a worker of root's proxy"),
        pytest.param([("::", LISTENS, OWN)], id="all addresses"),
        pytest.param([("127.0.0.2", LISTENS, STRANGER), ("127.0.0.1", LISTENS, OWN)], id="another address"),
        pytest.param([("::1", LISTENS, STRANGER), ("127.0.0.1", LISTENS, OWN)], id="the other family"),
        pytest.param([], id="led elsewhere by the kernel"),
    ],
)
def test_a_server_of_ours_or_of_root_is_trusted(connection, rows):
    check_server(connection(*rows), tuple)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([("127.0.0.1", LISTENS, STRANGER)], id="at our address"),
        pytest.param([("0.0.0.0", LISTENS, STRANGER)], id="at all addresses"),
        pytest.param([("::", LISTENS, STRANGER)], id="at all addresses of both families"),
        pytest.param([("127.0.0.1", CONNECTED, STRANGER)], id="gone, but it has accepted"),
        pytest.param([("127.0.0.1", LISTENS, OWN), ("127.0.0.1", CONNECTED, STRANGER)], id="accepted before ours"),
        pytest.param([("127.0.0.1", LISTENS, 65534)], id="a user without a name in this container"),
    ],
)
def test_another_users_server_is_refused_unless_trusted(connection, rows):
    stranger = max(user for _, _, user in rows)
    client = connection(*rows)
    with pytest.raises(Unreachable, match=rf"user {stranger} .* not user {OWN} or root: no token .*SERVER_UID") as told:
        check_server(client, tuple)
    assert told.value.exit_code == 69
    check_server(client, lambda: [stranger])


def test_a_row_that_is_missed_once_is_looked_for_again(connection, monkeypatch):
    client = connection(("127.0.0.1", LISTENS, STRANGER))
    tables, reads = module.tcp_sockets, []

    def missing_first(ports):
        reads.append(ports)
        return tables(ports) if len(reads) > 1 else iter(())

    monkeypatch.setattr(module, "tcp_sockets", missing_first)
    with pytest.raises(Unreachable):
        check_server(client, tuple)


def test_where_there_are_no_tables_nothing_is_refused(connection, monkeypatch, tmp_path):
    client = connection()
    monkeypatch.setattr(module, "_TABLES", (str(tmp_path / "none"), str(tmp_path / "such")))
    check_server(client, tuple)


def test_another_machine_is_not_looked_up(connection, monkeypatch):
    connection(("0.0.0.0", LISTENS, STRANGER))

    class Elsewhere:
        def getsockname(self):
            return "10.0.0.5", 4000

        def getpeername(self):
            return "10.0.0.6", 7341

    check_server(Elsewhere(), tuple)
