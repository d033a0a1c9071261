import socket

from pollux.testing import ports


def test_a_port_in_use_is_not_given(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        used = taken.getsockname()[1]
        free = ports.free_port()
        offered = iter([used, used, free])
        monkeypatch.setattr(ports._chosen, "randint", lambda first, last: next(offered))
        assert ports.free_port() == free


def test_none_is_of_those_that_connections_get():
    assert all(12_000 <= ports.free_port() < 20_000 for _ in range(20))
