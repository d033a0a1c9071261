"""Records of shims: whole or not there, and ids that are safe as names of folders."""

import pytest

from pollux.backends.process.records import (
    check_job_id,
    ended_from,
    ended_to,
    newest_generation,
    read_record,
    record_path,
    remove_records,
    write_record,
)
from pollux.backends.protocol import Exit, ReplicasEnded
from pollux.core.errors import BackendFailed, InvalidInput


def test_a_record_comes_back(tmp_path):
    path = record_path(tmp_path, "generation", 3)
    write_record(path, {"a": [1]})
    assert read_record(path) == {"a": [1]}
    assert [each.name for each in tmp_path.iterdir()] == ["generation-3.json"]


def test_what_is_not_a_record_is_none(tmp_path):
    path = tmp_path / "generation-1.json"
    assert read_record(path) is None
    for text in ("{", "[]", ""):
        path.write_text(text)
        assert read_record(path) is None


def test_the_newest_generation(tmp_path):
    assert newest_generation(tmp_path / "absent") is None
    assert newest_generation(tmp_path) is None
    for name in ("generation-9.json", "generation-10.json", "ended-11.json", "generation-x.json", "generation-12.tmp"):
        (tmp_path / name).write_text("{}")
    assert newest_generation(tmp_path) == 10


def test_removing(tmp_path):
    for name in ("generation-1.json", "ended-1.json", "generation-2.json", "shim.json", "lock"):
        (tmp_path / name).write_text("{}")
    remove_records(tmp_path, 2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["generation-2.json", "lock", "shim.json"]
    remove_records(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["lock", "shim.json"]


def test_a_folder_that_is_gone_is_told(tmp_path):
    with pytest.raises(BackendFailed, match="cannot write"):
        write_record(tmp_path / "absent" / "x.json", {})


def test_ends_come_back():
    ended = ReplicasEnded(1.5, "job", 2, "crashed", (Exit(0, -9, 1.25),), "why")
    assert ended_from(ended_to(ended)) == ended


@pytest.mark.parametrize("job_id", ["a", "A-1.b_c", "x" * 128])
def test_good_ids(job_id):
    assert check_job_id(job_id) == job_id


@pytest.mark.parametrize("job_id", ["", ".", "..", "-x", "a/b", "a b", "a\n", "x" * 129, "é"])
def test_bad_ids(job_id):
    with pytest.raises(InvalidInput, match="cannot name a folder"):
        check_job_id(job_id)
