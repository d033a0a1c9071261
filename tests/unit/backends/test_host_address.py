"""Where a host listens, as it is told in one word."""

import json
import os
import subprocess
import sys
import time

import pytest
from tests.support.network import has_ipv6

from pollux.backends.node_daemon import daemon
from pollux.backends.transport.query import ask_host
from pollux.core.errors import InvalidInput
from pollux.testing.waiting import PATIENCE_SECONDS

SECRET = "ab" * 32


@pytest.mark.parametrize(
    ("listen", "where"),
    [
        ("127.0.0.1", ("127.0.0.1", 0)),
        ("10.0.0.1:7000", ("10.0.0.1", 7000)),
        ("node1:7000", ("node1", 7000)),
        ("fd00::5", ("fd00::5", 0)),
        ("[fd00::5]", ("fd00::5", 0)),
        ("[fd00::5]:7000", ("fd00::5", 7000)),
    ],
)
def test_addresses_of_both_kinds(listen, where):
    assert daemon._where(listen) == where


@pytest.mark.parametrize("listen", ["", ":7000", "node1:", "node1:x", "[fd00::5]:x", "node1:70000"])
def test_what_is_no_address(listen):
    with pytest.raises(InvalidInput, match="--listen is"):
        daemon._where(listen)


# Not every machine has the second kind.
@pytest.mark.parametrize("listen", ["127.0.0.1", *(["::1"] if has_ipv6() else [])])
def test_a_host_answers_where_it_listens(tmp_path, listen):
    announce = tmp_path / "announce.json"
    words = [
        sys.executable,
        "-m",
        "pollux.backends.node_daemon.daemon",
        "--node",
        "n",
        "--places",
        "1",
        "--listen",
        listen,
        "--cold",
    ]
    words += ["--announce", str(announce), "--with-parent"]
    environ = {**os.environ, daemon.SECRET_VARIABLE: SECRET}
    with subprocess.Popen(words, stdin=subprocess.PIPE, env=environ) as process:
        while not announce.exists():
            assert process.poll() is None
            time.sleep(0.02)
        said = json.loads(announce.read_text())
        assert said["address"] == listen
        answer = ask_host((said["address"], said["port"]), bytes.fromhex(SECRET), {"see": ["/"]}, 60.0)
        assert answer["seen"] == [True]
        process.stdin.close()
        assert process.wait(PATIENCE_SECONDS) == 0
