"""Replicas that change while they run, through the real shim and store: some keep to the protocol, some do not."""

import json
import os
import resource
import signal
import textwrap

import pytest

from pollux.backends.local import LocalBackend
from pollux.backends.process.records import read_record
from pollux.backends.protocol import ReplicasLost, ReplicasStarted
from pollux.testing.conformance.backends import Bench

# A replica without training: it follows plans as the agent does, and fails where its `mode` says so.
REPLICA = textwrap.dedent(
    """
    import datetime, os, pathlib, signal, sys, time
    import torch.distributed as dist
    from pollux.wire.live import exit_codes, keys
    from pollux.wire.live.codec import encode
    from pollux.wire.live.heartbeat import Activity, Heartbeat, PauseReport
    from pollux.wire.live.plan import GenerationPlan

    host, port = os.environ["POLLUX_STORE"].split(":")
    limit = datetime.timedelta(seconds=300)
    tcp = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
    store = dist.PrefixStore(keys.PREFIX, tcp)
    told = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    generation, rank = int(os.environ["POLLUX_GENERATION"]), int(os.environ["RANK"])
    joins, me, mode = os.environ.get("POLLUX_JOIN") == "1", os.environ["POLLUX_JOB"], sys.argv[1]

    def say(*words):
        print(os.getpid(), *words, flush=True)

    def read(key):
        return store.get(key).decode() if store.check([key]) else None

    def arrive():
        store.set(keys.here(generation, rank), "")
        if mode != "never-arrives":
            store.set(keys.done(generation, rank), encode(PauseReport(0.05, "grow")))

    ranks = {generation: rank}
    say("joins" if joins else "starts", generation, rank, "of", os.environ["WORLD_SIZE"])
    if joins:
        if mode == "joiner-dies":
            sys.exit(3)
        while mode == "joiner-waits" and not pathlib.Path(f"{me}.ready").exists():
            time.sleep(0.01)
        store.set(keys.ready(generation, rank), "")
        while int(read(keys.COMMITTED) or -1) < generation:
            if read(keys.withdrawn(generation)) is not None or told:
                os._exit(0)
            time.sleep(0.005)
        if mode == "joiner-dies-moving":
            os.kill(os.getpid(), signal.SIGKILL)
        arrive()
    step, beat = 0, 0.0
    while not pathlib.Path(f"{me}.finish").exists():
        time.sleep(0.005)
        step += 1
        if told:
            say("told to stop")
            sys.exit(exit_codes.STOPPED)
        if mode == "hangs" and rank == 1 and step == 200 and generation == 1:
            time.sleep(600)
        if time.time() - beat > 0.2:
            beat = time.time()
            store.set(keys.beat(generation, rank), Heartbeat(step, beat, Activity.TRAINING).encode())
        newest = int(read(keys.COMMITTED) or -1)
        if newest <= generation:
            continue
        plan = GenerationPlan.decode(read(keys.plan(newest)))
        if plan.before not in ranks:
            continue
        mine = plan.rank_of(ranks[plan.before])
        if mine is None:
            say("leaves")
            os._exit(0)
        if mode == "through-instead":
            break
        if mode == "refuses":
            generation = newest
            store.set(keys.failed(newest), "the state of 'tokenizer' cannot travel")
            continue
        if mode == "dies-moving" and rank == 0 and newest == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        generation, rank = newest, mine
        ranks[generation] = rank
        say("goes to", generation, rank, "of", plan.num_replicas, plan.why)
        arrive()
    say("finished", generation, rank)
    """
)


# Where the limit itself is tested. Elsewhere it is one that no busy machine reaches.
HASTY_SECONDS = 4.0


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    yield from bench_at(tmp_path_factory.mktemp("live"), 60.0)


@pytest.fixture(scope="module")
def hasty(tmp_path_factory):
    """Gives up who is silent for seconds."""
    yield from bench_at(tmp_path_factory.mktemp("hasty"), HASTY_SECONDS)


def bench_at(folder, hang_seconds):
    made = Bench(folder, lambda home: LocalBackend(home, slots=4, hang_seconds=hang_seconds))
    made.wait("warm backend", lambda: isinstance(made.backend, LocalBackend) and made.backend.is_warm)
    yield made
    for running in made.backend.running():
        made.backend.stop(running.job_id, running.generation, 0.0)
    made.wait("all ends", lambda: all(each.state == "ended" for each in made.backend.running()))
    made.backend.close()


