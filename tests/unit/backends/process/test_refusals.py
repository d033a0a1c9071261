"""What is told of strangers is little, and says who they were."""

import os
import socket

from pollux.backends.process import refusals
from pollux.backends.process.refusals import RefusalLog


def test_one_line_for_each_kind_in_so_many_seconds(monkeypatch):
    now, lines = [100.0], list[str]()
    monkeypatch.setattr(refusals.time, "monotonic", lambda: now[0])
    log = RefusalLog("the store", lines.append)
    for _ in range(1000):
        log.tell("somebody", "proof", "no secret")
    log.tell("somebody", "slow", "too slow")
    now[0] = 111.0
    log.tell("another", "proof", "no secret")
    assert lines == [
        "the store refused somebody: no secret",
        "the store refused somebody: too slow",
        "the store refused another: no secret; and 999 more before",
    ]


def test_the_user_of_this_machine_is_named():
    lines: list[str] = []
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as stranger,
        listener.accept()[0] as peer,
    ):
        where = stranger.getsockname()
        RefusalLog("the store", lines.append).refuse(peer, where, "proof", "no secret")
    assert lines == [f"the store refused {where[0]}:{where[1]} (user {os.geteuid()}): no secret"]
