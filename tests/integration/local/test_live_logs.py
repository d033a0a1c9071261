"""Logs of a job that changes while it runs: each is that of a rank, whichever process has it."""

import os
import signal
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from pollux.backends.dispatch.slots import LocalSlotAllocator
from pollux.backends.local import LocalBackend
from pollux.backends.process.launcher import ReplicaProcess
from pollux.backends.process.log_file import read_log
from pollux.backends.protocol import ReplicasLost, ReplicasStarted
from pollux.backends.shim.generation import Generation
from pollux.testing.conformance.backends import Bench
from pollux.wire.live.messages import LaunchOrder


def ordered(folder, generation, *places):
    replicas: tuple[dict[str, str], ...] = tuple({} for _ in places)
    return LaunchOrder("job", generation, ("true",), "/", {}, replicas, tuple((0,) for _ in places), places, "r", False,
                       1.0, 0.0, str(folder), 64 << 10, True, gpus=dict.fromkeys(places, 0))  # fmt: skip


class Pipes:
    """A launcher without processes: `write` is what a process would do, by the place it is at."""

    session = ""

    def __init__(self):
        self._ends: dict[str, int] = {}

    def start(self, start, place, memory_bytes, sink):
        reading, self._ends[place] = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        return ReplicaProcess(100 + len(self._ends), 1, reading)

    def write(self, place, text):
        os.write(self._ends[place], text.encode())

    def end(self, place):
        os.close(self._ends.pop(place))

    def sweep(self, process):
        pass


@pytest.fixture
def pair(tmp_path):
    """A generation of two living replicas, at places 0 and 1."""
    launcher: Any = Pipes()
    store: Any = SimpleNamespace(port=1, address="127.0.0.1:1", variable="127.0.0.1:1 secret")
    made = Generation(ordered(tmp_path, 1, "0", "1"), tmp_path, launcher, lambda: None, store)
    made.start()
    yield made
    made.logs.drain(made.replicas.everyone)
    for place in [*launcher._ends]:
        launcher.end(place)


def read(generation):
    for member in generation.outputs:
        generation.logs.read(member)


def logs(generation):
    return {path.name: path.read_text() for path in sorted(generation.folder.glob("*.log"))}


def test_those_that_come_in_place_of_others_go_on_with_their_logs(pair):
    launcher, (first, second) = pair.launcher, pair.members
    for place in "01":
        launcher.write(place, f"at {place}\n")
    read(pair)
    change = pair.take_order(ordered(pair.folder, 2, "2", "3"), {0: 0, 1: 1})
    assert change.joiners == {0: 2, 1: 3}
    for rank, number in change.joiners.items():
        pair.join(rank, number)
    for place in "0123":
        launcher.write(place, f"{place} meanwhile\n")
    read(pair)
    launcher.write("0", "last words\n")
    launcher.end("0")
    for member in (first, second):
        member.code = 0
    pair.adopt_ranks({2: 0, 3: 1})
    for place in "123":
        launcher.write(place, f"then {place}\n")
    read(pair)
    assert [member.log.tail for member in pair.members] == [b"2 meanwhile\nthen 2\n", b"3 meanwhile\nthen 3\n"]
    assert {name: set(text.splitlines()) for name, text in logs(pair).items()} == {
        "0.log": {"at 0", "0 meanwhile", "2 meanwhile", "last words", "then 2"},
        "1.log": {"at 1", "1 meanwhile", "3 meanwhile", "then 1", "then 3"},
    }