class Job:
    """One job of the bench, whose places are free again after a test."""

    def __init__(self, bench, name, mode=""):
        self.bench, self.name, self.mode = bench, name, mode

    def launch(self, generation, gpus):
        env = {"POLLUX_JOB": self.name, "POLLUX_GENERATION": str(generation)}
        given = {"arguments": (self.mode,), "env": env, "live": True}
        return self.bench.launch(self.name, REPLICA, generation, gpus, **given)

    def start(self, gpus):
        self.bench.backend.submit(self.launch(1, gpus))
        self.started(1)
        for number in range(gpus):
            self.said(number, "starts 1")
        return self

    def resize(self, generation, gpus):
        self.bench.backend.resize(self.launch(generation, gpus))

    def told(self, kind, generation):
        told = [event for event in self.bench.told if isinstance(event, kind)]
        return [event for event in told if (event.job_id, event.generation) == (self.name, generation)]

    def started(self, generation):
        self.bench.wait(f"start of {generation}", lambda: self.told(ReplicasStarted, generation))

    def lost(self, generation):
        return self.bench.wait(f"loss in {generation}", lambda: self.told(ReplicasLost, generation))[0]

    def said(self, number, words):
        self.bench.wait(f"'{words}' of {number}", lambda: words in self.bench.log(self.name, number))

    def lines(self, number):
        """What it said itself, each with its process number: PyTorch may have remarks on the machine's names."""
        return [line.split() for line in self.bench.log(self.name, number).splitlines() if line[:1].isdigit()]

    def pids(self, number):
        return [int(line[0]) for line in self.lines(number)]

    def finish(self, generation):
        (self.bench.folder / f"{self.name}.finish").touch()
        ended = self.bench.end(self.name, generation)
        assert (ended.outcome, {each.code for each in ended.exits}) == ("succeeded", {0}), ended
        return ended

    def words(self, number):
        return [" ".join(line[1:]) for line in self.lines(number)]


def test_replicas_grow_and_shrink_in_living_processes(bench):
    job = Job(bench, "grows").start(2)
    for generation, gpus in ((2, 4), (3, 3), (4, 1), (5, 3)):
        job.resize(generation, gpus)
        job.started(generation)
    assert len(job.finish(5).exits) == 3
    assert len(set(job.pids(0))) == 1
    assert job.words(0)[1:5] == [
        "goes to 2 0 of 4 resize",
        "goes to 3 0 of 3 resize",
        "goes to 4 0 of 1 resize",
        "goes to 5 0 of 3 resize",
    ]
    assert job.words(3) == ["joins 2 3 of 4", "leaves"]
    assert bench.running("grows").state == "ended"


def test_an_order_is_taken_once(bench):
    job = Job(bench, "once").start(1)
    job.resize(2, 2)
    job.resize(2, 3)
    job.started(2)
    job.resize(2, 4)
    job.resize(1, 4)
    assert len(job.finish(2).exits) == 2


def test_orders_in_quick_succession_are_followed_one_after_another(bench):
    job = Job(bench, "quick").start(1)
    job.resize(2, 2)
    job.bench.wait("the order to be under way", lambda: "joins 2" in bench.log("quick", 1))
    job.resize(3, 3)
    job.started(3)
    assert len(job.finish(3).exits) == 3
    assert len(set(job.pids(0))) == 1


def test_a_joiner_that_dies_while_it_prepares_pauses_nobody(bench):
    job = Job(bench, "stillborn", "joiner-dies").start(2)
    job.resize(2, 3)
    lost = job.lost(2)
    assert (lost.replicas, lost.remaining.num_gpus) == ((2,), 2)
    assert "exit code 3" in lost.detail
    assert not any("goes to" in words for words in job.words(0))
    job.resize(3, 2)
    job.started(3)
    job.finish(3)
    assert len(set(job.pids(0))) == len(set(job.pids(1))) == 1


@pytest.mark.parametrize("mode", ["joiner-dies-moving", "dies-moving"])
def test_a_replica_that_dies_while_they_move_is_left_behind(bench, mode):
    job = Job(bench, mode, mode).start(2)
    job.resize(2, 3)
    lost = job.lost(2)
    survivors = 2 if mode == "joiner-dies-moving" else 1
    assert lost.remaining.num_gpus == survivors
    job.resize(3, survivors)
    job.started(3)
    assert len(job.finish(3).exits) == survivors
    assert f"goes to 3 0 of {survivors} lost" in job.words(1 if survivors == 1 else 0)


def test_survivors_of_a_killed_replica_go_on_where_they_are_told(bench):
    job = Job(bench, "killed").start(2)
    job.resize(2, 3)
    job.started(2)
    os.kill(job.pids(0)[0], signal.SIGKILL)
    lost = job.lost(2)
    assert (lost.replicas, lost.remaining.num_gpus) == ((0,), 2)
    assert "signal 9" in lost.detail
    job.resize(3, 2)
    job.started(3)
    job.resize(4, 3)
    job.started(4)
    assert len(job.finish(4).exits) == 3
    assert "goes to 3 0 of 2 lost" in job.words(1)
    assert "joins 4 2 of 3" in job.words(2)


def test_a_hung_replica_is_ended_and_counts_as_lost(hasty):
    job = Job(hasty, "hung", "hangs").start(2)
    lost = job.lost(1)
    assert lost.replicas == (1,)
    assert f"no heartbeat for {HASTY_SECONDS:g} s" in lost.detail
    job.resize(2, 1)
    job.started(2)
    job.finish(2)


