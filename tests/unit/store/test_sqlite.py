"""What can go wrong with a file: full, read-only, damaged, foreign, newer, in use, readable by others."""

import logging
import math
import os
import resource
import sqlite3
import stat
import subprocess
import sys
import threading
from contextlib import closing, contextmanager

import pytest

from pollux.controller import JobPaused
from pollux.core.errors import Conflict, InvalidInput, StoreFailed
from pollux.store import SavedState, TelemetryRow, _database_file, open_store, open_telemetry
from pollux.testing.conformance.stores import facts
from pollux.testing.waiting import PATIENCE_SECONDS


@pytest.fixture
def path(tmp_path):
    return tmp_path / "home" / "store.sqlite"


@pytest.fixture
def store(path):
    with closing(open_store(path)) as opened:
        yield opened


@contextmanager
def largest_file(size):
    """As on a disk that is full beyond that: writing further fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def long_facts(count):
    return [JobPaused(float(number), "x" * 1000) for number in range(count)]


def test_a_full_disk_loses_nothing_and_passes(path, store):
    store.append(facts(1, 2))
    size = path.with_name("store.sqlite-wal").stat().st_size
    with largest_file(size + 20_000):
        for _ in range(3):
            with pytest.raises(StoreFailed, match=r"store.sqlite: .*; (check the disk|free some space)"):
                store.append(long_facts(200))
        assert store.revision == 2
        assert [event for _, event in store.read()] == facts(1, 2)
        with pytest.raises(StoreFailed):
            store.save(SavedState(2, {"n": "x" * 200_000}))
        assert store.load() is None
    assert store.append(long_facts(200)) == 202
    store.close()
    with closing(open_store(path)) as again:
        assert [event for _, event in again.read()] == [*facts(1, 2), *long_facts(200)]


def test_a_full_database_says_what_to_do(store):
    store.append(facts(1, 1))
    writer = store._database._writer
    pages = writer.execute("PRAGMA page_count").fetchone()[0]
    writer.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFailed, match="free some space on that disk and try again"):
        store.append(long_facts(100))
    writer.execute("PRAGMA max_page_count = 100000")
    assert store.append(long_facts(100)) == 101


def test_a_file_that_became_read_only(store):
    store.append(facts(1, 1))
    store._database._writer.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreFailed, match="make the file and its folder writable"):
        store.append(facts(2, 1))
    with pytest.raises(StoreFailed):
        store.set_setting("a", "b")
    store._database._writer.execute("PRAGMA query_only = OFF")
    assert store.append(facts(2, 1)) == 2


def test_is_synchronised_and_logged_ahead(store):
    pragmas = ("journal_mode", "synchronous")
    assert [store._database._writer.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas] == ["wal", 2]


def test_nobody_else_can_read_the_files(path, store):
    store.append(facts(1, 1))
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in path.parent.iterdir()}
    assert set(modes) == {
        "store.sqlite",
        "store.sqlite-wal",
        "store.sqlite-shm",
        "store.sqlite.lock",
        "store.sqlite.id",
    }
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_that_others_could_read_is_closed_to_them(path):
    path.parent.mkdir()
    path.touch(0o644)
    open_store(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_second_writer_is_refused_and_told_whom_to_stop(path, store):
    with pytest.raises(Conflict, match=rf"store.sqlite is in use by process {os.getpid()}; stop that one"):
        open_store(path)
    assert store.append(facts(1, 1)) == 1
    store.close()
    open_store(path).close()


def test_a_lock_of_the_dead_is_no_obstacle(path):
    script = (
        f"import os; from pathlib import Path; from pollux.store import open_store as o; s = o(Path({str(path)!r}));"
    )
    script += "print(os.getpid(), flush=True); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert killed.returncode == -9, killed.stderr
    assert path.with_name("store.sqlite.lock").read_text().strip() == killed.stdout.strip()
    open_store(path).close()


def test_a_child_does_not_inherit_the_lock(path):
    reading, writing = os.pipe()
    store = open_store(path)
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        store.close()
        open_store(path).close()
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_a_newer_format_is_refused(path):
    open_store(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO migrations VALUES (7)")
    with pytest.raises(StoreFailed, match="has format 7, this version of Pollux knows 2; upgrade"):
        open_store(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM migrations WHERE step = 7")
    open_store(path).close()


def test_what_is_no_database_is_refused(path):
    path.parent.mkdir()
    path.write_bytes(b"name,time\n" * 1000)
    with pytest.raises(StoreFailed, match=r"not an SQLite file: restore a backup"):
        open_store(path)
    assert path.read_bytes() == b"name,time\n" * 1000


def test_a_folder_in_its_place_is_refused(path):
    path.mkdir(parents=True)
    with pytest.raises(StoreFailed, match=r"store.sqlite"):
        open_store(path)


def test_a_file_in_place_of_its_folder_is_refused(path):
    path.parent.touch()
    with pytest.raises(StoreFailed, match="folder"):
        open_store(path)


def test_a_network_file_system_is_refused(path, tmp_path, monkeypatch):
    mounts, point = tmp_path / "mounts", str(tmp_path).replace("\\", "\\134").replace(" ", "\\040")
    mounts.write_text(f"1 0 0:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / {point} rw - nfs4 host:/x rw\n")
    monkeypatch.setattr(_database_file, "_MOUNTS", mounts)
    with pytest.raises(InvalidInput, match=r"network file system \(nfs4\).*POLLUX_HOME"):
        open_store(path)
    mounts.write_text(f"1 0 0:1 / / rw - nfs host:/ rw\n2 1 0:2 / {point} rw - tmpfs none rw\n")
    open_store(path).close()


def damage(path, revision, text="{}"):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE snapshots SET state = ? WHERE revision = ?", (text, revision))


def test_a_damaged_snapshot_is_passed_over(path, store, caplog):
    store.append(facts(1, 4))
    store.save(SavedState(2, {"n": 2}))
    store.save(SavedState(4, {"n": 4}))
    damage(path, 4, '{"n": 5}')
    with caplog.at_level(logging.WARNING):
        assert store.load() == SavedState(2, {"n": 2})
    assert "the snapshot of revision 4 is damaged" in caplog.text
    damage(path, 2, b"\xff")
    assert store.load() is None
    assert [revision for revision, _ in store.read()] == [1, 2, 3, 4]


def test_a_trimmed_log_without_a_whole_snapshot_is_not_taken_for_a_whole_one(path, store):
    store.append(facts(1, 4))
    store.save(SavedState(2, {"n": 2}))
    store.save(SavedState(4, {"n": 4}))
    assert store.trim(math.inf) == 2
    damage(path, 4)
    assert store.load() == SavedState(2, {"n": 2})
    damage(path, 2)
    with pytest.raises(
        StoreFailed, match="all snapshots are damaged and the log begins at revision 3; restore a backup"
    ):
        store.load()


def test_a_damaged_fact_is_named(path, store):
    store.append(facts(1, 3))
    for body in ("{", '{"type": "job-paused", "v": 1}', '{"type": "job-flew", "v": 1}'):
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE events SET body = ?, digest = NULL WHERE revision = 2", (body,))
        reading = store.read()
        assert next(reading)[0] == 1
        with pytest.raises(StoreFailed, match=r"fact 2 cannot be read|job-flew"):
            next(reading)


def test_only_the_last_two_snapshots_stay(path, store):
    store.append(facts(1, 5))
    for revision in (1, 2, 3, 4):
        store.save(SavedState(revision, {}))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT revision FROM snapshots ORDER BY 1").fetchall() == [(3,), (4,)]


def test_reading_does_not_wait_for_a_writer(store):
    store.append(facts(1, 3))
    with store._database.transaction() as connection:
        connection.execute("DELETE FROM events")
        seen = []
        thread = threading.Thread(target=lambda: seen.extend(store.read()))
        thread.start()
        thread.join(PATIENCE_SECONDS)
        assert len(seen) == 3
        connection.execute("INSERT INTO events (revision, at, body) VALUES (1, 1.0, '{}')")


def test_a_closed_store_says_so(store):
    store.close()
    with pytest.raises(StoreFailed, match="closed"):
        store.append(facts(1, 1))
    with pytest.raises(StoreFailed, match="closed"):
        store.setting("a")


def test_telemetry_on_a_full_disk(tmp_path):
    path = tmp_path / "telemetry.sqlite"
    with closing(open_telemetry(path)) as telemetry:
        telemetry.record([TelemetryRow("a", 1.0, "report", {"n": 1})])
        with largest_file(path.with_name("telemetry.sqlite-wal").stat().st_size + 10_000):
            with pytest.raises(StoreFailed):
                telemetry.record([TelemetryRow("a", 2.0, "report", {"n": "x" * 100_000})])
            assert telemetry.latest("report")["a"].at == 1.0
        telemetry.record([TelemetryRow("a", 2.0, "report", {"n": "x" * 100_000})])
        assert [row.at for row in telemetry.series("a", "report")] == [1.0, 2.0]
