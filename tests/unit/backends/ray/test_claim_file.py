import pytest

from pollux.backends.process.records import read_record
from pollux.backends.ray import claim_file
from pollux.backends.ray.claim_file import ClaimFile
from pollux.testing.waiting import wait_until


@pytest.fixture
def path(tmp_path):
    return tmp_path / "home" / "ray.json"


def test_the_record_is_written_at_the_start_after_a_change_and_at_the_end(path):
    record = {"next": 1}
    file = ClaimFile(path, lambda: dict(record))
    assert file.read() == {}
    file.start()
    assert read_record(path) == {"next": 1}
    record["next"] = 2
    file.note_change()
    wait_until("second record", lambda: read_record(path) == {"next": 2})
    record["next"] = 3
    file.close()
    assert ClaimFile(path, dict).read() == {"next": 3}


def test_one_that_was_never_started_writes_nothing(path):
    ClaimFile(path, dict).close()
    assert not path.exists()


def test_the_same_record_is_not_written_twice(path, monkeypatch):
    written = []
    monkeypatch.setattr(claim_file, "write_record", lambda path, record: written.append(record))
    file = ClaimFile(path, lambda: {"next": 1})
    file.start()
    file.note_change()
    file.close()
    assert written == [{"next": 1}]