def test_records_that_cannot_be_written_end_no_job(bench):
    job = Job(bench, "full").start(2)
    folder = bench.home / "run" / "full"
    shim = read_record(folder / "shim.json")["pid"]
    before = resource.prlimit(shim, resource.RLIMIT_FSIZE)
    resource.prlimit(shim, resource.RLIMIT_FSIZE, (0, before[1]))
    job.resize(2, 3)
    lost = job.lost(2)
    assert (lost.replicas, lost.remaining.num_gpus, lost.withdrawn) == ((2,), 2, True)
    assert "could not be started: cannot write" in lost.detail
    # What nobody joins needs no record at once.
    job.resize(3, 2)
    job.started(3)
    assert not (folder / "generation-3.json").exists()
    resource.prlimit(shim, resource.RLIMIT_FSIZE, before)
    bench.wait("record of 3", (folder / "generation-3.json").exists)
    job.resize(4, 3)
    job.started(4)
    assert len(job.finish(4).exits) == 3
    assert len(set(job.pids(0))) == 1


def test_without_an_answer_after_a_loss_the_generation_ends(hasty):
    job = Job(hasty, "orphaned").start(1)
    job.resize(2, 2)
    job.started(2)
    os.kill(job.pids(1)[0], signal.SIGKILL)
    ended = hasty.end("orphaned", 2)
    assert ended.outcome == "lost"
    assert "the service did not say" in ended.detail
    assert "told to stop" in job.words(0)


def test_a_job_that_cannot_move_ends_with_the_reason(bench):
    job = Job(bench, "refuses", "refuses").start(2)
    job.resize(2, 1)
    ended = bench.end("refuses", 2)
    assert ended.outcome == "lost"
    assert "'tokenizer' cannot travel" in ended.detail
    assert "told to stop" in job.words(0)


def test_without_an_agent_an_order_ends_in_a_restart(hasty):
    text = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
        print("up", flush=True)
        time.sleep(600)
    """
    hasty.submit("mute", text, live=True)
    hasty.wait("start", lambda: hasty.log("mute") == "up\n")
    hasty.backend.resize(hasty.launch("mute", text, 2, 2, live=True))
    ended = hasty.end("mute", 2)
    assert ended.outcome == "lost"
    assert "no agent" in ended.detail


def test_one_replica_that_is_killed_has_crashed(bench):
    job = Job(bench, "single").start(1)
    os.kill(job.pids(0)[0], signal.SIGKILL)
    assert bench.end("single").outcome == "crashed"


def test_a_stop_overtakes_a_change(bench):
    job = Job(bench, "overtaken", "joiner-waits").start(1)
    job.resize(2, 2)
    job.said(1, "joins 2")
    bench.backend.stop("overtaken", 2, 20.0)
    assert bench.end("overtaken", 2).outcome == "stopped"


def test_a_job_may_be_through_while_others_prepare_to_join(bench):
    job = Job(bench, "through", "joiner-waits").start(1)
    job.resize(2, 2)
    job.said(1, "joins 2")
    assert len(job.finish(2).exits) == 1


def test_a_job_may_be_through_when_it_is_told_to_move(bench):
    job = Job(bench, "instead", "through-instead").start(1)
    job.resize(2, 2)
    ended = bench.end("instead", 2)
    assert (ended.outcome, len(ended.exits)) == ("succeeded", 1)
    assert job.words(1) == ["joins 2 1 of 2"]


def test_a_new_service_finds_a_change_under_way_and_learns_its_end(tmp_path):
    bench = Bench(tmp_path, lambda home: LocalBackend(home, slots=4, warm=False))
    job = Job(bench, "between", "joiner-waits").start(1)
    job.resize(2, 3)
    job.said(1, "joins 2")
    bench.restart()
    found = bench.running("between")
    assert found is not None
    assert (found.generation, found.state) == (2, "waiting")
    (bench.folder / "between.ready").touch()
    job.started(2)
    job.resize(3, 2)
    job.started(3)
    assert len(job.finish(3).exits) == 2
    record = json.loads((bench.home / "run" / "between" / "generation-3.json").read_text())
    assert len(record["places"]) == 2
    bench.backend.close()


def test_what_was_not_launched_live_starts_anew(bench):
    text = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
        print(os.environ["WORLD_SIZE"], flush=True)
        time.sleep(600)
    """
    bench.submit("plain", text)
    bench.wait("start", lambda: bench.log("plain") == "1\n")
    bench.backend.resize(bench.launch("plain", text, 2, 2, live=True))
    bench.wait("second start", lambda: bench.log("plain") == "1\n2\n")
    bench.backend.stop("plain", 2, 20.0)
    assert bench.end("plain", 2).outcome == "stopped"
