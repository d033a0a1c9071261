"""Whatever a job puts in place of the files in the service's own folder, others run, and a restart works.

Which files there are is found out, not listed: those that a real job leaves behind.
"""

import os
import queue
import subprocess
import sys
import threading

import pytest
from tests.support.odd_files import KINDS, emptied

from pollux.backends.local import LocalBackend
from pollux.testing.conformance.backends import Bench
from pollux.testing.waiting import PATIENCE_SECONDS

WAITS = "import pathlib, time\npathlib.Path('up-{0}').touch()\nwhile not pathlib.Path('end').exists(): time.sleep(0.02)"


def put_text(text):
    def put(place):
        place.write_text(text)

    put.__name__ = f"put_{text[:60]}"
    return put


TEXTS = [
    "", "[]", "{}", "[" * 100_000, '{"at": 1e999, "job_id": 3, "generation": [], "outcome": {}, "exits": 5}',
    '{"places": 7, "replicas": {}, "live": [], "boot": {}, "seconds": "x"}',
    '{"places": ["\u00b2", "9999999999999999999999", 3], "replicas": [["x", 1, []]]}',
    '{"places": [], "replicas": [[99999999999999999999, null, null]], "seconds": 1e999, "at": -1}',
]  # fmt: skip


def in_time(what):
    """What that returns; a thread that hangs is left behind, and fails the test."""
    told: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=lambda: told.put(what()), daemon=True).start()
    return told.get(timeout=PATIENCE_SECONDS)


SHORT = ("put_fifo", "put_folder", "put_huge", "put_{}")
PUTS = [
    pytest.param(put, warm, id=f"{put.__name__[4:40]}-{'warm' if warm else 'cold'}",
                 marks=[] if put.__name__ in SHORT and (not warm or put.__name__ == "put_fifo") else pytest.mark.long)
    for put in [*KINDS, *map(put_text, TEXTS)] for warm in (False, True)
]  # fmt: skip


def left_behind(home):
    """Below the folder of runs, the files of a job that runs, and those beside its folder."""
    folder = home / "run"
    found = sorted(path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    return [path.name for path in found if path.parts[0] == "first"], [path for path in found if len(path.parts) == 1]


@pytest.mark.parametrize(("put", "warm"), PUTS)
def test_no_file_of_a_job_holds_up_anything_else(tmp_path, put, warm):
    (tmp_path / "secret").write_text("{}")
    bench = Bench(tmp_path, lambda home: LocalBackend(home, slots=16, warm=warm))
    try:
        spoil(bench, put)
    finally:
        (bench.folder / "end").touch()


def spoil(bench, put):
    bench.submit("first", WAITS.format("first"))
    bench.wait("first", (bench.folder / "up-first").exists)
    of_job, beside = left_behind(bench.home)
    assert {"generation-1.json", "ran-1.json", "shim.json", "shim.log", "shim.sock", "lock"} <= {*of_job}
    of_job.append("ended-1.json")
    jobs = {name: f"odd-{number}" for number, name in enumerate(of_job)}
    for job in jobs.values():
        bench.submit(job, WAITS.format(job))
    for job in jobs.values():
        bench.wait(job, (bench.folder / f"up-{job}").exists)
    for name, job in jobs.items():
        put(emptied(bench.home / "run" / job / name))
    for path in beside:
        put(emptied(bench.home / "run" / path))
    for job in jobs.values():
        in_time(lambda job=job: bench.backend.ran_seconds(job, 1))
        in_time(lambda job=job: bench.backend.logs(job))
    in_time(bench.backend.running)
    in_time(bench.restart)
    assert "first" in {each.job_id for each in in_time(bench.backend.running)}
    (bench.folder / "end").touch()
    for job in ("first", *jobs.values()):
        in_time(lambda job=job: bench.end(job))
    for job in ("first", *jobs.values()):
        bench.submit(job, "print('again')", generation=2)
        bench.end(job, 2)
        in_time(lambda job=job: bench.backend.forget(job))
    bench.wait("empty", lambda: not bench.backend.running())
    assert bench.backend.healthy
    in_time(bench.backend.close)


PIPES = """
import os, sys
from pathlib import Path
from pollux.backends.local import LocalBackend
from pollux.testing.conformance.backends import Bench
folder, warm = Path(sys.argv[1]), sys.argv[2] == "warm"
def new(home):
    (home / "run").mkdir()
    os.mkfifo(home / "run" / "nursery.log")
    return LocalBackend(home, slots=1, warm=warm)
bench = Bench(folder, new)
bench.wait("readiness", lambda: bench.backend.is_warm or not warm)
(folder / "home" / "run" / "job").mkdir()
os.mkfifo(folder / "home" / "run" / "job" / "shim.log")
bench.submit("job", "print('ran')")
print(bench.end("job").outcome, bench.log("job").strip())
bench.backend.forget("job")
bench.wait("empty", lambda: not bench.backend.running())
bench.backend.close()
"""


@pytest.mark.parametrize("warm", ["cold", "warm"])
def test_a_pipe_in_place_of_a_log_stops_no_thread(tmp_path, warm):
    """In a process of its own: one that waits inside posix_spawn runs no other thread, such as one of this test."""
    command = [sys.executable, "-c", PIPES, str(tmp_path), warm]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=os.environ)
    assert done.stdout == "succeeded ran\n", done.stderr
