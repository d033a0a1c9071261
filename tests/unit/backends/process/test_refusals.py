"""What is told of strangers is little, and says who they were."""

import os
import socket

from pollux.backends.process import refusals
from pollux.backends.process.refusals import RefusalLog, Refusals


def test_one_line_for_each_kind_in_so_many_seconds(monkeypatch):
    now, lines = [100.0], list[tuple[str, int]]()
    monkeypatch.setattr(refusals.time, "monotonic", lambda: now[0])
    log = RefusalLog("the store", lambda text, many: lines.append((text, many)))
    for _ in range(1000):
        log.tell("somebody", "proof", "no secret")
    log.tell("somebody", "slow", "too slow")
    now[0] = 111.0
    log.tell("another", "proof", "no secret")
    assert lines == [
        ("the store refused somebody: no secret", 1),
        ("the store refused somebody: too slow", 1),
        ("the store refused another: no secret; and 999 more before", 1000),
    ]


def test_who_made_the_pipe_hears_of_all_refusals(capfd):
    pipe = Refusals()
    RefusalLog("the store").tell("somebody", "proof", "no secret " + "x" * 5000)
    ((many, text),) = pipe.read()
    assert many == 1
    assert text.startswith("the store refused somebody: no secret")
    assert pipe.read() == []
    assert "refused somebody" in capfd.readouterr().err


def test_the_user_of_this_machine_is_named():
    lines: list[str] = []
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as stranger,
        listener.accept()[0] as peer,
    ):
        where = stranger.getsockname()
        RefusalLog("the store", lambda text, many: lines.append(text)).refuse(peer, where, "proof", "no secret")
    assert lines == [f"the store refused {where[0]}:{where[1]} (user {os.geteuid()}): no secret"]
