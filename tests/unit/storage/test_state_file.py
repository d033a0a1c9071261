"""Files of state: whatever lies in their place is neither waited for nor followed, and writing goes on."""

import errno
import json
import os
import stat

import pytest
from tests.support.odd_files import KINDS, emptied

from pollux.storage import state_file
from pollux.storage.state_file import (
    MAX_STATE_BYTES,
    create_state,
    keep_end,
    open_log,
    open_plain,
    read_json,
    read_state,
    remove_state,
    write_state,
)


@pytest.fixture
def place(tmp_path):
    """In a folder of its own, three below one with a file that no link may lead to."""
    folder = tmp_path / "run" / "job"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text('{"kept": true}')
    state_file._say.cache_clear()
    return folder / "state.json"


@pytest.mark.parametrize("put", KINDS)
def test_whatever_lies_there_is_missing_and_said_once(place, put, caplog):
    put(place)
    for _ in range(3):
        if put.__name__ == "put_unreadable" and os.geteuid() == 0:
            assert read_json(place) == {}
            continue
        assert (read_state(place), read_json(place)) == (None, None)
        assert [str(place) in each.getMessage() for each in caplog.records] == [True]


@pytest.mark.parametrize("put", KINDS)
@pytest.mark.parametrize("durable", [False, True])
def test_whatever_lies_there_makes_way(place, put, durable):
    """Also where the file that is written first belongs."""
    put(place)
    put(place.with_name(f".{place.name}.{os.getpid()}.new"))
    write_state(place, b"[1]", durable)
    assert (read_json(place), place.stat().st_mode & 0o777) == ([1], 0o600)
    assert place.is_file()
    assert not place.is_symlink()
    assert {each.name.rpartition(".")[2] for each in place.parent.iterdir()} <= {"json", "aside"}
    assert json.loads((place.parents[2] / "secret").read_text()) == {"kept": True}
    remove_state(place)
    put(place)
    with pytest.raises(FileExistsError):
        create_state(place, b"2")
    create_state(emptied(place), b"2")
    assert read_state(place) == b"2"


@pytest.mark.parametrize("put", KINDS)
def test_a_log_or_a_lock_is_opened_at_once(place, put):
    for opened in (open_plain, open_log):
        put(emptied(place))
        number = opened(place)
        try:
            assert os.write(number, b"said\n") == 5
            assert stat.S_ISREG(place.lstat().st_mode)
            if opened is open_log:
                assert place.read_bytes().endswith(b"said\n")
                assert place.stat().st_size <= MAX_STATE_BYTES + 5
        finally:
            os.close(number)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\udcff", "nul", '{"a": ' * 5000])
def test_what_is_no_json_is_missing(place, text):
    place.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert read_json(place) is None


def test_a_full_disk_leaves_the_old_one(place, monkeypatch):
    write_state(place, b"old")

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_state(place, b"new")
    with pytest.raises(OSError, match="No space"):
        create_state(place.with_name("other"), b"new")
    assert [each.name for each in place.parent.iterdir()] == [place.name]
    assert place.read_bytes() == b"old"


def test_without_links_the_first_one_wins_as_well(place, monkeypatch):
    def none(*given):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    create_state(place, b"1")
    with pytest.raises(FileExistsError):
        create_state(place, b"2")
    assert (place.read_bytes(), len([*place.parent.iterdir()])) == (b"1", 1)


def test_a_log_is_bounded_however_often_it_is_opened(place):
    for round_number in range(30):
        number = open_log(place, 100)
        os.write(number, b"%05d" % round_number * 30)
        os.close(number)
    assert sum(each.stat().st_size for each in place.parent.iterdir()) <= 250
    assert (place.with_name("state.json.1").read_bytes() + place.read_bytes()).endswith(b"00029" * 30)


def test_what_is_put_in_the_place_of_a_long_log_stays(place):
    number = open_log(place, 10)
    try:
        os.write(number, b"1" * 20)
        place.unlink()
        place.write_bytes(b"2" * 20)
        assert not keep_end(place, number, 10)
        assert place.read_bytes() == b"2" * 20
    finally:
        os.close(number)
