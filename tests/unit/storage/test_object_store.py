"""Objects under an address: where copies are, what is tried again, and what is said of a store that fails."""

import subprocess
import sys

import pytest

from pollux.core.errors import InvalidInput, Unreachable
from pollux.storage import object_store
from pollux.storage.object_store import ObjectStore, cache_folder
from pollux.testing.waiting import PATIENCE_SECONDS


class System:
    """A file system of which each call does what `outcomes` says next."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)

    def cat_file(self, path):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setattr(object_store, "_PAUSES", (0.0, 0.0))

    def of(*outcomes):
        found = ObjectStore("S3://bucket/x/", tmp_path)
        found._opened = (System(*outcomes), "bucket/x")
        return found

    return of


def test_each_address_has_its_own_folder_of_copies():
    one, other = (cache_folder(f"s3://bucket/{name}", {"XDG_CACHE_HOME": "/c"}) for name in "ab")
    assert one != other
    assert str(one).startswith("/c/pollux/checkpoints/")
    assert str(cache_folder("s3://b/x", {"XDG_CACHE_HOME": "/x"})).startswith("/x/pollux/")
    assert str(cache_folder("s3://b/x", {"HOME": "/h"})).endswith(
        cache_folder("s3://b/x", {"XDG_CACHE_HOME": "/x"}).name
    )


def test_an_address_is_written_in_one_way(store):
    assert store().address == "s3://bucket/x"
    with pytest.raises(InvalidInput, match="'s3:/x' is not an address for checkpoints: stores are s3://"):
        ObjectStore("s3:/x")


def test_what_fails_is_tried_again(store):
    assert store(OSError("reset"), TimeoutError(), b"there").read("a") == b"there"
    with pytest.raises(Unreachable, match=r"s3://bucket/x: it could not be read 'a' \(reset\): check its address"):
        store(*[OSError("reset")] * 3).read("a")


def test_what_cannot_get_better_is_not(store):
    with pytest.raises(FileNotFoundError):
        store(FileNotFoundError("a"), b"never read").read("a")
    with pytest.raises(
        InvalidInput, match=r"its key forbids that \(Access Denied\): give the job a key that may read, write"
    ):
        store(PermissionError("Access Denied"), b"never read").read("a")
    with pytest.raises(Unreachable, match="Unable to locate credentials"):
        store(RuntimeError("Unable to locate credentials\nmore"), b"never read").read("a")


def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch):
    def url_to_fs(*address, **options):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", url_to_fs)
    with pytest.raises(
        InvalidInput, match=r"needs the package s3fs, .*: pip install s3fs \(or 'pollux-scheduler\[s3\]'\)"
    ):
        ObjectStore("s3://bucket/x", tmp_path).read("a")


def test_a_folder_for_copies_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match=r"cannot be kept in .*: name a folder .* in XDG_CACHE_HOME"):
        ObjectStore("s3://bucket/x", tmp_path / "file" / "c").make_cache()


def test_the_copies_are_for_their_user_alone(tmp_path):
    store = ObjectStore("s3://bucket/x", tmp_path / "a" / "b")
    store.make_cache()
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0


def test_a_wrong_address_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "pollux.storage.object_store", "s3://bucket"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 2
    assert "give a bucket and a path" in done.stdout
    assert done.stderr == ""
