"""The local backend's own ways: places and cores, shims cold and warm, names used again, odd surroundings."""

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest

from pollux.backends.dispatch.dispatcher import Dispatcher
from pollux.backends.dispatch.shim_client import start_shim
from pollux.backends.local import LocalBackend
from pollux.backends.nodes.slot import Slot
from pollux.backends.process.proc import is_alive, process_table
from pollux.backends.process.records import read_record, run_folder
from pollux.backends.protocol import Launch, ReplicasEnded
from pollux.core.errors import InvalidInput
from pollux.testing.conformance.backends import Bench
from pollux.wire.live.messages import (
    LaunchRequest,
    ReleaseRequest,
    StartedMessage,
    StatusMessage,
    StatusRequest,
    StopRequest,
)


def clean(bench):
    for each in bench.backend.running():
        bench.backend.stop(each.job_id, each.generation, 0.0)
        bench.backend.forget(each.job_id)
    bench.wait("empty backend", lambda: not bench.backend.running())
    bench.backend.close()


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path, lambda home: LocalBackend(home, slots=4, warm=False))
    yield bench
    clean(bench)


def test_a_home_deep_down(tmp_path):
    """Longer than any address of a socket may be."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    bench = Bench(deep, lambda home: LocalBackend(home, slots=1, warm=False))
    bench.submit("deep", "print('here')")
    assert bench.end("deep").outcome == "succeeded"
    assert bench.log("deep") == "here\n"
    clean(bench)


def test_what_is_secret_stays_with_the_service(tmp_path, monkeypatch):
    monkeypatch.setenv("POLLUX_TOKEN", "s3cr3t")
    monkeypatch.setenv("RANK", "17")
    monkeypatch.setenv("PLAIN", "kept")
    bench = Bench(tmp_path, lambda home: LocalBackend(home, slots=1, warm=False))
    bench.submit("env", "import json, os; print(json.dumps(dict(os.environ)))")
    bench.end("env")
    variables = json.loads(bench.log("env"))
    assert "POLLUX_TOKEN" not in variables
    assert (variables["RANK"], variables["PLAIN"]) == ("0", "kept")
    record = read_record(run_folder(bench.home, "env") / "shim.json")
    assert b"s3cr3t" not in Path(f"/proc/{record['pid']}/environ").read_bytes()
    clean(bench)


def test_replicas_keep_to_their_cores_and_groups(bench):
    text = """
        import json, os
        print(json.dumps([sorted(os.sched_getaffinity(0)), os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(),
                          os.read(0, 1).decode(), open("/proc/self/oom_score_adj").read().strip(),
                          sorted(os.listdir("/proc/self/fd"))[:4]]))
    """
    bench.submit("cores", text, gpus=4)
    bench.end("cores")
    allowed = sorted(os.sched_getaffinity(0))
    # Nobody but root may lower one's own.
    wanted = str(max(500, int(Path("/proc/self/oom_score_adj").read_text())))
    seen = [json.loads(bench.log("cores", replica)) for replica in range(4)]
    for place, (cores, leads, alone, read, score, files) in enumerate(seen):
        first = place * len(allowed) // 4
        assert cores == allowed[first : max(first + 1, (place + 1) * len(allowed) // 4)]
        assert (leads, alone, read, score) == (True, True, "", wanted)
        assert files == ["0", "1", "2", "3"]


def test_a_name_used_again_begins_anew(bench):
    """Right after it was forgotten, before the old shim is gone."""
    for _ in range(3):
        bench.told.clear()
        bench.submit("again", "print('once')")
        assert bench.end("again").outcome == "succeeded"
        bench.backend.forget("again")
    assert bench.log("again") == "once\n" * 3


def test_forgetting_what_still_stops_waits_for_its_end(bench):
    bench.submit("leaving", "import time; print('up'); time.sleep(600)")
    bench.wait("output", lambda: bench.log("leaving").endswith("\n"))
    bench.backend.stop("leaving", 1, 10.0)
    bench.backend.forget("leaving")
    assert bench.end("leaving").outcome == "stopped"
    bench.wait("forgetting", lambda: not run_folder(bench.home, "leaving").exists())
    assert bench.backend.running() == ()


def test_a_newer_generation_takes_the_place_of_one_that_waits(bench):
    hold = "import time; print('up'); time.sleep(600)"
    bench.submit("job", hold)
    bench.wait("output", lambda: bench.log("job").endswith("\n"))
    bench.submit("job", hold, generation=2)
    bench.submit("job", "print('third')", generation=3)
    bench.backend.stop("job", 1, 0.0)
    assert bench.end("job", 3).outcome == "succeeded"
    assert bench.end("job", 2).outcome == "stopped"
    assert bench.log("job") == "up\nthird\n"


def test_a_second_stop_only_shortens_the_grace(bench):
    text = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up")
        time.sleep(600)
    """
    bench.submit("deaf", text)
    bench.wait("output", lambda: bench.log("deaf").endswith("\n"))
    for grace in (float("inf"), 600.0, 0.1, 600.0):
        bench.backend.stop("deaf", 1, grace)
    assert bench.end("deaf").exits[0].code == -signal.SIGKILL


