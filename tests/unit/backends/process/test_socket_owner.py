import os
import socket

import pytest
from tests.support.network import has_ipv6

from pollux.backends.process.socket_owner import owner_of


# Not every machine has the second kind.
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
