"""A stranger takes the service's port while the service is down: commands and agents send no token there."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from tests.support.forking import fork, read_all

from pollux.agent.reporting.report_client import Address, post_report
from pollux.testing.waiting import PATIENCE_SECONDS

OWN, NOBODY = os.geteuid(), 65534


def squat(user, report, address):
    """Listen as that user, answer as a service does, and report each request."""
    if user != OWN:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    with socket.create_server((address, 0)) as server:
        os.write(report, f"{server.getsockname()[1]}\n".encode())
        while True:
            peer, _ = server.accept()
            with peer:
                heard = peer.recv(1 << 16)
                if heard:
                    os.write(report, json.dumps(heard.decode()).encode() + b"\n")
                    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")


@contextlib.contextmanager
def squatter(user, address, heard):
    child, reading = fork(squat, user, address)
    with open(os.dup(reading)) as told:
        port = int(told.readline())
    try:
        yield port
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        heard.extend(map(json.loads, read_all(reading).splitlines()))


# Where the tests are not run by root there is no other user: then this shows only that the squatter hears.
@pytest.mark.parametrize("user", sorted({OWN, NOBODY if OWN == 0 else OWN}))
@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_tokens_are_sent_to_our_own_user_only(tmp_path, user, address):
    home = tmp_path / "home"
    heard: list[str] = []
    home.mkdir(mode=0o700)
    (home / "token").write_text("the-operators-token")
    (home / "token").chmod(0o600)
    with squatter(user, address, heard) as port:
        url = f"http://127.0.0.1:{port}"
        (home / "service.json").write_text(json.dumps({"url": url, "pid": 1}))
        ran = subprocess.run(
            [sys.executable, "-m", "pollux", "ls"],
            env={**os.environ, "POLLUX_HOME": str(home)}, capture_output=True, text=True, timeout=PATIENCE_SECONDS,
        )  # fmt: skip
        told = contextlib.nullcontext() if user == OWN else pytest.raises(ConnectionError, match=f"user {user} of")
        with told:
            post_report(Address(url, "job", "the-jobs-token"), "{}")
    said = "".join(heard)
    assert [token in said for token in ("the-operators-token", "the-jobs-token")] == [user == OWN] * 2
    if user != OWN:
        assert ran.returncode == 69
        assert f"user {user} of this machine listens at 127.0.0.1:{port}" in ran.stderr
        assert "Traceback" not in ran.stderr
