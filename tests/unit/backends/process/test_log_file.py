"""Logs of bounded size: what is kept, what is said of the rest, and offsets that never go back."""

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.odd_files import KINDS, emptied

from pollux.backends.process.log_file import LogWriter, read_log, whole_characters


def read_all(path, limit=1000):
    text, offset, at_end = "", 0, False
    while not at_end:
        chunk = read_log(path, offset, limit)
        assert chunk.offset >= offset
        text, offset, at_end = text + chunk.text, chunk.offset, chunk.at_end
    return text, offset


@pytest.fixture
def path(tmp_path):
    return tmp_path / "logs" / "0.log"


def test_what_was_written_is_read(path):
    writer = LogWriter(path)
    writer.write(b"one\n")
    writer.write(b"two\n")
    assert read_all(path) == ("one\ntwo\n", 8)
    assert writer.tail == b"one\ntwo\n"
    writer.close()


def test_a_second_writer_goes_on_at_the_end(path):
    for piece in (b"one\n", b"two\n"):
        writer = LogWriter(path)
        writer.write(piece)
        writer.close()
    assert read_all(path) == ("one\ntwo\n", 8)


def test_a_log_that_is_not_there_is_empty(path):
    chunk = read_log(path)
    assert (chunk.text, chunk.offset, chunk.at_end) == ("", 0, True)


@pytest.mark.parametrize("restart", [False, True])
def test_head_and_newest_are_kept(path, restart):
    writer = LogWriter(path, cap_bytes=8 << 10)
    lines = [f"{number:06d}\n".encode() for number in range(20_000)]
    for number, line in enumerate(lines):
        if restart and number % 5000 == 0:
            writer.close()
            writer = LogWriter(path, cap_bytes=8 << 10)
        writer.write(line)
    writer.close()
    assert sum(file.stat().st_size for file in path.parent.iterdir()) <= (8 << 10) + 200
    text, end = read_all(path)
    assert end >= sum(map(len, lines))
    assert text.startswith("000000\n000001\n")
    assert text.endswith("019998\n019999\n")
    assert "bytes of log were dropped here]" in text
    kept = [line for line in text.splitlines() if line.isdigit() and len(line) == 6]
    assert kept == sorted(kept)
    assert len(set(kept)) == len(kept)
    assert "were dropped]" in path.read_text().splitlines()[0]


def test_nothing_is_dropped_below_the_cap(path):
    writer = LogWriter(path, cap_bytes=8 << 10)
    whole = b"".join(f"{number:06d}\n".encode() for number in range(800))
    for first in range(0, len(whole), 100):
        writer.write(whole[first : first + 100])
    writer.close()
    assert (path.parent / "0.log.1").exists()
    text, end = read_all(path)
    assert (text, end) == (whole.decode(), len(whole))


def test_a_full_disk_costs_lines_only(path, monkeypatch):
    writer = LogWriter(path)
    writer.write(b"before\n")
    real = os.write

    def full(fd, piece):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "write", full)
    writer.write(b"lost\n")
    assert (writer.lost_bytes, writer.tail) == (5, b"before\nlost\n")
    monkeypatch.setattr(os, "write", real)
    writer.write(b"after\n")
    writer.close()
    text, _ = read_all(path)
    assert text == "before\n\n[pollux: 5 bytes of log were lost here: the disk took no more]\nafter\n"


@pytest.mark.parametrize("refused", ["write_text", "replace"])
def test_a_rotation_that_fails_half_way_keeps_the_log(path, monkeypatch, refused):
    """Where it begins cannot be noted: nothing that has its new name is emptied, and the log goes on by its own."""
    writer = LogWriter(path, cap_bytes=8 << 10)
    writer.write(b"a" * 3072)
    writer.write(b"b" * 3072)
    assert (path.parent / "0.log.1").read_bytes() == b"a" * 3072

    def full(*names):
        if ".parts" in "".join(map(str, names)):
            raise OSError(errno.ENOSPC, "no space")
        return real(*names)

    owner = type(path) if refused == "write_text" else os
    real = getattr(owner, refused)
    monkeypatch.setattr(owner, refused, full)
    writer.write(b"c" * 100)
    monkeypatch.setattr(owner, refused, real)
    assert (path.parent / "0.log.1").stat().st_size == 3072
    assert path.read_bytes().endswith(b"c" * 100)
    writer.write(b"d" * 3072)
    writer.close()
    text, _ = read_all(path)
    assert text.startswith("a" * 2048)
    assert text.endswith("d" * 100)
    assert "c" * 100 in text


