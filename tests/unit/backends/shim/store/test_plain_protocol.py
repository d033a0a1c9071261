import struct

import pytest

from pollux.backends.shim.store.plain_protocol import answer_of, read_question
from pollux.wire.live.store_channel import BrokenFrame, StoreOperation


def text(*parts):
    return b"".join(struct.pack("=Q", len(part)) + part for part in parts)


QUESTIONS = [
    (b"\1" + text(b"/k", b"/v"), StoreOperation.SET, [b"k", b"/v"]),
    (b"\2" + text(b"/k", b"/old", b"/new"), StoreOperation.COMPARE_SET, [b"k", b"/old", b"/new"]),
    (b"\3" + text(b"init/"), StoreOperation.GET, [b"init/"]),
    (b"\4" + text(b"/k") + struct.pack("=q", -3), StoreOperation.ADD, [b"k", b"-3"]),
    (b"\5" + struct.pack("=Q", 2) + text(b"/a", b"/b"), StoreOperation.CHECK, [b"a", b"b"]),
    (b"\6" + struct.pack("=Q", 1) + text(b"/a"), StoreOperation.WAIT, [b"a"]),
    (b"\7", StoreOperation.COUNT, []),
    (b"\x08" + text(b"/k"), StoreOperation.DELETE, [b"k"]),
    (b"\x09" + text(b"/k", b"/v"), StoreOperation.APPEND, [b"k", b"/v"]),
    (b"\x0a" + struct.pack("=Q", 2) + text(b"/a", b"/b"), StoreOperation.MULTI_GET, [b"a", b"b"]),
    (
        b"\x0b" + struct.pack("=Q", 2) + text(b"/a", b"/1", b"/b", b"/2"),
        StoreOperation.MULTI_SET,
        [b"a", b"/1", b"b", b"/2"],
    ),
]


@pytest.mark.parametrize(("said", "operation", "parts"), QUESTIONS)
def test_a_question_is_read_once_it_is_whole(said, operation, parts):
    for size in range(len(said)):
        assert read_question(said[:size]) is None
    found = read_question(said + b"more")
    assert (found.operation, found.parts, found.size) == (operation, parts, len(said))


def test_pings_and_the_end_of_waiting_are_no_operations():
    assert read_question(b"\x0d\1\2\3") is None
    assert read_question(b"\x0d\1\2\3\4x").ping == b"\1\2\3\4"
    cancel = read_question(b"\x0c")
    assert (cancel.operation, cancel.ping, cancel.size) == (None, b"", 1)


@pytest.mark.parametrize(
    "said", [b"\0", b"\x63", b"\1" + b"\xff" * 8, b"\5" + b"\xff" * 8, b"\5" + struct.pack("=Q", 200_000)]
)
def test_what_is_no_question_ends_the_connection(said):
    with pytest.raises(BrokenFrame):
        read_question(said)


def test_answers_are_as_such_a_client_reads_them():
    assert answer_of(StoreOperation.SET, []) == b""
    assert answer_of(StoreOperation.GET, [b"v"]) == text(b"v")
    assert answer_of(StoreOperation.MULTI_GET, [b"v", b""]) == text(b"v", b"")
    assert answer_of(StoreOperation.WAIT, []) == b"\0"
    assert (answer_of(StoreOperation.CHECK, [b"1"]), answer_of(StoreOperation.CHECK, [b"0"])) == (b"\0", b"\1")
    assert answer_of(StoreOperation.ADD, [b"-2"]) == struct.pack("=q", -2)
