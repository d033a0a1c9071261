"""What the kernel says of processes: memory that is shared, names, lack of memory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from pollux.backends.dispatch.slots import LocalSlotAllocator
from pollux.backends.process import proc
from pollux.backends.process.devices import Devices
from pollux.core import Node
from pollux.testing.waiting import PATIENCE_SECONDS

FORKS = """
import os, signal, sys
hoard = bytearray(96 << 20)
hoard[::4096] = b"x" * len(hoard[::4096])
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
sys.stdin.read()
os.kill(child, signal.SIGKILL)
"""


def test_pages_that_are_shared_count_by_their_part():
    with subprocess.Popen([sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        row = proc.process_table()[child]
        bytes_, shared = proc.memory_use(child)
        parent.stdin.close()
        parent.wait(PATIENCE_SECONDS)
    assert row.rss_bytes > 96 << 20
    assert bytes_ < row.rss_bytes - (40 << 20)
    assert 40 << 20 < shared <= bytes_


def test_a_process_that_is_gone_uses_nothing_that_is_known():
    assert proc.memory_use(2**22 + 1) is None


def test_a_name_for_ps():
    pid = os.fork()
    if pid == 0:
        proc.name_this("pollux:a-job-with-a-long-name")
        signal.pause()
        os._exit(0)
    try:
        seen = ""
        for _ in range(10_000):
            seen = Path(f"/proc/{pid}/comm").read_text().strip()
            if seen.startswith("pollux:"):
                break
            os.sched_yield()
        assert seen == "pollux:a-job-wi"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_lack_of_memory_is_counted_in_our_own_group_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(proc, "_control_group", lambda: str(tmp_path))
    machine = proc.oom_kills()
    (tmp_path / "memory.events").write_text(f"low 0\noom 3\noom_kill {machine + 7}\noom_group_kill 0\n")
    assert proc.oom_kills() == machine + 7


def test_a_session_whose_number_a_stranger_has_now_is_left_alone():
    """After a crash: the record has the numbers of replicas, and when they began."""
    ground = LocalSlotAllocator(Devices(Node("n", 2, "cpu"), (), (0, 1)), {})
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
        try:
            begun = proc.start_time(stranger.pid)
            record = {"boot": proc.boot_id(), "run_id": "a-run-of-nobody", "replicas": []}
            assert ground.ends_all({**record, "replicas": [[stranger.pid, begun - 1, ""]]})
            assert stranger.poll() is None
            assert not ground.ends_all({**record, "replicas": [[stranger.pid, begun, ""]]}), "it was there until now"
            assert stranger.wait(PATIENCE_SECONDS) == -signal.SIGKILL
        finally:
            stranger.kill()