def test_a_zero_byte_is_refused(bench):
    launch = bench.launch("zero", "")
    with pytest.raises(InvalidInput, match="zero byte"):
        bench.backend.submit(Launch("zero", 1, launch.placement, ("python", "a\0b"), launch.workdir))


def test_jobs_go_on_beside_a_listener_that_counts(bench):
    """Ten jobs on four places: never more than four replicas at a time, told by the processes themselves."""
    text = """
        import os, time
        from pathlib import Path
        mine = Path("running") / str(os.getpid())
        mine.touch()
        time.sleep(0.05)
        print(len(list(Path("running").iterdir())))
        mine.unlink()
    """
    (bench.folder / "running").mkdir()
    jobs = [f"many-{number}" for number in range(10)]
    for number, job in enumerate(jobs):
        bench.submit(job, text, gpus=1 + number % 2)
    assert all(bench.end(job).outcome == "succeeded" for job in jobs)
    assert len([event for event in bench.told if isinstance(event, ReplicasEnded)]) == 10
    seen = [int(bench.log(job, 0)) for job in jobs]
    assert max(seen) <= 4


def parent_of_all(bench, job):
    record = read_record(run_folder(bench.home, job) / "shim.json")
    return int(record["pid"])


def test_a_cold_shim_is_replaced_once_the_forkserver_is_ready(tmp_path):
    """And a forkserver that is killed is started again."""
    bench = Bench(tmp_path, lambda home: LocalBackend(home, slots=1))
    report = "import sys; print('torch' in sys.modules)"
    bench.submit("early", report)
    bench.end("early")
    first = parent_of_all(bench, "early")
    bench.wait("warm backend", lambda: bench.backend.is_warm)
    bench.submit("early", report, generation=2)
    bench.end("early", 2)
    assert bench.log("early") == "False\nTrue\n"
    assert parent_of_all(bench, "early") != first
    forkserver = bench.backend._dispatcher.forkserver
    os.kill(forkserver._pid, signal.SIGKILL)
    bench.wait("another forkserver", lambda: bench.backend._dispatcher.forkserver not in (None, forkserver))
    bench.submit("early", "print('still here')", generation=3)
    assert bench.end("early", 3).outcome == "succeeded"
    clean(bench)
    table = process_table()
    assert forkserver._pid not in table or table[forkserver._pid].state == "Z"


def test_a_shim_that_is_told_twice_starts_once(bench):
    """Also by somebody who does not know that it was told before, as a service that was killed in between."""
    launch = bench.launch("twice", "import time; print('ran'); time.sleep(600)")
    work = bench.backend._dispatcher
    order = work.order_of(launch, (Slot("", 0),))
    folder = run_folder(bench.home, "twice")
    first, _ = start_shim("twice", folder, None, dict(os.environ))
    second, _ = start_shim("twice", folder, None, dict(os.environ))
    for link in (first, second, first):
        link.send(LaunchRequest(order))
    bench.wait("output", lambda: bench.log("twice").endswith("\n"))
    record = read_record(folder / "generation-1.json")
    for link in (first, second):
        link.send(StopRequest(1, 0.0))
    bench.wait("end", lambda: read_record(folder / "ended-1.json"))
    second.send(LaunchRequest(order))
    second.send(StatusRequest())
    seen = []

    def answered():
        seen.extend(second.receive() or [])
        return sum(isinstance(each, StatusMessage) for each in seen) == 4

    bench.wait("answers", answered)
    assert seen[-1].ended["generation"] == 1
    assert bench.log("twice") == "ran\n"
    assert len(record["replicas"]) == 1
    assert read_record(folder / "generation-1.json") == record
    assert [each.generation for each in seen if isinstance(each, StartedMessage)] == [1]
    second.send(ReleaseRequest())
    bench.wait("end of the shim", lambda: second.receive() is None)
    for link in (first, second):
        link.close()


