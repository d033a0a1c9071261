"""Files and folders appear when they are complete, and not before."""

import os
from pathlib import Path

import pytest

from pollux.cli.arguments.output import staged_file, staged_folder
from pollux.core import InvalidInput


def fail(place, error, message, expected=RuntimeError):
    """Raise in the middle of the work."""

    def work():
        with place:
            raise error

    with pytest.raises(expected, match=message):
        work()


def test_file_appears_at_the_end(tmp_path):
    target = tmp_path / "new" / "r.json"
    with staged_file("--json", target) as file:
        file.write("done")
        assert not target.exists()
    assert target.read_text() == "done"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "r.json"]


def test_file_is_replaced_at_once(tmp_path):
    target = tmp_path / "r.json"
    target.write_text("before")
    with staged_file("--json", target) as file:
        file.write("after")
        file.flush()
        assert target.read_text() == "before"
    assert target.read_text() == "after"


def test_file_keeps_what_was_there_when_it_fails(tmp_path):
    target = tmp_path / "r.json"
    target.write_text("before")
    fail(staged_file("--json", target), RuntimeError("midway"), "midway")
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


def test_link_stays_a_link(tmp_path):
    (tmp_path / "real.json").write_text("before")
    (tmp_path / "link.json").symlink_to("real.json")
    with staged_file("--json", tmp_path / "link.json") as file:
        file.write("after")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "after"


def test_permissions_are_the_usual_ones(tmp_path):
    (tmp_path / "usual").write_text("")
    with staged_file("--json", tmp_path / "r.json") as file:
        file.write("")
    assert (tmp_path / "r.json").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_private_file_is_its_owners_whatever_was_there(tmp_path):
    target = tmp_path / "secrets"
    target.write_text("before")
    target.chmod(0o644)
    with staged_file("--output", target, private=True) as file:
        file.write("after")
        assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir() if path != target] == [0o600]
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("after", 0o600)


def test_device_is_written_to():
    null = Path(os.devnull)
    with staged_file("--json", null) as file:
        file.write("gone")
    assert null.is_char_device()


def test_folder_appears_at_the_end(tmp_path):
    target = tmp_path / "a" / "b"
    with staged_folder("--output", target) as folder:
        (folder / "report.html").write_text("done")
        assert not target.exists()
    assert [path.name for path in target.iterdir()] == ["report.html"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_folder_keeps_other_files(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with staged_folder("--output", tmp_path) as folder:
        (folder / "report.html").write_text("done")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "report.html"]


def test_folder_is_not_there_when_it_fails(tmp_path):
    fail(staged_folder("--output", tmp_path / "new"), RuntimeError("midway"), "midway")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("staged", [staged_file, staged_folder])
def test_place_that_cannot_be_written(tmp_path, staged):
    (tmp_path / "file").write_text("")
    place = staged("--there", tmp_path / "file" / "below")
    with pytest.raises(InvalidInput, match=r"--there: .*cannot be written.*choose another place"):
        place.__enter__()


def test_full_disk_is_one_error(tmp_path):
    message = r"cannot be written \(No space left on device\)"
    fail(
        staged_file("--json", tmp_path / "r.json"),
        OSError(28, "No space left on device"),
        message,
        InvalidInput,
    )
    assert list(tmp_path.iterdir()) == []
