"""Reports to the scheduler: what they hold, when they are sent, and that training never waits for them."""

import json
import os
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pollux.agent.reporting.report_client import Address, Reporter, post_report
from pollux.agent.reporting.reporter import model_report
from pollux.core.errors import InvalidInput
from pollux.goodput import (
    BatchLimits,
    CorrectedThroughput,
    Efficiency,
    FabricThroughput,
    GoodputModel,
    PublishedThroughput,
)
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire import socket_owners
from pollux.wire.report import PlaceCorrection, Report

REPORT = Report(
    generation=1,
    step=10,
    samples=640,
    progress=640.0,
    epoch=0.5,
    num_replicas=2,
    num_nodes=1,
    batch_size=64,
    local_batch=32,
    accumulation=0,
    goodput=100.0,
)


class Wire:
    """Takes what is posted; answers, or fails as often as told."""

    def __init__(self, reply=None, failures=0):
        self.reply = reply or {}
        self.failures = failures
        self.bodies = []
        self.arrived = threading.Semaphore(0)

    def __call__(self, body):
        try:
            if self.failures:
                self.failures -= 1
                raise ConnectionError("nobody there")
            self.bodies.append(json.loads(body))
            return self.reply
        finally:
            self.arrived.release()

    def wait(self):
        assert self.arrived.acquire(timeout=PATIENCE_SECONDS), "nothing was sent"


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_first_report_goes_at_once_and_the_next_when_the_service_wants_it():
    wire, clock = Wire({"report_every_seconds": 40.0}), Clock()
    reporter = Reporter(wire, clock)
    reporter.offer(REPORT)
    wire.wait()
    assert wire.bodies[0]["step"] == 10
    clock.now = 39.0
    reporter.offer(replace(REPORT, step=20))
    assert not wire.arrived.acquire(timeout=0.1)
    clock.now = 40.0
    reporter.offer(replace(REPORT, step=21))
    wire.wait()
    assert [body["step"] for body in wire.bodies] == [10, 21]
    reporter.close()


@pytest.mark.parametrize(
    ("news", "gap"), [({"batch_size": 128}, 2.0), ({"goodput": 106.0}, 150.0), ({"goodput": None}, 150.0)]
)
def test_news_does_not_wait_for_the_usual_time(news, gap):
    wire, clock = Wire({"report_every_seconds": 600.0}), Clock()
    reporter = Reporter(wire, clock)
    reporter.offer(REPORT)
    wire.wait()
    await_answer(reporter)
    clock.now = gap - 0.1
    reporter.offer(replace(REPORT, **news))
    assert not wire.arrived.acquire(timeout=0.1)
    clock.now = gap
    reporter.offer(replace(REPORT, **news))
    wire.wait()
    reporter.close()


def await_answer(reporter):
    while reporter._sent is None:
        time.sleep(0.001)


def test_a_small_change_is_no_news():
    wire, clock = Wire({"report_every_seconds": 600.0}), Clock()
    reporter = Reporter(wire, clock)
    reporter.offer(REPORT)
    wire.wait()
    clock.now = 5.0
    reporter.offer(replace(REPORT, goodput=104.0))
    assert not wire.arrived.acquire(timeout=0.1)
    reporter.close()


def test_right_after_a_report_none_is_put_together():
    wire, clock = Wire(), Clock()
    reporter = Reporter(wire, clock)
    assert reporter.wants_report
    reporter.offer(REPORT)
    wire.wait()
    await_answer(reporter)
    clock.now = 1.0
    assert not reporter.wants_report
    clock.now = 2.0
    assert reporter.wants_report
    reporter.close()
    assert not reporter.wants_report


def test_a_service_that_is_away_is_tried_again_with_the_newest_report(caplog):
    wire, clock = Wire(failures=1), Clock()
    reporter = Reporter(wire, clock)
    with caplog.at_level("INFO", logger="pollux"):
        reporter.offer(REPORT)
        wire.wait()
        while not reporter._failures:
            time.sleep(0.001)
        newer = replace(REPORT, step=99)
        reporter.offer(newer)
        clock.now = 5.0
        reporter.offer(newer)
        wire.wait()
        reporter.close()
    assert [body["step"] for body in wire.bodies] == [99]
    assert "nobody there" in caplog.text


def test_the_last_report_is_sent_on_closing_and_nothing_after_it():
    wire = Wire()
    reporter = Reporter(wire, Clock())
    reporter.close(replace(REPORT, final=True))
    reporter.offer(REPORT)
    reporter.close(REPORT)
    assert [body["final"] for body in wire.bodies] == [True]


