"""Messages arrive once and in order, over connections that break; strangers are not heard."""

import contextlib
import random
import socket
from dataclasses import dataclass

import pytest

from pollux.backends.transport import channel, encryption
from pollux.backends.transport.channel import Channel, SecureLine, answer, challenge, check, hello
from pollux.backends.transport.encryption import EncryptedSocket
from pollux.core.errors import BackendFailed
from pollux.wire.live import PROTOCOL_VERSION
from pollux.wire.live.codec import decode_tagged
from pollux.wire.live.node_messages import SeeRequest, SessionRequest, decode_daemon_request

SECRET = b"s" * 32


@dataclass(frozen=True)
class Number:
    value: int


def read_number(text):
    return decode_tagged({"Number": Number}, text)


def pair(request=None):
    """Two ends of one connection, after the handshake."""
    left, right = socket.socketpair()
    ours, theirs = SecureLine(left, "shim"), SecureLine(right, "host")
    nonce = challenge()
    theirs.put(hello(nonce))
    answer(SECRET, ours, ours.get()[0], request or SeeRequest())
    asked = check(SECRET, theirs, nonce, theirs.get()[0])
    theirs.encrypt()
    for _ in range(3):
        assert (ours.get(), theirs.get()) == ([], [])
    return ours, theirs, asked


def test_who_knows_the_secret_is_heard():
    ours, theirs, request = pair(request=SessionRequest("a", 3, 1.0, "n0"))
    assert decode_daemon_request(request) == SessionRequest("a", 3, 1.0, "n0")
    ours.put([1, "x"])
    theirs.put({"y": 2})
    assert (theirs.get(), ours.get()) == ([[1, "x"]], [{"y": 2}])
    for line in (ours, theirs):
        line.close()


def test_who_does_not_is_refused():
    left, right = socket.socketpair()
    with left, right:
        ours, theirs, nonce = SecureLine(left), SecureLine(right), challenge()
        answer(b"t" * 32, ours, hello(nonce), SeeRequest())
        with pytest.raises(BackendFailed, match="secret"):
            check(SECRET, theirs, nonce, theirs.get()[0])


@pytest.mark.parametrize("said", [None, [], {}, {"nonce": 1, "request": 2, "proof": None}, "text"])
def test_nonsense_is_refused(said):
    left, right = socket.socketpair()
    with left, right, pytest.raises(BackendFailed):
        check(SECRET, SecureLine(left), challenge(), said)


@pytest.mark.parametrize(
    "said", [None, {**hello("x"), "version": PROTOCOL_VERSION + 1}, "SSH-2.0", {"version": PROTOCOL_VERSION}]
)
def test_another_version_is_named(said):
    left, right = socket.socketpair()
    with left, right, pytest.raises(BackendFailed, match="another version"):
        answer(SECRET, SecureLine(left), said, SeeRequest())


def test_a_line_that_was_changed_or_repeated_ends_the_connection():
    for change in (lambda sent: sent[:-1] + bytes([sent[-1] ^ 1]), lambda sent: sent * 2):
        ours, theirs, _ = pair()
        ours.put([1, "x"])
        sent = theirs.peer.recv(1000)
        theirs.peer.close()
        theirs.peer, stranger = socket.socketpair()
        theirs.peer.setblocking(False)
        stranger.sendall(change(sent))
        theirs.get()
        assert theirs.broken
        for each in (ours, theirs):
            each.close()
        stranger.close()


def carried(source, sink, heard):
    """What one side says, to the other."""
    with contextlib.suppress(BlockingIOError):
        heard += (piece := source.recv(1 << 20))
        sink.sendall(piece)


def test_who_listens_learns_nothing_of_what_is_said():
    (left, near), (far, right) = socket.socketpair(), socket.socketpair()
    ours, theirs, nonce = SecureLine(left, "shim"), SecureLine(right, "host"), challenge()
    near.setblocking(False)
    far.setblocking(False)
    heard, values = bytearray(), []

    def carry():
        for _ in range(8):
            carried(near, far, heard)
            carried(far, near, heard)
            values.extend([*ours.get(), *theirs.get()])

    theirs.put(hello(nonce))
    carried(far, near, heard)
    answer(SECRET, ours, ours.get()[0], {"session": "x"})
    carried(near, far, heard)
    check(SECRET, theirs, nonce, theirs.get()[0])
    theirs.encrypt()
    ours.put([1, "the token of the job"])
    theirs.put([1, "what the replica printed"])
    carry()
    assert sorted(values) == [[1, "the token of the job"], [1, "what the replica printed"]]
    assert b"session" in heard
    assert b"token" not in heard
    assert b"printed" not in heard
    for each in (ours, theirs, near, far):
        each.close()


