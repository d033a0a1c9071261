"""Jobs that misbehave end as they should, nothing beside them notices, and no process of theirs is left."""

import os
import random
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from pollux.backends.local import LocalBackend
from pollux.backends.process.proc import is_alive, members, process_table
from pollux.backends.process.records import read_record, run_folder
from pollux.backends.protocol import Launch, Running
from pollux.core import Placement
from pollux.testing.conformance.backends import Bench
from pollux.testing.waiting import wait_until

SEED = int(os.environ.get("POLLUX_FAULT_SEED", "20261115"))
MARK = "POLLUX_TEST_MARK"


def cold(home: Path) -> LocalBackend:
    return LocalBackend(home, slots=4, warm=False, log_cap_bytes=256 << 10)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    bench = Bench(tmp_path_factory.mktemp("contained"), cold)
    yield bench
    empty(bench)


@pytest.fixture
def own_bench(tmp_path):
    bench = Bench(tmp_path, cold)
    yield bench
    empty(bench)


def empty(bench):
    for each in bench.backend.running():
        bench.backend.stop(each.job_id, each.generation, 0.0)
        bench.backend.forget(each.job_id)
    bench.wait("empty backend", lambda: not bench.backend.running())
    bench.backend.close()


@pytest.fixture
def neighbour(bench):
    """A job beside the bad one, which must see nothing of it: it is the same process before and after."""
    job = f"neighbour-{uuid.uuid4().hex[:8]}"
    text = f"""
        import os, time
        from pathlib import Path
        Path("{job}.up").write_text(f"{{os.getpid()}}\\n")
        while not Path("{job}.go").exists():
            time.sleep(0.01)
    """
    bench.submit(job, text)
    pid = int(bench.file(f"{job}.up"))
    born = process_table()[pid].start
    yield
    assert is_alive(pid, born)
    (bench.folder / f"{job}.go").touch()
    assert bench.end(job).outcome == "succeeded"


def submit(bench, job, text, **more):
    """Launch a script marked by a variable, which all that it starts inherits; returns the mark."""
    mark = f"{MARK}={uuid.uuid4().hex}"
    name, value = mark.split("=")
    bench.submit(job, text, env={name: value}, **more)
    return mark


def left(mark):
    return [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in members(mark)]


SPAWN = """
    import os, signal, subprocess, sys, time
    def spawn(code, **more):
        return subprocess.Popen([sys.executable, "-S", "-c", code], **more)
    DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
"""