def test_nothing_is_done_while_nothing_happens(bench):
    """A running job costs neither the service nor its shim anything: they sleep until something comes."""
    bench.submit("quiet", "import time; print('up'); time.sleep(600)")
    bench.wait("output", lambda: bench.log("quiet").endswith("\n"))
    shim = parent_of_all(bench, "quiet")
    assert bench.backend._dispatcher.thread._timeout() is None

    def switches():
        lines = Path(f"/proc/{shim}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("voluntary_ctxt_switches")))

    bench.wait("sleeping shim", lambda: process_table()[shim].state == "S")
    last = [-1, switches()]
    while last[-2] != last[-1]:  # what it was told and wrote last may still be under way
        time.sleep(0.2)
        last.append(switches())
    before = last[-1]
    bench.submit("other", "import time; time.sleep(0.5)")
    bench.end("other")
    assert switches() - before <= 2


def test_a_script_that_saves_and_exits_with_0_when_told_is_stopped(bench):
    text = """
        import pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
        pathlib.Path("saver.up").write_text("up\\n")
        time.sleep(600)
    """
    bench.submit("saver", text)
    bench.file("saver.up")
    bench.backend.stop("saver", 1, 30.0)
    ended = bench.end("saver")
    assert (ended.outcome, ended.exits[0].code) == ("stopped", 0)


def test_a_mistake_with_one_job_does_not_touch_the_others(bench, monkeypatch):
    """And the backend says when it goes on."""
    real = Dispatcher._launch

    def launch(work, job):
        if job.id == "cursed":
            raise KeyError("a mistake of ours")
        real(work, job)

    monkeypatch.setattr(Dispatcher, "_launch", launch)
    assert bench.backend.healthy
    bench.submit("cursed", "print('at last')")
    bench.submit("fine", "print('fine')")
    assert bench.end("fine").outcome == "succeeded"
    bench.wait("bad health", lambda: not bench.backend.healthy)
    monkeypatch.setattr(Dispatcher, "_launch", real)
    assert bench.end("cursed").outcome == "succeeded"
    bench.wait("good health", lambda: bench.backend.healthy)


def test_a_machine_with_no_room_for_a_shim_is_no_fault_of_the_job(bench, monkeypatch):
    def fails(*arguments):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("pollux.backends.dispatch.dispatcher.start_shim", fails)
        bench.submit("train", "print('at last')")
        ended = bench.end("train")
    assert (ended.outcome, ended.exits) == ("refused", ())
    assert "Too many open files: check its limits (ulimit -a)" in ended.detail
    bench.submit("train", "print('at last')", generation=2)
    assert bench.end("train", 2).outcome == "succeeded"


def test_an_end_that_the_listener_could_not_take_is_told_again(bench, monkeypatch):
    heard, fails = bench.backend._dispatcher.thread.listener, [True, True]

    def listener(event):
        if fails:
            fails.pop()
            raise OSError("not now")
        heard(event)

    bench.backend._dispatcher.thread.listener = listener
    bench.submit("told", "print('done')")
    assert bench.end("told").outcome == "succeeded"
    assert not fails


def test_shims_with_nothing_to_do_end_with_the_service(bench):
    bench.submit("short", "print('done')")
    bench.end("short")
    shim = read_record(run_folder(bench.home, "short") / "shim.json")
    assert Path(f"/proc/{shim['pid']}/comm").read_text() == "pollux-shim\n"
    bench.backend.close()
    bench.wait("end of the shim", lambda: not is_alive(shim["pid"], shim["start"]))
    bench.restart()
    assert bench.running("short").ended.outcome == "succeeded"


# Its memory is measured a few times while it waits.
MODEST = """
    import pathlib, time, torch
    torch.zeros(1)
    while not pathlib.Path("modest.seen").exists():
        time.sleep(0.05)
    time.sleep(1.5)
"""


def test_what_replicas_have_from_the_forkserver_does_not_count_as_theirs(tmp_path):
    """One that only waits is far below what PyTorch takes; one that fills its memory is above."""
    bench = Bench(tmp_path, lambda home: LocalBackend(home, slots=2))
    bench.wait("warm backend", lambda: bench.backend.is_warm)
    limit = {"memory_bytes_per_gpu": float(80 << 20)}
    bench.submit("modest", MODEST, env={"POLLUX_JOB": "modest"}, **limit)
    resident = bench.wait("replica", lambda: replicas_of(bench, "modest"))
    bench.wait("its name", lambda: Path(f"/proc/{resident[0]}/comm").read_text() == "pollux:modest\n")
    assert process_table()[resident[0]].rss_bytes > limit["memory_bytes_per_gpu"]
    (bench.folder / "modest.seen").touch()
    assert bench.end("modest").outcome == "succeeded"
    bench.submit("greedy", "import time; hoard = b'x' * (120 << 20); time.sleep(600)", **limit)
    ended = bench.end("greedy")
    assert (ended.outcome, "limit of 80 MiB" in ended.detail) == ("out-of-memory", True)
    clean(bench)


def replicas_of(bench, job):
    record = read_record(run_folder(bench.home, job) / "generation-1.json") or {}
    return [pid for pid, _, _ in record.get("replicas", [])]