def test_who_stands_in_between_hears_nothing_and_is_noticed():
    """It passes the proofs on, and agrees on a key with each of the two: none says anything but that it has a key."""
    (left, near), (far, right) = socket.socketpair(), socket.socketpair()
    ours, theirs, nonce = SecureLine(left, "shim"), SecureLine(right, "host"), challenge()
    near.setblocking(False)
    far.setblocking(False)
    theirs.put(hello(nonce))
    carried(far, near, bytearray())
    answer(SECRET, ours, ours.get()[0], {"session": "x"})
    carried(near, far, bytearray())
    check(SECRET, theirs, nonce, theirs.get()[0])
    theirs.encrypt()
    ours.put([1, "the token of the job"])
    theirs.put([1, "what the replica printed"])
    ends = EncryptedSocket(near, is_client=True), EncryptedSocket(far, is_client=False)
    heard = bytearray()
    for _ in range(8):
        for source, sink in (ends, ends[::-1]):
            with contextlib.suppress(OSError):
                heard += (piece := source.recv(1 << 20))
                sink.send(piece)
        assert (ours.get(), theirs.get()) == ([], [])
    assert (ours.broken, theirs.broken) == (True, True)
    assert heard.count(b'"agreed"') == 2
    assert b"token" not in heard
    assert b"printed" not in heard
    for each in (ours, theirs, near, far):
        each.close()


@pytest.fixture
def without_encryption(monkeypatch):
    monkeypatch.setattr(encryption, "is_possible", lambda: False)


def test_where_neither_side_can_encrypt_they_still_know_each_other(without_encryption):
    ours, theirs, _ = pair()
    ours.put([1, "x"])
    assert theirs.get() == [[1, "x"]]
    for line in (ours, theirs):
        line.close()


@pytest.mark.parametrize(
    ("said", "why"), [(True, "can encrypt the connection"), (None, "another version"), ("false", "another version")]
)
def test_where_one_side_cannot_encrypt_nothing_is_said(without_encryption, said, why):
    left, right = socket.socketpair()
    with left, right:
        with pytest.raises(BackendFailed, match=why):
            answer(SECRET, SecureLine(left), {**hello(challenge()), "encrypts": said}, SeeRequest())
        right.setblocking(False)
        with pytest.raises(BlockingIOError):
            right.recv(1)


def test_large_values_come_whole():
    """More than the kernel takes at once, both ways."""
    ours, theirs, _ = pair()
    text = "x" * (3 << 20)
    ours.put([1, text])
    theirs.put([2, text])
    heard = []
    for _ in range(1000):
        ours.flush()
        theirs.flush()
        heard += [*ours.get(), *theirs.get()]
        if len(heard) == 2:
            break
    assert sorted(heard) == [[1, text], [2, text]]
    for line in (ours, theirs):
        line.close()


def test_what_is_not_a_line_is_bounded():
    left, right = socket.socketpair()
    line = SecureLine(left)
    right.setblocking(False)
    while not line.broken:
        try:
            right.send(b"x" * 4096)
        except BlockingIOError:
            line.get()
        except OSError:
            break
    assert line.broken
    line.close()
    right.close()


@pytest.mark.parametrize("seed", range(5))
def test_every_message_comes_once_and_in_order(seed):
    """Connections break at random moments, losing what was on the way."""
    chance = random.Random(seed)
    ends = (Channel(read_number), Channel(read_number))
    sent: tuple[list[object], ...] = ([], [])
    come: tuple[list[object], ...] = ([], [])
    lines = []

    def connect():
        for end in ends:
            end.detach()
        ours, theirs, _ = pair()
        lines.extend([ours, theirs])
        ends[0].attach(ours, ends[1].seen)
        ends[1].attach(theirs, ends[0].seen)

    def read(side):
        come[side].extend(message.value for message in ends[side].receive())

    for step in range(300):
        side = chance.randrange(2)
        what = chance.choices(["send", "read", "confirm", "break"], [4, 4, 2, 1])[0]
        if what == "send":
            ends[side].send(Number(step))
            sent[side].append(step)
        elif what == "read":
            read(side)
        elif what == "confirm":
            ends[side].confirm()
        else:
            connect()
    connect()
    for _ in range(4):
        for side in (0, 1):
            read(side)
            ends[side].confirm()
    assert come == (sent[1], sent[0])
    assert [end.unconfirmed_bytes for end in ends] == [0, 0]
    for line in lines:
        line.close()


def test_a_confirmation_says_when_that_message_was_sent(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(channel, "clock", lambda: now[0])
    ours, theirs, _ = pair()
    runner, shim = Channel(read_number), Channel(read_number)
    shim.attach(ours, 0)
    runner.attach(theirs, 0)
    runner.send(Number(1))
    now[0] = 107.0
    shim.receive()
    shim.confirm()
    now[0] = 109.0
    runner.receive()
    assert runner.confirmed_at == 100.0
    for line in (ours, theirs):
        line.close()


@pytest.mark.parametrize(
    ("sent", "following"),
    [
        ([1, '["Other", {}]'], 2),
        ([1, '["Number", {"value": "x"}]'], 2),
        ([1, "no JSON"], 2),
        ([1, 2], 1),
        ([0, None], 1),
        ([1], 1),
        ({}, 1),
        (None, 1),
    ],
)
def test_what_is_no_message_is_refused_in_one_line_and_what_follows_is_heard(sent, following, capsys):
    ours, theirs, _ = pair()
    ends = (Channel(read_number), Channel(read_number))
    ends[0].attach(ours, 0)
    ends[1].attach(theirs, 0)
    ours.put(sent)
    ours.put([following, '["Number", {"value": 3}]'])
    assert ends[1].receive() == [Number(3)]
    said = capsys.readouterr().err
    assert said.startswith("a message from host is refused: ")
    assert said.count("\n") == 1
    for line in (ours, theirs):
        line.close()
