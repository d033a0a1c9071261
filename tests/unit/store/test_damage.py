"""A store that was damaged, cut or taken away: what is whole is used, what is not is said, nothing else is believed."""

import json
import logging
import os
import shutil
import sqlite3
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pollux.core.errors import StoreFailed
from pollux.store import SavedState, TelemetryRow, open_store, open_telemetry
from pollux.store.inspection import inspect_store
from pollux.testing.conformance.stores import facts


@pytest.fixture
def path(tmp_path):
    """A closed store with facts 1 to 8 and snapshots after 4 and 6."""
    path = tmp_path / "home" / "store.sqlite"
    with closing(open_store(path)) as store:
        store.append(facts(1, 4))
        store.save(SavedState(4, {"n": 4, "word": "ü"}))
        store.append(facts(5, 2))
        store.save(SavedState(6, {"n": 6, "word": "ü"}))
        store.append(facts(7, 2))
    return path


def change(path, statement, *values):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, values)


def whole_of(path):
    """What a start takes from it: the snapshot, and every fact of the log."""
    with closing(open_store(path)) as store:
        return store.load(), list(store.read())


@pytest.mark.parametrize("state", [b'{"n": 6, "word": "\xff"}', b"\xff\xfe", None, "", 7, "{"])
def test_the_snapshot_before_it_is_used_whatever_the_newest_has_become(path, state, caplog):
    change(path, "UPDATE snapshots SET state = CAST(? AS TEXT) WHERE revision = 6", "" if state is None else state)
    with caplog.at_level(logging.WARNING):
        assert whole_of(path) == (SavedState(4, {"n": 4, "word": "ü"}), list(enumerate(facts(1, 8), start=1)))
    assert "the snapshot of revision 6 is damaged" in caplog.text
    assert inspect_store(path).faults == ("the snapshot of fact 6 is damaged",)


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        ("DELETE FROM events WHERE revision = 3", "fact 3 is missing"),
        ("DELETE FROM events WHERE revision IN (3, 4)", "the facts 3 to 4 are missing"),
        ("DELETE FROM events WHERE revision = 7", "fact 7 is missing"),
        ("DELETE FROM events WHERE revision = 8", "missing at the end"),
        ("DELETE FROM events WHERE revision > 4", "the facts 7 to 8 are missing"),
        (
            "UPDATE events SET body = replace(body, '5', '6') WHERE revision = 5",
            "fact 5 has changed since it was written",
        ),
        ("UPDATE events SET at = at + 1 WHERE revision = 2", "fact 2 has changed since it was written"),
        ("UPDATE events SET body = CAST(x'ff' AS TEXT) WHERE revision = 2", "fact 2 cannot be read"),
        ("UPDATE events SET at = 'x' WHERE revision = 2", "fact 2 has changed since it was written"),
        (
            "UPDATE events SET body = replace(hex(zeroblob(100000)), '0', '['), digest = NULL WHERE revision = 2",
            "fact 2 cannot be read",
        ),
        ("UPDATE events SET revision = 20 WHERE revision = 2", "the facts 9 to 19 are missing|fact 2 is missing"),
    ],
)
def test_a_log_that_is_not_whole_is_refused(path, statement, fault):
    change(path, statement)
    with pytest.raises(StoreFailed, match=f"({fault}).*restore a backup"):
        whole_of(path)
    assert inspect_store(path).faults


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_read_is_what_was_written_or_refused(path, data):
    """Any byte of the file may have changed."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    copy = path.parent.parent / "copy" / "store.sqlite"
    shutil.rmtree(copy.parent, ignore_errors=True)
    shutil.copytree(path.parent, copy.parent)
    content = bytearray(copy.read_bytes())
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    copy.write_bytes(content)
    try:
        saved, log = whole_of(copy)
    except StoreFailed:
        return
    assert saved in (SavedState(6, {"n": 6, "word": "ü"}), SavedState(4, {"n": 4, "word": "ü"}))
    assert log == list(enumerate(facts(1, 8), start=1))


def test_a_store_of_before_has_no_checksums_and_is_read(path):
    change(path, "UPDATE events SET digest = NULL")
    change(path, "DELETE FROM settings WHERE name IN ('head', 'identity')")
    path.with_name("store.sqlite.id").unlink()
    assert whole_of(path)[0] == SavedState(6, {"n": 6, "word": "ü"})
    assert not inspect_store(path).faults


@pytest.mark.parametrize("lost", ["removed", "empty"])
def test_a_store_that_was_there_and_is_gone_is_no_new_cluster(path, lost):
    backup = path.with_name("backup")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy(path, backup)
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    if lost == "empty":
        path.touch()
    for _ in range(2):  # the first look must not make the second one believe in a new cluster
        with pytest.raises(StoreFailed, match=r"was here and is gone.*or remove .*store\.sqlite\.id to begin a new"):
            open_store(path)
    shutil.copy(backup, path)
    assert len(whole_of(path)[1]) == 8
    path.unlink()
    path.with_name("store.sqlite.id").unlink()
    assert whole_of(path) == (None, [])


@pytest.mark.parametrize("name", ["store.sqlite", "telemetry.sqlite"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/null", path)])
def test_what_is_no_file_in_the_place_of_one_is_refused(path, name, make):
    """A pipe would hold the start up for ever."""
    place = path.with_name(name)
    place.unlink(missing_ok=True)
    make(place)
    with pytest.raises(StoreFailed, match=name):
        (open_store if name == "store.sqlite" else open_telemetry)(place)
    if name == "store.sqlite":
        with pytest.raises(StoreFailed, match="plain file"):
            inspect_store(place)


@pytest.mark.parametrize("content", [b"\xff\xfe\0", b"hello", b""])
def test_another_identity_beside_a_store_that_is_whole_is_told(path, content, caplog):
    path.with_name("store.sqlite.id").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert len(whole_of(path)[1]) == 8
    assert "another cluster" in caplog.text


def test_a_pipe_beside_a_store_holds_nothing_up(path):
    path.with_name("store.sqlite.id").unlink()
    os.mkfifo(path.with_name("store.sqlite.id"))
    with pytest.raises(StoreFailed, match="plain file"):
        whole_of(path)


def test_reading_goes_on_while_the_log_is_trimmed(path, monkeypatch):
    from pollux.store import sqlite

    monkeypatch.setattr(sqlite, "_ROWS_AT_ONCE", 2)
    with closing(open_store(path)) as store:
        reading = store.read()
        seen = [next(reading)[0], next(reading)[0]]
        store.trim(1e12)
        seen += [revision for revision, _ in reading]
    assert seen == [1, 2, 5, 6, 7, 8]


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\x00" + b"\x07" * 5000])
def test_damaged_measurements_stop_nothing(tmp_path, content, caplog):
    path = tmp_path / "telemetry.sqlite"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING), closing(open_telemetry(path)) as telemetry:
        telemetry.record([TelemetryRow("a", 1.0, "report", {"n": 1})])
        assert telemetry.latest("report")["a"].values == {"n": 1}
    assert "renamed to telemetry.sqlite.damaged-" in caplog.text
    aside = [each for each in tmp_path.iterdir() if "damaged" in each.name]
    assert [each.read_bytes() for each in aside] == [content]


@pytest.mark.parametrize(
    "body", ["CAST(x'ff' AS TEXT)", "'{'", "'[1]'", "'7'", "x'00'", "replace(hex(zeroblob(100000)), '0', '[')"]
)
def test_a_damaged_measurement_is_left_out(tmp_path, body, caplog):
    path = tmp_path / "telemetry.sqlite"
    with closing(open_telemetry(path)) as telemetry:
        for job in "ab":
            telemetry.record([TelemetryRow(job, 1.0, "report", {"n": 1})])
        for table in ("rows", "newest"):
            change(path, f"UPDATE {table} SET body = {body} WHERE job_id = 'a'")
        assert set(telemetry.latest("report")) == {"b"}
        assert telemetry.series("a", "report") == []
        assert len(telemetry.series("b", "report")) == 1
    assert caplog.text.count("is damaged; damaged measurements are left out") == 1


def test_doctor_says_what_is_whole(path, monkeypatch):
    from typer.testing import CliRunner

    from pollux.cli.main import app

    monkeypatch.setenv("POLLUX_HOME", str(path.parent))
    whole = CliRunner().invoke(app, ["doctor", "--store", "--json"])
    assert whole.exit_code == 0, whole.output
    assert "8 facts, 1 to 8" in whole.stdout
    assert "after fact 4, after fact 6" in whole.stdout
    change(path, "DELETE FROM events WHERE revision = 3")
    damaged = CliRunner().invoke(app, ["doctor", "--store", "--json"])
    assert damaged.exit_code == 1
    found = [each for each in json.loads(damaged.stdout)["findings"] if each["level"] == "missing"]
    assert [each["value"] for each in found] == ["fact 3 is missing"]
    assert "restore a backup" in found[0]["remedy"]
    path.unlink()
    gone = CliRunner().invoke(app, ["doctor", "--store"])
    assert gone.exit_code == 1
    assert "does not exist" in gone.stdout