def test_who_takes_a_rank_that_another_had_writes_there_from_then_on(pair):
    launcher, (first, second) = pair.launcher, pair.members
    launcher.write("0", "first\n")
    read(pair)
    first.code = -9
    pair.dismiss(first)
    pair.take_order(ordered(pair.folder, 2, "1"), {1: 0})
    launcher.write("1", "second, before\n")
    pair.adopt_ranks({1: 0})
    launcher.write("1", "second, after\n")
    read(pair)
    assert logs(pair) == {"0.log": "first\nsecond, after\n", "1.log": "second, before\n"}
    assert second.log.tail == b"second, before\nsecond, after\n"
    # The number that is free goes to who joins, and the log of its rank is that of another.
    launcher.end("0")
    read(pair)
    change = pair.take_order(ordered(pair.folder, 3, "1", "0"), {1: 0})
    assert change.joiners == {1: 0}
    pair.join(1, 0)
    launcher.write("0", "third\n")
    read(pair)
    assert logs(pair)["1.log"] == "second, before\nthird\n"


def test_a_log_that_two_write_to_stays_within_its_cap(pair):
    change = pair.take_order(ordered(pair.folder, 2, "2", "3"), {0: 0, 1: 1})
    for rank, number in change.joiners.items():
        pair.join(rank, number)
    for _ in range(100):
        for place in "0123":
            pair.launcher.write(place, "x" * 4095 + "\n")
        read(pair)
    kept = sum(path.stat().st_size for path in pair.folder.glob("0.log*"))
    assert 32 << 10 < kept < 80 << 10
    # The offset counts what was dropped, too.
    assert read_log(pair.folder / "0.log", -1).offset >= 200 * 4096


SCRIPT = """
    import os, time
    import torch
    import pollux

    torch.set_num_threads(1)
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(24, 6), torch.randn(24, 4))
    job = pollux.init(model, optimizer, data, 8, checkpoint_dir="checkpoints")
    for _ in job.epochs(100_000):
        for x, y in job.batches():
            job.backward(torch.nn.functional.mse_loss(job.model(x), y))
            time.sleep(0.02)
        print(os.getpid(), job.is_first, flush=True)
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Whatever a job has, a change that keeps its size gives it other places."""
    plain = LocalSlotAllocator.allocate

    def take(self, job, placement, kept, busy):
        return plain(self, job, placement, () if placement.num_gpus == 2 else kept, busy)

    monkeypatch.setattr(LocalSlotAllocator, "allocate", take)
    made = Bench(tmp_path, lambda home: LocalBackend(home, slots=4, hang_seconds=20.0))
    made.wait("warm backend", lambda: isinstance(made.backend, LocalBackend) and made.backend.is_warm)
    yield made
    made.backend.stop("job", 10, 0.0)
    made.wait("end", lambda: all(each.state == "ended" for each in made.backend.running()))
    made.backend.close()


def test_logs_follow_the_ranks_of_a_job_that_moves_and_loses_its_first_replica(bench):
    def launch(generation, gpus):
        env = {"POLLUX_JOB": "job", "POLLUX_GENERATION": str(generation)}
        return bench.launch("job", textwrap.dedent(SCRIPT), generation, gpus, env=env, live=True, grace_seconds=10.0)

    def told(kind, generation):
        return [event for event in bench.told if isinstance(event, kind) and event.generation == generation]

    def writer(rank, others=()):
        """Who writes that log now, and is none of the others."""

        def last():
            lines = bench.log("job", rank).rpartition("\n")[0].splitlines()
            pid, first = lines[-1].split() if lines else ("0", "")
            return (int(pid), first) if int(pid) not in (0, *others) else None

        return bench.wait(f"writer of {rank}", last)

    def resized(generation, gpus):
        bench.backend.resize(launch(generation, gpus))
        bench.wait(f"start of {generation}", lambda: told(ReplicasStarted, generation))

    bench.backend.submit(launch(1, 2))
    before = {writer(rank)[0] for rank in range(2)}
    resized(2, 2)
    (first, is_first), (second, is_second) = (writer(rank, before) for rank in range(2))
    assert (is_first, is_second, len({first, second} - before)) == ("True", "False", 2)
    os.kill(first, signal.SIGKILL)
    bench.wait("loss", lambda: told(ReplicasLost, 2))
    resized(3, 1)
    assert writer(0, {*before, first}) == (second, "True")
    assert [path.name for path in sorted((bench.home / "logs" / "job").glob("*.log"))] == ["0.log", "1.log"]
