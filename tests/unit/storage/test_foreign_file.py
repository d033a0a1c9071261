import os
import socket

import pytest

from pollux.core.errors import Conflict, TooLarge
from pollux.storage.foreign_file import append_inside, open_inside, read_inside


def test_a_plain_file_is_read_and_added_to(tmp_path):
    (tmp_path / "a").mkdir()
    with append_inside(tmp_path, "a", "file") as file:
        file.write(b"12")
    with append_inside(tmp_path, "a", "file") as file:
        file.write(b"3")
    assert read_inside(tmp_path, "a", "file", most_bytes=3) == b"123"
    with open_inside(tmp_path, "a", "file") as file:
        assert (file.read(), os.get_blocking(file.fileno())) == (b"123", True)
    with pytest.raises(TooLarge, match="more than 2 bytes"):
        read_inside(tmp_path, "a", "file", most_bytes=2)


def test_the_folder_itself_may_be_a_link(tmp_path):
    """An operator may keep logs on another disk."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "file").write_text("x")
    (tmp_path / "link").symlink_to("disk")
    assert read_inside(tmp_path / "link", "file", most_bytes=9) == b"x"


def test_what_is_not_there_is_told_from_what_may_not_be_read(tmp_path):
    for parts in (("nothing",), ("nothing", "file"), ("nothing", "deep", "file")):
        with pytest.raises(FileNotFoundError):
            open_inside(tmp_path, *parts)


@pytest.mark.parametrize("open_one", [open_inside, append_inside])
def test_nothing_but_a_plain_file_is_opened(tmp_path, open_one, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "inside").symlink_to("folder")
    server = socket.socket(socket.AF_UNIX)
    server.bind("socket")
    server.close()
    for parts in (("folder",), ("pipe",), ("link",), ("dangling",), ("socket",), ("inside", "file"), ("file", "below")):
        with pytest.raises(Conflict, match=parts[0]):
            open_one(tmp_path, *parts)
    assert not (tmp_path / "nothing").exists()
    assert not [*(tmp_path / "folder").iterdir()]


def test_a_pipe_that_somebody_reads_is_not_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(Conflict, match="a named pipe, not a plain file"):
            append_inside(tmp_path, "pipe")
    finally:
        os.close(reader)


def test_a_device_is_left_alone():
    from pathlib import Path

    with pytest.raises(Conflict, match="a device"):
        open_inside(Path("/dev"), "zero")


def test_no_descriptor_is_left_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for parts in (("folder",), ("pipe",), ("folder", "deep", "nothing")):
        with pytest.raises((Conflict, FileNotFoundError)):
            open_inside(tmp_path, *parts)
    assert len(os.listdir("/proc/self/fd")) == before
