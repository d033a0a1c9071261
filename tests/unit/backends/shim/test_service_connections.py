"""Who may order a shim: the user whose job it is."""

import os
import socket

import pytest

from pollux.backends.process.select_loop import SelectLoop
from pollux.backends.shim import service_connections
from pollux.backends.shim.service_connections import ServiceConnections
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.live.messages import StatusMessage, StatusRequest, encode_message


@pytest.mark.parametrize(("user", "heard"), [(os.geteuid(), True), (0, True), (None, False), (65534, False)])
def test_another_user_is_not_heard(tmp_path, monkeypatch, capfd, user, heard):
    monkeypatch.setattr(service_connections, "user_of", lambda peer: user)
    # Root, who may run these tests, is one of those who are heard.
    monkeypatch.setattr(service_connections.os, "geteuid", lambda: 1234 if user == 65534 else os.getuid())
    loop = SelectLoop()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        folder = os.open(tmp_path, os.O_RDONLY)
        path = f"/proc/self/fd/{folder}/shim.sock"
        listener.bind(path)
        listener.listen()
        services = ServiceConnections(listener, loop, lambda request: StatusMessage(False, None), lambda: None)
        services.listen()
        caller.connect(path)
        os.close(folder)
        loop.turn(0.0)
        caller.settimeout(PATIENCE_SECONDS)
        if heard:
            caller.sendall(encode_message(StatusRequest()))
            loop.turn(0.0)
            assert b"StatusMessage" in caller.recv(1 << 16)
        else:
            assert caller.recv(1 << 16) == b""
            assert not services
        services.close()
    loop.close()
    said = capfd.readouterr().err
    assert (f"the job's shim refused user {user}" in said) == (not heard), said


def test_the_kernel_tells_who_connected(tmp_path):
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert service_connections.user_of(ours) == os.geteuid()
