import os
import socket

import pytest

from pollux.backends.process import socket_owner
from pollux.backends.process.socket_owner import owner_of


@pytest.fixture(params=["asked", "looked up"], autouse=True)
def way(request, monkeypatch):
    """The kernel is asked for one connection; only a sandbox that cannot answer has its list of all read."""
    if request.param == "asked":
        assert socket_owner._is_answered(), "tests on Linux"
        monkeypatch.setattr(socket_owner, "_look_up", None)
    else:
        monkeypatch.setattr(socket_owner, "_is_answered", lambda: False)
        monkeypatch.setattr(socket_owner, "_ask", None)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_user_behind_a_connection_is_known_while_it_lasts(family):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = listener.getsockname()
        mine = socket.socket(family)
        try:
            mine.connect(here if family is socket.AF_INET else (f"::ffff:{here[0]}", here[1]))
        except OSError as error:
            mine.close()
            pytest.skip(f"this machine has no IPv6: {error}")
        theirs, where = listener.accept()
        with theirs:
            assert owner_of(where, here) == os.geteuid()
            assert owner_of((where[0], where[1] ^ 1), here) is None
            mine.close()
            assert owner_of(where, here) is None, "what is left of a closed socket belongs to nobody"


def test_a_stranger_is_told_from_us():
    """As root, the other end is another user's."""
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = listener.getsockname()
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setuid(user)
                line = socket.create_connection(here)
                os.close(theirs)
                os.read(ours, 1)
                line.close()
            finally:
                os._exit(0)
        line, where = listener.accept()
        with line:
            assert owner_of(where, here) == user
        os.close(theirs)
        os.close(ours)
        os.waitpid(pid, 0)
