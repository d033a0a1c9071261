"""A real server on loopback, with limits so low that each of them is met; what is slow is slow for ever."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from pathlib import Path

import pytest

from pollux.service import ServiceSettings, create_app
from pollux.service.server.http_server import HttpServer
from pollux.service.server.peers import ConnectionLimits
from pollux.service.server.serve import listen
from pollux.testing.servers.service import sample_report
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.codec import encode

TLS = Path(__file__).parents[1] / "tls"
LONG = 10 * PATIENCE_SECONDS
PATIENT = ConnectionLimits(
    header_seconds=LONG,
    body_seconds=LONG,
    stuck_seconds=LONG,
    keep_alive_seconds=LONG,
    stranger_keep_alive_seconds=LONG,
)


class Running:
    def __init__(self, world, limits, tls=False):
        pair = (TLS / "localhost.pem", TLS / "localhost.key") if tls else (None, None)
        settings = ServiceSettings(home=world.home, tls_cert=pair[0], tls_key=pair[1])
        self.tls = tls
        self.world = world
        self.listener = listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        started = threading.Event()
        app = create_app(world.engine, world.tokens)
        self.server = HttpServer(app, settings, limits, started.set, lambda: None)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self.thread.start()
        assert started.wait(PATIENCE_SECONDS)
        self.open: list[socket.socket] = []

    def connect(self, said=b"", handshake=True):
        peer = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS)
        if self.tls and handshake:
            context = ssl.create_default_context(cafile=str(TLS / "localhost.pem"))
            context.check_hostname = False
            peer = context.wrap_socket(peer)
        self.open.append(peer)
        peer.sendall(said)
        return peer

    def ask(self, method="GET", path="/v1/jobs", body=b"", token=None, peer=None):
        """The status of an answer, over a new connection where none is given."""
        token = self.world.tokens.operator if token is None else token
        own = self.connect() if peer is None else peer
        own.sendall(
            f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {token}\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        with own.makefile("rb") as file:
            status = int(file.readline().split()[1])
            length = 0
            while (line := file.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            file.read(length)
        if peer is None:
            own.close()
        return status

    def stop(self):
        for peer in self.open:
            peer.close()
        self.server.should_exit = True
        self.thread.join(PATIENCE_SECONDS)
        self.listener.close()
        assert not self.thread.is_alive()


@pytest.fixture
def run(world):
    running = []

    def start(limits=PATIENT, tls=False):
        running.append(Running(world, limits, tls))
        return running[-1]

    yield start
    for each in running:
        each.stop()


def everything(peer):
    """What a peer is told until its connection ends."""
    said = b""
    while True:
        try:
            piece = peer.recv(65536)
        except ConnectionResetError:
            return said
        if not piece:
            return said
        said += piece


SOON = ConnectionLimits(
    header_seconds=0.1, body_seconds=0.1, stuck_seconds=0.1, keep_alive_seconds=0.1, stranger_keep_alive_seconds=0.1
)
SIGN_IN = b"POST /v1/session HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
GET = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
SLOW = {
    "nothing": b"",
    "a letter": b"G",
    "a line": b"GET / HTTP/1.1\r\n",
    "headers without end": b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: y\r\n",
    "an answer, then a letter": GET + b"G",
    "an answer, then a body that does not come": GET + SIGN_IN + b"content-length: 10\r\n\r\n",
    "no body": SIGN_IN + b"content-length: 100\r\n\r\n",
    "half a body": SIGN_IN + b"content-length: 100\r\n\r\n{",
    "half a piece": SIGN_IN + b"transfer-encoding: chunked\r\n\r\n5\r\nab",
    "a body that was refused": b"POST /v1/jobs HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{",
    "a body of which nobody wants to hear": b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{",
    "waits to be asked": SIGN_IN + b"content-length: 100\r\nexpect: 100-continue\r\n\r\n",
}


@pytest.mark.parametrize("said", SLOW.values(), ids=SLOW.keys())
def test_what_is_too_slow_ends(run, said):
    everything(run(SOON).connect(said))


@pytest.mark.parametrize("said", ["an answer", "half a body"])
def test_letters_that_keep_coming_do_not_put_the_end_off(run, said):
    """One letter now and then kept a connection for ever."""
    begin = {"an answer": b"GET / HTTP/1.1\r\nx: ", "half a body": SIGN_IN + b"content-length: 1000000\r\n\r\n"}[said]
    peer = run(SOON).connect(begin)
    ended = threading.Event()
    trickle = threading.Thread(target=lambda: [_send(peer, ended) for _ in iter(ended.is_set, True)])
    trickle.start()
    try:
        everything(peer)
    finally:
        ended.set()
        trickle.join(PATIENCE_SECONDS)


def _send(peer, ended):
    try:
        peer.sendall(b"y")
    except OSError:
        ended.set()
    ended.wait(0.01)


def test_who_takes_nothing_of_an_answer_ends(run):
    """Answers without end, none of which is read: neither they nor their requests pile up."""
    running = run(SOON)
    peer = running.connect()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    asked = b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 1000
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        peer.sendall(asked * 1000)
    assert running.ask() == 200


def test_a_tls_handshake_that_does_not_come_holds_up_nobody(run):
    running = run(ConnectionLimits(most=64, most_strangers=8), tls=True)
    for _ in range(50):
        running.connect(handshake=False)
    assert running.ask() == 200
    assert running.server.peers.num_strangers <= 8


def report(world):
    return json.dumps(encode(sample_report(1))).encode()


def test_agents_get_in_however_many_strangers_hold_connections(run, world):
    """Kept connections of agents stay, new ones get in, and memory and files are bounded all the time."""
    world.submit("a", max_gpus=1)
    token = world.tokens.for_job("a")
    running = run(ConnectionLimits(most=64, most_strangers=16, header_seconds=LONG, keep_alive_seconds=LONG))
    kept = []
    for _ in range(20):
        kept.append(running.connect())
        assert running.ask(token=token, peer=kept[-1]) == 403
    for _ in range(10):
        for said in [b"G", SIGN_IN, b"", SIGN_IN + b"content-length: 9\r\n\r\n"] * 5:
            running.connect(said)
        assert running.ask("POST", "/v1/jobs/a/reports", report(world), token) == 200
        assert running.server.peers.num_strangers <= 16
    for peer in kept:
        assert running.ask("POST", "/v1/jobs/a/reports", report(world), token, peer) == 200
    assert running.server.peers.num_dropped >= 150


def test_a_wrong_token_makes_nobody_known(run):
    running = run()
    peer = running.connect()
    assert running.ask(token="wrong", peer=peer) == 401
    assert running.ask(path="/healthz", peer=peer) == 200
    assert (running.server.peers.num_strangers, len(running.server.peers)) == (1, 1)
    assert running.ask(peer=peer) == 200
    assert (running.server.peers.num_strangers, len(running.server.peers)) == (0, 1)


def test_where_all_connections_are_known_the_idle_one_goes(run):
    running = run(ConnectionLimits(most=4, most_strangers=4, keep_alive_seconds=LONG))
    kept = [running.connect() for _ in range(4)]
    for peer in kept:
        assert running.ask(peer=peer) == 200
    assert running.ask() == 200
    assert everything(kept[0]) == b""
    for peer in kept[1:]:
        assert running.ask(peer=peer) == 200


def test_an_unfinished_body_is_no_failure_of_ours(run, caplog):
    """A traceback for each would fill the log."""
    running = run()
    for _ in range(5):
        running.connect(SIGN_IN + b"content-length: 100\r\n\r\n{").close()
    assert running.ask() == 200
    running.stop()
    assert "a request failed" not in caplog.text
    assert "Traceback" not in caplog.text


def test_files_that_run_out_are_said_once_and_waited_for(run, monkeypatch, caplog):
    running = run()
    peer = running.connect()
    assert running.ask(token="wrong", peer=peer) == 401
    real = running.listener.accept
    failed: list[bool] = []

    class Full:
        def __getattr__(self, name):
            return getattr(running.listener, name)

        def accept(self):
            if len(failed) < 3:
                failed.append(True)
                raise OSError(24, "Too many open files")
            return real()

    running.server.servers[0]._socket = Full()
    assert running.ask() == 200
    assert everything(peer) == b""
    assert "no connection can be accepted: Too many open files" in caplog.text
    assert len(failed) == 3


def test_an_end_waits_for_nobody_who_is_slow(run):
    running = run()
    for said in SLOW.values():
        running.connect(said)
    assert running.ask() == 200
    running.server.should_exit = True
    running.thread.join(PATIENCE_SECONDS)
    assert not running.thread.is_alive()


def test_the_loop_is_left_clean(run, caplog):
    """No callback of a connection that has ended raises: the event loop would log each."""
    running = run(SOON)
    for said in SLOW.values():
        everything(running.connect(said))
    assert running.ask() == 200
    running.stop()
    assert len(running.server.peers) == 0
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_headers_in_any_pieces_are_one_request(run):
    """Whole headers are waited for outside the protocol: nothing is lost between the two."""
    running = run()
    request = (
        f"POST /v1/plan HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {running.world.tokens.operator}\r\n"
        "content-length: 2\r\n\r\n{}"
    ).encode() + GET.replace(b"host", b"connection: close\r\nhost")
    end = request.index(b"\r\n\r\n")
    for cut in (0, 1, 5, end, end + 1, end + 2, end + 3, end + 4, end + 5, len(request) - 3, len(request)):
        peer = running.connect(request[:cut])
        # The server has seen the first piece once it has answered somebody who came later.
        assert running.ask() == 200
        peer.sendall(request[cut:])
        said = everything(peer)
        assert (said.count(b"HTTP/1.1 422 "), said.count(b"HTTP/1.1 200 OK")) == (1, 1), (cut, said)


def test_headers_too_long_are_refused(run):
    running = run()
    for size in (20_000, 300_000):
        assert everything(running.connect(b"GET / HTTP/1.1\r\nx: " + b"y" * size)).startswith((b"HTTP/1.1 4", b""))
    assert running.ask() == 200
    assert running.server.peers.num_strangers == 0


def test_who_is_slow_is_told_so(run):
    assert everything(run(SOON).connect(b"GET / HTTP/1.1\r\n")).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


def test_who_follows_the_events_many_times_keeps_no_agent_out(run, world):
    """A viewer changes nothing, and stops nothing either: the oldest of its streams goes."""
    running = run(ConnectionLimits(most=6, most_strangers=6))
    asked = (
        f"GET /v1/events HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {world.tokens.viewer}\r\n\r\n".encode()
    )
    streams = []
    for _ in range(12):
        streams.append(running.connect(asked))
        assert streams[-1].recv(12) == b"HTTP/1.1 200"
        assert running.ask() == 200
    assert len(running.server.peers) <= 6
    assert b"hello" in everything(streams[0])