def test_one_that_crashes(bench, neighbour):
    mark = submit(bench, "segfault", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    ended = bench.end("segfault")
    assert (ended.outcome, ended.exits[0].code) == ("crashed", -signal.SIGSEGV)
    assert "SIGSEGV" in ended.detail
    assert left(mark) == []


def test_one_that_hangs_and_ignores_sigterm(bench, neighbour):
    text = """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", flush=True)
        while True:
            pass
    """
    mark = submit(bench, "hanging", text)
    bench.wait("output", lambda: bench.log("hanging").endswith("\n"))
    bench.backend.stop("hanging", 1, 0.3)
    ended = bench.end("hanging")
    assert (ended.outcome, ended.exits[0].code) == ("stopped", -signal.SIGKILL)
    assert left(mark) == []


def test_one_that_floods_its_log(bench, neighbour):
    text = """
        import sys
        line = "x" * 1023 + "\\n"
        for _ in range(16 << 10):
            sys.stdout.write(line)
        print("the end")
    """
    submit(bench, "flooding", text)
    assert bench.end("flooding").outcome == "succeeded"
    files = sorted((bench.home / "logs" / "flooding").iterdir())
    assert sum(path.stat().st_size for path in files) < 300 << 10
    text = bench.log("flooding")
    assert text.startswith("xxx")
    assert text.endswith("the end\n")
    assert "bytes of log were dropped here" in text
    assert bench.backend.logs("flooding", 0, 0, 10).offset == 10
    # The offset counts what was dropped, too.
    assert bench.backend.logs("flooding", 0, -1).offset >= 16 << 20


def test_one_that_leaves_children_behind(bench, neighbour):
    text = (
        SPAWN
        + """
    spawn(DEAF)
    spawn(DEAF, start_new_session=True, stdout=subprocess.DEVNULL)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-S", "-c", DEAF])
        os._exit(0)
    os.wait()
    sys.exit(3)
    """
    )
    mark = submit(bench, "parent", text)
    ended = bench.end("parent")
    assert (ended.outcome, ended.exits[0].code) == ("crashed", 3)
    assert left(mark) == []


def test_one_that_ends_well_but_leaves_a_child(bench, neighbour):
    mark = submit(bench, "careless", SPAWN + "    spawn(DEAF, start_new_session=True)\n")
    assert bench.end("careless").outcome == "succeeded"
    assert left(mark) == []


def test_children_get_the_grace_too(bench, neighbour):
    """A shell that is told to stop dies at once; what it runs must still be able to save its work."""
    saver = """
        import signal, sys, time
        from pathlib import Path
        def save(number, frame):
            time.sleep(0.3)
            Path("shell.saved").write_text("yes\\n")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        Path("shell.up").write_text("yes\\n")
        time.sleep(600)
    """
    script = bench.script("saver", saver)
    launch = bench.launch("shell", "")
    command = ("sh", "-c", f"{shlex.join([sys.executable, str(script)])}; true")
    bench.backend.submit(Launch(launch.job_id, 1, launch.placement, command, launch.workdir))
    bench.file("shell.up")
    bench.backend.stop("shell", 1, 30.0)
    assert bench.end("shell").outcome == "stopped"
    assert (bench.folder / "shell.saved").exists()


def test_one_above_its_memory_limit(bench, neighbour):
    text = (
        SPAWN
        + """
    spawn("hoard = bytearray(150 << 20); hoard[::4096] = b'x' * len(hoard[::4096]); import time; time.sleep(600)")
    time.sleep(600)
    """
    )
    mark = submit(bench, "greedy", text, memory_bytes_per_gpu=float(100 << 20))
    ended = bench.end("greedy")
    assert ended.outcome == "out-of-memory"
    assert "limit of 100 MiB" in ended.detail
    assert left(mark) == []


def test_one_within_its_memory_limit(bench):
    submit(bench, "modest", "print('fine')", memory_bytes_per_gpu=float(1 << 30))
    assert bench.end("modest").outcome == "succeeded"


def test_a_command_that_is_not_there(bench):
    launch = bench.launch("absent", "")
    bench.backend.submit(Launch("absent", 1, launch.placement, ("no-such-tool", "x"), launch.workdir))
    ended = bench.end("absent")
    assert (ended.outcome, ended.exits[0].code) == ("crashed", 127)
    assert "no-such-tool" in ended.detail


def shim_of(bench, job):
    record = read_record(run_folder(bench.home, job) / "shim.json")
    assert record is not None
    return int(record["pid"])


@pytest.mark.parametrize("way", ["exec", "fork"])
def test_a_shim_that_is_killed_takes_its_replicas_with_it(own_bench, way):
    text = (
        SPAWN
        + """
    spawn(DEAF, start_new_session=True)
    Path = __import__("pathlib").Path
    Path(f"shimless-{os.environ['RANK']}.up").write_text(f"{os.getpid()}\\n")
    time.sleep(600)
    """
    )
    if way == "fork":
        own_bench.backend.close()
        own_bench.backend = LocalBackend(own_bench.home, slots=4, warm=True)
        own_bench.backend.start(own_bench._hear)
        own_bench.wait("warm backend", lambda: own_bench.backend.is_warm)
    mark = submit(own_bench, "shimless", text, gpus=2)
    pids = [int(own_bench.file(f"shimless-{rank}.up")) for rank in range(2)]
    os.kill(shim_of(own_bench, "shimless"), signal.SIGKILL)
    ended = own_bench.end("shimless")
    assert ended.outcome == "lost"
    table = process_table()
    assert [pid for pid in pids if pid in table and table[pid].state not in "ZX"] == []
    assert left(mark) == []
    # Its places are free again, and the next generation gets a new shim.
    own_bench.submit("shimless", "print('again')", generation=2, gpus=4)
    assert own_bench.end("shimless", 2).outcome == "succeeded"


OWNER = """
    import sys, time
    from pathlib import Path
    from pollux.backends.local import LocalBackend
    from pollux.backends.protocol import Launch
    from pollux.core import Placement
    home, folder = Path(sys.argv[1]), sys.argv[2]
    backend = LocalBackend(home, slots=4, warm=False)
    backend.start(lambda event: None)
    node = backend.inventory()[0].id
    for job in ("first", "second"):
        backend.submit(Launch(job, 1, Placement.of({node: 2}), ("python", "worker.py"), folder, {"POLLUX_JOB": job}))
    time.sleep(600)
"""

WORKER = """
    import os, time
    from pathlib import Path
    me = f"{os.environ['POLLUX_JOB']}-{os.environ['RANK']}"
    with open(f"{me}.starts", "a") as file:
        file.write(f"{os.getpid()}\\n")
    while not Path(f"{os.environ['POLLUX_JOB']}.go").exists():
        time.sleep(0.01)
"""


def test_a_service_that_is_killed_finds_its_jobs_again(tmp_path):
    for name, text in (("owner", OWNER), ("worker", WORKER)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    home = tmp_path / "home"
    owner = subprocess.Popen([sys.executable, "owner.py", str(home), str(tmp_path)], cwd=tmp_path)
    names = [f"{job}-{rank}.starts" for job in ("first", "second") for rank in range(2)]
    try:
        files = [tmp_path / name for name in names]
        wait_until("start of all", lambda: all(file.exists() and file.read_text() for file in files))
    finally:
        owner.kill()
        owner.wait()
    (tmp_path / "second.go").touch()
    folder = tmp_path / "bench"
    folder.mkdir()
    bench = Bench(folder, lambda unused: cold(home))
    try:
        assert bench.end("second").outcome == "succeeded"
        assert bench.running("first") == Running("first", 1, "running", None)
        (tmp_path / "first.go").touch()
        assert bench.end("first").outcome == "succeeded"
        assert [len((tmp_path / name).read_text().splitlines()) for name in names] == [1, 1, 1, 1]
    finally:
        empty(bench)


def test_two_services_cannot_share_a_home(own_bench):
    from pollux.core.errors import Conflict

    other = cold(own_bench.home)
    with pytest.raises(Conflict, match="another service works in"):
        other.start(lambda event: None)
    other.close()


def test_a_service_killed_at_any_moment_never_starts_a_job_twice(tmp_path):
    """Eight services in a row are killed at moments drawn at random; each tells its backend everything again."""
    moments = random.Random(SEED)
    for name, text in (("owner", OWNER), ("worker", WORKER)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    home = tmp_path / "home"
    for _ in range(8):
        owner = subprocess.Popen([sys.executable, "owner.py", str(home), str(tmp_path)], cwd=tmp_path)
        time.sleep(moments.uniform(0.15, 0.7))
        owner.kill()
        owner.wait()
    folder = tmp_path / "bench"
    folder.mkdir()
    bench = Bench(folder, lambda unused: cold(home))
    try:
        node = bench.backend.inventory()[0].id
        for job in ("first", "second"):
            env = {"POLLUX_JOB": job}
            bench.backend.submit(Launch(job, 1, Placement.of({node: 2}), ("python", "worker.py"), str(tmp_path), env))
            (tmp_path / f"{job}.go").touch()
        assert [bench.end(job).outcome for job in ("first", "second")] == ["succeeded", "succeeded"]
        starts = [(tmp_path / f"{job}-{rank}.starts").read_text() for job in ("first", "second") for rank in range(2)]
        assert [len(text.splitlines()) for text in starts] == [1, 1, 1, 1]
    finally:
        empty(bench)
