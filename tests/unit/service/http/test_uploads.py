import os
import time
from pathlib import Path

import pytest

from pollux.core.errors import Conflict, InvalidInput, TooLarge
from pollux.service.http import uploads as module
from pollux.service.http.uploads import Packages
from pollux.storage.archive import MAX_PACKED_BYTES, digest_of, pack


@pytest.fixture
def archive(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("print('hello')\n" * 200)
    return pack(source)


@pytest.fixture
def packages(tmp_path):
    return Packages(tmp_path / "home")


def test_pieces_become_a_folder(packages, archive, tmp_path):
    digest, size = digest_of(archive), len(archive)
    assert packages.add(digest, size, 0, archive[:10]) == (10, None)
    assert packages.add(digest, size, 10, archive[10:20]) == (20, None)
    have, folder = packages.add(digest, size, 20, archive[20:])
    assert (have, folder) == (size, str(tmp_path / "home" / "packages" / digest))
    assert (tmp_path / "home" / "packages" / digest / "train.py").read_text().startswith("print")
    assert [path.name for path in (tmp_path / "home" / "packages").iterdir()] == [digest]


def test_what_is_there_is_not_taken_again(packages, archive):
    digest, size = digest_of(archive), len(archive)
    _, folder = packages.add(digest, size, 0, archive)
    assert folder is not None
    assert packages.add(digest, size, 0, archive[:5]) == (size, folder)


def test_a_piece_in_the_wrong_place_says_where_to_go_on(packages, archive):
    digest, size = digest_of(archive), len(archive)
    packages.add(digest, size, 0, archive[:10])
    assert packages.add(digest, size, 0, archive[:10]) == (10, None)
    assert packages.add(digest, size, 30, archive[30:]) == (10, None)
    assert packages.add(digest, size, 10, b"") == (10, None)
    assert packages.add(digest, size, 10, archive[10:])[1] is not None


def test_another_content_than_announced_is_refused_and_gone(packages, archive, tmp_path):
    wrong = "0" * 64
    with pytest.raises(Conflict, match="announced"):
        packages.add(wrong, len(archive), 0, archive)
    assert list((tmp_path / "home" / "packages").iterdir()) == []


def test_what_is_no_archive_leaves_nothing(packages, tmp_path):
    with pytest.raises(InvalidInput):
        packages.add(digest_of(b"nonsense"), 8, 0, b"nonsense")
    assert list((tmp_path / "home" / "packages").iterdir()) == []


@pytest.mark.parametrize(
    ("digest", "size", "offset", "piece", "error"),
    [
        ("../../etc", 10, 0, b"1", InvalidInput),
        ("A" * 64, 10, 0, b"1", InvalidInput),
        ("0" * 64, 0, 0, b"", InvalidInput),
        ("0" * 64, MAX_PACKED_BYTES + 1, 0, b"1", TooLarge),
        ("0" * 64, 10, 8, b"123", Conflict),
        ("0" * 64, MAX_PACKED_BYTES, 0, b"1" * (module.MAX_PIECE_BYTES + 1), Conflict),
    ],
)
def test_what_cannot_be_is_refused(packages, digest, size, offset, piece, error):
    with pytest.raises(error):
        packages.add(digest, size, offset, piece)


def test_unfinished_packages_do_not_pile_up(packages, tmp_path):
    for number in range(40):
        packages.add(f"{number:064x}", 100, 0, b"1")
    assert len(list((tmp_path / "home" / "packages").iterdir())) <= 16


def test_what_no_job_needs_goes_a_week_after_it_was_used(archive, tmp_path):
    needed: list[tuple[str, float]] = []
    packages = Packages(tmp_path / "home", lambda: needed)
    folder = tmp_path / "home" / "packages"
    folder.mkdir(parents=True)
    used, old, fresh = (folder / (letter * 64) for letter in "abc")
    for each in (used, old, fresh):
        each.mkdir()
        (each / "train.py").touch()
    needed.append((str(used / "below"), time.time()))
    week_ago = time.time() - 8 * 24 * 3600.0
    for each in (used, old):
        os.utime(each, (week_ago, week_ago))
    _, sent = packages.add(digest_of(archive), len(archive), 0, archive)
    assert sorted(path.name for path in folder.iterdir()) == sorted([used.name, fresh.name, digest_of(archive)])
    needed.clear()
    (folder / f"{'d' * 64}.part").touch()
    os.utime(sent, (week_ago, week_ago))
    assert packages.add(digest_of(archive), len(archive), 0, b"")[1] == sent, "asked for, and so used"
    packages.add("e" * 64, 9, 0, b"12345")
    assert sorted(path.name[0] for path in folder.iterdir() if path.is_dir()) == sorted(["a", "c", Path(sent).name[0]])


DAY = 24 * 3600.0


@pytest.mark.parametrize(("days", "kept"), [(6.0, True), (8.0, False)])
def test_what_a_job_left_is_kept_for_a_week_after_its_end(archive, tmp_path, days, kept):
    """However long ago it was sent: nobody fetches results before they are there."""
    whole = tmp_path / "home" / "packages" / ("a" * 64)
    whole.mkdir(parents=True)
    os.utime(whole, (time.time() - 30 * DAY,) * 2)
    # The home may have been named by another way to it when the job came.
    (tmp_path / "link").symlink_to(tmp_path / "home")
    jobs = [(str(tmp_path / "link" / "packages" / whole.name / "below"), time.time() - days * DAY)]
    Packages(tmp_path / "home", lambda: jobs).add(digest_of(archive), len(archive), 0, archive)
    assert whole.exists() == kept


def test_what_could_not_be_removed_whole_goes_the_next_time(archive, tmp_path):
    folder = tmp_path / "home" / "packages"
    for name in (f"old-{'a' * 64}", "new-abc"):
        (folder / name / "part").mkdir(parents=True)
    Packages(tmp_path / "home").add(digest_of(archive), len(archive), 0, archive)
    assert [path.name for path in folder.iterdir()] == [digest_of(archive)]
