"""The endpoint of `pollux run`: reports get through, whatever others of the machine send to its port."""

import http.client
import json
import random
import socket
import threading
from concurrent.futures import Future
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from pollux.agent.reporting.report_client import Address, post_report
from pollux.cli.client import report_server
from pollux.cli.client.report_server import open_report_server
from pollux.service.auth.tokens import Tokens
from pollux.testing.waiting import PATIENCE_SECONDS, wait_until
from pollux.wire.report import Report, ReportReply

REPORT = json.dumps(asdict(Report(1, 1, 1, 1.0, 0.1, 1, 1, 8, 8, 1)))
TOKENS = Tokens("operator" * 4, "s" * 32, "viewer" * 6)


class Engine(SimpleNamespace):
    tokens = TOKENS

    def report(self, job_id, report):
        self.taken.append(job_id)
        done: Future[ReportReply] = Future()
        done.set_result(ReportReply(5.0))
        return done


@pytest.fixture
def server(capfd):
    before = threading.active_count()
    engine: Any = Engine(taken=[])
    with open_report_server() as opened:
        opened.engine = engine
        yield opened
    wait_until("threads to end", lambda: threading.active_count() <= before, PATIENCE_SECONDS, 0.05)
    told = capfd.readouterr()
    assert (told.out, told.err) == ("", ""), "the terminal is the job's"


def reports(server, job="job"):
    return post_report(Address(server.url, job, TOKENS.for_job("job")), REPORT)


def opened(server):
    port = int(server.url.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)


def ended(line):
    """Whether the server has closed it; what it said before is left out."""
    try:
        while line.recv(1 << 16):
            pass
    except OSError:
        pass
    return True


def test_a_report_is_taken_for_its_own_job_only(server):
    assert reports(server)["report_every_seconds"] == 5.0
    with pytest.raises(ConnectionError, match="403"):
        reports(server, "other")
    for token, status in ((TOKENS.operator, 200), (TOKENS.viewer, 403), ("no", 401)):
        asked = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_SECONDS)
        asked.request("POST", "/v1/jobs/job/reports", REPORT, {"Authorization": f"Bearer {token}"})
        assert asked.getresponse().status == status, token
        asked.close()
    assert server.engine.taken == ["job"] * 2


def test_a_body_is_not_read_without_a_token(server):
    with opened(server) as line:
        line.sendall(b"POST /v1/jobs/job/reports HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")
        assert b" 401 " in line.recv(1 << 16)
        assert ended(line)


LENGTHS = ("²", "٣", "-1", "+1", "1_0", "1e3", "9" * 5000, "", " ", "0x10", "1048577", "NaN", "5, 5")


@pytest.mark.parametrize("length", LENGTHS)
def test_odd_lengths_are_answered(server, length):
    with opened(server) as line:
        head = f"POST /v1/jobs/job/reports HTTP/1.1\r\nAuthorization: Bearer {TOKENS.for_job('job')}\r\n"
        line.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
        assert b" 413 " in line.recv(1 << 16)
        assert ended(line)


def test_random_bytes_are_answered_or_dropped(server):
    chance = random.Random(7)
    whole = b"POST /v1/jobs/job/reports HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n{}\n"
    for _ in range(150):
        sent = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            sent[chance.randrange(len(sent))] = chance.randrange(256)
        with opened(server) as line:
            line.sendall(bytes(sent))
            line.shutdown(socket.SHUT_WR)
            assert ended(line)
    assert reports(server)


def test_idle_connections_do_not_keep_reports_out(server):
    idle = [opened(server) for _ in range(3 * report_server._MOST_CONNECTIONS)]
    try:
        assert reports(server)
        # Those that were closed for others end their threads; the rest is bounded.
        most = report_server._MOST_CONNECTIONS + 8
        wait_until("few threads", lambda: threading.active_count() <= most, PATIENCE_SECONDS, 0.05)
    finally:
        for each in idle:
            each.close()


@pytest.mark.parametrize("opening", [b"", b"POST /v1/jobs/job/reports HTTP/1.1\r\nX: ", b"with a token"])
def test_a_trickle_is_cut_at_its_deadline(server, monkeypatch, opening):
    monkeypatch.setattr(report_server, "_SECONDS", 0.3)
    if opening == b"with a token":
        opening = f"POST /v1/jobs/job/reports HTTP/1.1\r\nAuthorization: Bearer {TOKENS.for_job('job')}\r\n".encode()
        opening += b"Content-Length: 1000000\r\n\r\n"
    with opened(server) as line:
        line.sendall(opening)
        over = threading.Event()

        def trickle():
            while not over.wait(0.02):
                try:
                    line.sendall(b"x")
                except OSError:
                    return

        sender = threading.Thread(target=trickle)
        sender.start()
        try:
            assert ended(line)
        finally:
            over.set()
            sender.join()


def test_headers_are_bounded(server):
    with opened(server) as line:
        line.sendall(b"POST / HTTP/1.1\r\n")
        try:
            for number in range(100):
                line.sendall(b"X-%d: %s\r\n" % (number, b"x" * 60_000))
        except OSError:
            pass
        assert ended(line)