@pytest.mark.parametrize("refusals", [1, 3])
def test_a_new_file_that_cannot_be_opened_costs_lines_only(path, monkeypatch, refusals):
    """No inodes, or a quota: what comes meanwhile is lost and counted, and each write tries again."""
    writer = LogWriter(path, cap_bytes=8 << 10)
    writer.write(b"a" * 3072)
    real, tried = os.open, []

    def full(name, *rest, **more):
        if name == path.name and rest[0] & os.O_CREAT:
            tried.append(name)
            if len(tried) <= refusals:
                raise OSError(errno.EDQUOT, "quota exceeded")
        return real(name, *rest, **more)

    monkeypatch.setattr(os, "open", full)
    for _ in range(refusals):
        writer.write(b"b" * 4000)
    assert (writer.lost_bytes, len(tried)) == (4000 * refusals, refusals)
    assert writer.tail.endswith(b"b" * 4000)
    assert not (path.parent / "0.log.parts.new").exists(), "without a file there is nothing to rotate"
    writer.write(b"c" * 100)
    writer.write(b"d" * 3072)
    writer.close()
    monkeypatch.undo()
    text, _ = read_all(path)
    assert text.startswith("a" * 2048)
    assert f"{4000 * refusals} bytes of log were lost here" in text
    assert "c" * 100 + "d" * 2000 in text
    assert text.endswith("d" * 10)
    assert "bb" not in text


@pytest.mark.parametrize("refused", ["ftruncate", "close"])
def test_a_log_that_cannot_be_begun_anew_costs_lines_only(path, monkeypatch, refused):
    writer = LogWriter(path, cap_bytes=8 << 10)
    writer.write(b"a" * 3072)
    real, own = getattr(os, refused), writer._fd

    def broken(fd, *rest):
        if fd != own:
            return real(fd, *rest)
        if refused == "close":
            real(fd)
        raise OSError(errno.EIO, "input/output error")

    def full(*names, **more):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, refused, broken)
        if refused == "ftruncate":
            patch.setattr("pollux.backends.process.log_file.write_state", full)
        writer.write(b"b" * 100)
        writer.write(b"c" * 100)
        assert writer.lost_bytes == (100 if refused == "ftruncate" else 0)
    writer.write(b"d" * 100)
    writer.close()
    assert read_all(path)[0].endswith("d" * 100)


def test_a_negative_offset_counts_from_the_end(path):
    writer = LogWriter(path)
    writer.write(b"0123456789")
    writer.close()
    assert read_log(path, -3).text == "789"
    assert read_log(path, -300).text == "0123456789"
    assert read_log(path, 300).offset == 10


@given(st.text(), st.integers(4, 9))
def test_pieces_never_cut_a_character(text, size):
    raw = text.encode()
    offset, pieces = 0, []
    while offset < len(raw):
        piece = raw[offset : offset + size]
        if offset + size < len(raw):
            piece = whole_characters(piece) or piece
        pieces.append(piece.decode())
        offset += len(piece)
    assert "".join(pieces) == text


@pytest.mark.parametrize("put", KINDS)
@pytest.mark.parametrize("ending", ["", ".head", ".1", ".parts", ".parts.new"])
def test_what_a_job_puts_in_place_of_its_log_holds_up_no_writer(tmp_path, put, ending):
    """Neither when it is opened nor when it begins anew: a shim that waits there could not stop its job."""
    (tmp_path / "secret").write_text("{}")
    path = tmp_path / "logs" / "job" / "0.log"
    writer = LogWriter(path, cap_bytes=8 << 10)
    for number in range(3000):
        if number in (500, 1500):
            put(emptied(path.with_name(path.name + ending)))
        writer.write(b"%06d\n" % number)
    writer.close()
    put(emptied(path.with_name(path.name + ending)))
    writer = LogWriter(path, cap_bytes=8 << 10)
    writer.write(b"the last\n")
    writer.close()
    assert writer.lost_bytes == 0
    assert (tmp_path / "secret").read_text() == "{}"
    if ending == "":
        assert path.read_text().endswith("the last\n")