def test_the_last_report_comes_after_the_one_on_its_way():
    began, held, seen = threading.Event(), threading.Event(), []

    def post(body):
        if not began.is_set():
            began.set()
            held.wait(PATIENCE_SECONDS)
        seen.append(json.loads(body)["step"])
        return {}

    reporter = Reporter(post, Clock())
    reporter.offer(REPORT)
    assert began.wait(PATIENCE_SECONDS)
    threading.Timer(0.1, held.set).start()
    reporter.close(replace(REPORT, step=99), timeout_seconds=PATIENCE_SECONDS)
    assert seen == [10, 99]


def test_closing_does_not_wait_for_a_service_that_hangs():
    held = threading.Event()
    reporter = Reporter(lambda body: {"done": held.wait(PATIENCE_SECONDS)}, Clock())
    reporter.close(REPORT, timeout_seconds=0.05)
    held.set()


def test_a_model_travels_as_plain_numbers():
    model = GoodputModel(
        PublishedThroughput(0.1, 0.01, 0.2, 0.02, 0.3, 0.03, 1.5),
        Efficiency(32, 0.25, 0.75),
        BatchLimits(32, 512, 1, 64),
    )
    sent = model_report(model, "H200")
    assert sent is not None
    assert sent.parameters == (0.1, 0.01, 0.2, 0.02, 0.3, 0.03, 1.5)
    assert (sent.initial_batch, sent.max_batch, sent.local_batch_max) == (32, 512, 64)
    assert (sent.grad_sqr, sent.grad_var, sent.gpu_type) == (0.25, 0.75, "H200")


def test_what_measurements_correct_travels_beside_it():
    base = PublishedThroughput(0.1, 0.01, 0.2, 0.02, 0.3, 0.03, 1.5)
    model = GoodputModel(
        CorrectedThroughput(base, ((1, 4, 0.25),)), Efficiency(32, 0.25, 0.75), BatchLimits(32, 512, 1, 64)
    )
    sent = model_report(model, "H200")
    assert sent is not None
    assert sent.parameters == base.parameters
    assert sent.places == (PlaceCorrection(1, 4, 0.25),)


def test_a_model_of_another_kind_is_left_out():
    fabric = FabricThroughput(0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 1.5)
    assert model_report(GoodputModel(fabric, Efficiency(32, 1.0, 1.0), BatchLimits(32, 32, 1, 32)), "cpu") is None


@pytest.mark.parametrize("url", ["", "ftp://there", "there:80", "http://"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(InvalidInput, match="POLLUX_URL is"):
        Address(url, "job", "token")


@pytest.fixture
def service():
    """A server on loopback that notes what it was sent, and answers with what it is told."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.path, self.headers["Authorization"], json.loads(body)))
            status, text = server.answer
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *values):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.answer = (200, b'{"report_every_seconds": 12.0}')
    server.seen = seen
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_report_is_posted_with_the_jobs_token(service):
    address = Address(f"http://127.0.0.1:{service.server_port}", "my job/1", "secret")
    assert post_report(address, '{"step": 3}') == {"report_every_seconds": 12.0}
    assert service.seen == [("/v1/jobs/my%20job%2F1/reports", "Bearer secret", {"step": 3})]


def test_a_report_that_comes_too_soon_is_sent_later_and_is_no_failure(service, caplog):
    service.answer = (429, b"{}")
    now = [0.0]
    reporter = Reporter.to(Address(f"http://127.0.0.1:{service.server_port}", "job", "secret"))
    reporter._clock = lambda: now[0]
    reporter._send(REPORT)
    assert reporter._failures == 0
    assert reporter._newest is REPORT
    assert reporter._next_at == 5.0
    assert not caplog.records
    service.answer = (200, b"{}")
    reporter._send(REPORT)
    assert len(service.seen) == 2


def test_no_token_goes_to_another_users_server(service, monkeypatch):
    monkeypatch.setattr(socket_owners, "_ROOT", -1)
    monkeypatch.setattr(socket_owners.os, "geteuid", lambda: 4321)
    url = f"http://127.0.0.1:{service.server_port}"
    with pytest.raises(ConnectionError, match=r"listens at 127\.0\.0\.1:.*: no token was sent"):
        post_report(Address(url, "job", "secret"), "{}")
    assert service.seen == []
    assert post_report(Address(url, "job", "secret", server_user=os.getuid()), "{}")


@pytest.mark.parametrize("answer", [(403, b'{"error": {}}'), (500, b"oops"), (200, b"not json")])
def test_a_refusal_is_an_error_of_the_connection(service, answer):
    service.answer = answer
    with pytest.raises(ConnectionError, match="the scheduler"):
        post_report(Address(f"http://127.0.0.1:{service.server_port}", "job", "secret"), "{}")
