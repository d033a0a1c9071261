import socket

import pytest

from pollux.backends.transport.json_lines import LineReader, line_of


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def test_lines_are_cut_wherever_pieces_end(pair):
    ours, theirs = pair
    reader = LineReader(ours, 100)
    assert reader.lines() == []
    theirs.sendall(line_of({"a": 1}) + b"[1,")
    assert reader.lines() == [b'{"a": 1}']
    theirs.sendall(b" 2]\n\n")
    assert reader.lines() == [b"[1, 2]", b""]


def test_the_end_of_the_other_side_is_told(pair):
    ours, theirs = pair
    reader = LineReader(ours, 100)
    theirs.close()
    assert reader.lines() is None


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_that_is_too_long_ends_the_connection(pair, end):
    ours, theirs = pair
    reader = LineReader(ours, 100)
    theirs.sendall(b"x" * 101 + end)
    assert reader.lines() is None
