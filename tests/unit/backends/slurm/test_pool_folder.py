"""The pool's folder is its owner's alone: others could read the fleet's secret there, or replace it."""

import os
import stat

import pytest

from pollux.backends.slurm.node_main import Where, _Node
from pollux.backends.slurm.pool_folder import PoolFolder
from pollux.core.errors import BackendFailed, InvalidInput

SECRET = b"x" * 32


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "project" / "pool"


def test_a_new_one_is_for_its_owner_only(folder):
    PoolFolder(folder).prepare(SECRET)
    PoolFolder(folder).prepare(SECRET)
    assert (folder / "secret").read_text() == SECRET.hex() + "\n"
    assert {stat.S_IMODE(each.stat().st_mode) for each in (folder, folder / "pilots", folder / "names")} == {0o700}
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", [".", "pilots", "names"])
@pytest.mark.parametrize("mode", [0o770, 0o777, 0o755, 0o1777, 0o710])
def test_one_that_others_can_use_is_refused_by_the_service_and_by_nodes(folder, name, mode):
    PoolFolder(folder).prepare(SECRET)
    (folder / "secret").unlink()
    (folder / name).chmod(mode)
    with pytest.raises(
        InvalidInput, match=f"mode {mode:o}, so others can use it; remove it, or name another with pool="
    ):
        PoolFolder(folder).prepare(SECRET)
    assert not (folder / "secret").exists()
    if name == ".":
        with pytest.raises(BackendFailed, match=f"mode {mode:o}"):
            _Node(folder, "7", "n1").start({"places": 1, "gpus": []}, Where("127.0.0.1", "127.0.0.1"), False)


def test_one_of_somebody_else_is_refused(folder, monkeypatch):
    folder.mkdir(parents=True, mode=0o700)
    us = os.geteuid()
    if us == 0:
        os.chown(folder, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    with pytest.raises(InvalidInput, match="it belongs to user"):
        PoolFolder(folder).prepare(SECRET)
    with pytest.raises(BackendFailed, match="it belongs to user"):
        _Node(folder, "7", "n1").start({"places": 1, "gpus": []}, Where("127.0.0.1", "127.0.0.1"), False)
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("name", ["secret", ".secret.{pid}.new"])
def test_what_lies_in_place_of_the_secret_gets_none_of_it(folder, tmp_path, name):
    PoolFolder(folder).prepare(b"old" * 8)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("")
    place = folder / name.format(pid=os.getpid())
    place.unlink(missing_ok=True)
    place.symlink_to(elsewhere)
    PoolFolder(folder).prepare(SECRET)
    assert elsewhere.read_text() == ""
    assert not (folder / "secret").is_symlink()
    assert (folder / "secret").read_text() == SECRET.hex() + "\n"
