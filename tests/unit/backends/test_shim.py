"""The shim's own edges; its life is tested with the local backend."""

import shutil
import socket

import pytest

from pollux.backends.protocol import ReplicasEnded
from pollux.backends.shim import Shim


@pytest.fixture
def shim(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        yield Shim(folder, listener, None)


def test_an_end_that_cannot_be_written_is_kept_for_later(shim):
    shim._unwritten = ended = ReplicasEnded(1.0, "job", 1, "stopped")
    shim._folder.joinpath("ended-1.json").mkdir()
    shim._write_end(ended)
    assert shim._is_busy()


def test_a_shim_whose_folder_was_removed_ends(shim):
    shim._unwritten = ended = ReplicasEnded(1.0, "job", 1, "stopped")
    shutil.rmtree(shim._folder)
    shim._write_end(ended)
    assert shim._is_done()
