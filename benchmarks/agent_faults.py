"""Training jobs that are stopped, killed and resumed at random, at changing numbers of replicas; what that cost them.

    python benchmarks/agent_faults.py [--quick] [--seed N]

Every replica writes down which samples it took in each step and its part of the loss. Afterwards the steps that count
(those up to the checkpoint that the next run went on from) are put together: every sample of a pass must be there
exactly once, and every loss must be that of a run that nothing happened to.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import pollux
from pollux.agent.data.ledger import SampleLedger
from pollux.testing.jobs.replica_server import ReplicaServer, RunningReplicas

PASSES = 4
SHARDS = 2
STEP_SECONDS = 0.004
# A kill costs what was trained since the step of the newest checkpoint that was whole: the period until the next one
# is due, the time until replicas have agreed on its step, and the time in which it was being written. Writing is up to
# the disk, so it is measured in the run itself (also that of the save which the kill cut off) and taken off; what is
# left is judged. To agree, the first replica looks at its clock and the others for requests every 0.2 s, and then they
# need two more boundaries; one step is as long as the longest that the run had.
CHECKPOINT_EVERY = 0.15
AGREEMENT_SECONDS = 0.4
AGREEMENT_STEPS = 3
KINDS = ("map", "sampler", "stream", "seekable")


@dataclass(frozen=True, slots=True)
class Plan:
    """One job: what its data is like; `size` samples in batches of `batch`."""

    kind: str
    size: int
    batch: int
    accumulation: int
    seed: int


class Table(torch.utils.data.Dataset[Any]):
    """Samples that know their number."""

    def __init__(self, plan: Plan) -> None:
        generator = torch.Generator().manual_seed(plan.seed)
        self.inputs = torch.randn(plan.size, 4, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(0, 3, (plan.size,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return index, self.inputs[index], self.labels[index]


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same samples from an iterator, one worker's share after the other's."""

    def __init__(self, plan: Plan) -> None:
        self.table = Table(plan)

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for index in range(first, len(self.table), step):
            yield self.table[index]


class Seekable(torch.utils.data.IterableDataset[Any]):
    """The same, with a place that can be saved."""

    def __init__(self, plan: Plan) -> None:
        self.table = Table(plan)
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < len(self.table):
            self.place += 1
            yield self.table[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Skewed:
    """A sampler of one's own: another order each pass, a few samples twice."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(drawn(self.size, self.epoch))


def drawn(size: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(1000 + epoch).shuffle(order)
    return order + order[:3]


def expected_samples(plan: Plan, number: int) -> Counter[int]:
    """Which samples pass `number` must take, and how often."""
    return Counter(drawn(plan.size, number) if plan.kind == "sampler" else range(plan.size))


def data_of(plan: Plan, workers: int) -> tuple[Any, dict[str, Any]]:
    if plan.kind == "stream":
        return Stream(plan), {"num_shards": SHARDS, "num_workers": workers}
    if plan.kind == "seekable":
        return Seekable(plan), {}
    options: dict[str, Any] = {"num_workers": workers}
    return Table(plan), options | ({"sampler": Skewed(plan.size)} if plan.kind == "sampler" else {})


@dataclass(frozen=True, slots=True)
class Blow:
    """What happens to a run: a signal to one replica or to all, at a step and micro-step, or after some seconds."""

    number: int
    replica: int | None
    step: int | None = None
    micro: int = 0
    seconds: float = 0.0

    def hits(self, replica: int, step: int, micro: int) -> bool:
        return self.step == step and self.micro == micro and self.replica in (None, replica)


def train(plan: dict[str, Any], folder: str, log: str, workers: int, blow: dict[str, Any] | None, every: float) -> Any:
    """One replica of one run. The blow counts its steps from where this run begins."""
    torch.set_num_threads(1)
    # What the job gives back when it is closed: a signal after its end must not look like one in its course.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings = Plan(**plan)
    coming = Blow(**blow) if blow is not None else None
    torch.manual_seed(settings.seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data, options = data_of(settings, workers)
    job = pollux.init(
        model,
        optimizer,
        data,
        settings.batch,
        accumulation=settings.accumulation,
        seed=settings.seed,
        checkpoint_dir=folder,
        checkpoint_every=every,
        timeout=30.0,
        **options,
    )
    began = job.step
    file = open(Path(log) / f"replica-{job.replica}.jsonl", "w", buffering=1)  # noqa: SIM115
    file.write(json.dumps({"begin": began}) + "\n")
    for _ in job.epochs(PASSES):
        ids: list[int] = []
        part = 0.0
        for numbers, x, y in job.batches():
            micro = job._parts.engine._micro
            assert micro is not None
            loss = F.cross_entropy(job.model(x), y)
            if micro.samples:
                ids += numbers.tolist()
                part += float(loss.detach()) * micro.samples / micro.total
            if micro.is_last:
                checkpointer = job._parts.checkpointer
                assert checkpointer is not None
                # First whether it writes, then what it wrote: in this order a save is not taken for idle time.
                busy, saved = checkpointer.busy, checkpointer.last_saved
                entry = {
                    "step": job.step,
                    "replica": job.replica,
                    "busy": busy,
                    "pass": job._parts.loader.pass_index,
                    "ids": ids,
                    "loss": part,
                    "at": time.monotonic(),
                    "saved": -1 if saved is None else saved.manifest.step,
                }
                file.write(json.dumps(entry) + "\n")
                ids, part = [], 0.0
                time.sleep(STEP_SECONDS)
            if coming is not None and coming.hits(job.replica, job.step - began, micro.index):
                os.kill(os.getpid(), coming.number)
            job.backward(loss)
    result = {"step": job.step, "ledger": job.receipt.to_json()["ledger"]}
    job.close()
    return result


@dataclass(slots=True)
class Run:
    """What a run left in its logs: where it began, and its steps by replica."""

    begin: int
    steps: dict[int, list[dict[str, Any]]]
    ended_at: float

    def unwritten(self, since: int) -> tuple[float, float]:
        """How long, from that step on, nothing was being written by the first replica; and how long that may be."""
        writer = sorted(
            (entry for entries in self.steps.values() for entry in entries if entry["replica"] == 0),
            key=lambda entry: int(entry["step"]),
        )
        idle = [(b["at"] - a["at"], a["step"]) for a, b in itertools.pairwise(writer) if not (a["busy"] or b["busy"])]
        several = any(entry["replica"] for entries in self.steps.values() for entry in entries)
        longest = max((seconds for seconds, _ in idle), default=0.0)
        allowed = CHECKPOINT_EVERY + AGREEMENT_SECONDS * several + AGREEMENT_STEPS * longest
        return sum(seconds for seconds, step in idle if step >= since), allowed

    @classmethod
    def read(cls, log: Path, num_replicas: int, ended_at: float) -> Run | None:
        """None where not every replica came so far as to begin."""
        begins = set()
        steps: dict[int, list[dict[str, Any]]] = {}
        for replica in range(num_replicas):
            path = log / f"replica-{replica}.jsonl"
            # A replica that was killed may have left half a line.
            lines = path.read_text().split("\n")[:-1] if path.exists() else []
            if not lines:
                return None
            begins.add(json.loads(lines[0])["begin"])
            for line in lines[1:]:
                entry = json.loads(line)
                steps.setdefault(entry["step"], []).append(entry)
        if len(begins) != 1:
            raise AssertionError(f"replicas began at steps {begins}")
        return cls(begins.pop(), steps, ended_at)


@dataclass(slots=True)
class Tally:
    """What was found over all jobs; `problems` are sentences, empty where all went well."""

    resumes: int = 0
    stops: int = 0
    kills: int = 0
    lost: int = 0
    repeated: int = 0
    failures: int = 0
    longest_loss: float = 0.0
    longest_unwritten: float = 0.0
    problems: list[str] = field(default_factory=list)

    def fail(self, text: str) -> None:
        self.failures += 1
        self.problems.append(text)


def draw_plan(generator: random.Random) -> Plan:
    return Plan(
        kind=generator.choice(KINDS),
        size=generator.randrange(90, 160),
        batch=generator.randrange(5, 12),
        accumulation=generator.choice([0, 0, 1, 2]),
        seed=generator.randrange(1000),
    )


def draw_blow(generator: random.Random, num_replicas: int, accumulation: int, kills_only: bool) -> Blow:
    number = signal.SIGKILL if kills_only or generator.random() < 0.5 else signal.SIGTERM
    replica = None if generator.random() < 0.3 else generator.randrange(num_replicas)
    if generator.random() < 0.5:
        return Blow(number, replica, step=generator.randrange(20), micro=generator.randrange(accumulation + 1))
    return Blow(number, replica, seconds=generator.uniform(0.0, 0.5))


class History:
    """One job through all its runs until it is done, or its events are used up and it is left to end in peace."""

    def __init__(self, server: ReplicaServer, plan: Plan, generator: random.Random, tally: Tally, root: Path) -> None:
        self.plan = plan
        self._server = server
        self._generator = generator
        self._tally = tally
        self._root = root
        self._runs: list[Run] = []
        self._folder = root / "saved"

    def _start(self, folder: Path, num_replicas: int, workers: int, blow: Blow | None) -> tuple[RunningReplicas, Path]:
        log = self._root / f"log-{len(list(self._root.glob('log-*')))}"
        log.mkdir(parents=True)
        arguments = {
            "plan": asdict(self.plan),
            "folder": str(folder),
            "log": str(log),
            "workers": workers,
            "blow": None if blow is None else asdict(blow),
            "every": CHECKPOINT_EVERY,
        }
        return self._server.start(f"{__file__}:train", num_replicas, arguments), log

    def play(self, events: int, kills_only: bool) -> int:
        """Up to so many events; returns how many there were."""
        reference = self._reference()
        happened = 0
        ledger = None
        while ledger is None:
            num_replicas = self._generator.randint(1, 4)
            workers = self._generator.choice([0, 0, SHARDS]) if self.plan.kind != "seekable" else 0
            blow = None
            if happened < events:
                blow = draw_blow(self._generator, num_replicas, self.plan.accumulation, kills_only)
            ledger = self._run(num_replicas, workers, blow)
            happened += ledger is None
        self._check(reference, ledger)
        return happened

    def _run(self, num_replicas: int, workers: int, blow: Blow | None) -> list[dict[str, Any]] | None:
        """One run; the final ledger where the job was done in it."""
        running, log = self._start(self._folder, num_replicas, workers, blow)
        if blow is not None and blow.step is None:
            self._strike_later(running, log, num_replicas, blow)
        results = running.wait(90.0)
        codes = [result.exit_code for result in results]
        told = f"{self.plan} on {num_replicas} replicas, {workers} workers, {blow}: exit codes {codes}"
        run = Run.read(log, num_replicas, time.monotonic())
        self._judge_begin(run, told)
        if run is not None:
            self._runs.append(run)
        if all(code == 0 for code in codes):
            ledger: list[dict[str, Any]] = results[0].value["ledger"]
            return ledger
        self._judge_end(codes, blow, told + "\n" + "\n".join(result.output[-1500:] for result in results))
        return None

    def _strike_later(self, running: RunningReplicas, log: Path, num_replicas: int, blow: Blow) -> None:
        """Some seconds after the replicas have begun; kills of all of them also while they begin."""
        deadline = time.monotonic() + 60.0
        paths = [log / f"replica-{replica}.jsonl" for replica in range(num_replicas)]
        # A signal before `init` is the default one: the process ends, and there is nothing to save.
        everyone = blow.replica is None or num_replicas == 1
        early = blow.number == signal.SIGKILL and everyone and blow.seconds < 0.25
        while not early and not all(path.exists() for path in paths) and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(blow.seconds)
        running.signal(blow.number, blow.replica)

    def _judge_begin(self, run: Run | None, told: str) -> None:
        """A run must go on from a checkpoint that was reported, and that must not be older than its period allows."""
        if run is None or not self._runs:
            return
        self._tally.resumes += 1
        before = self._runs[-1]
        reported = max((entry["saved"] for entries in before.steps.values() for entry in entries), default=-1)
        if run.begin < max(reported, before.begin):
            self._tally.fail(f"resumed at step {run.begin}, step {reported} was saved: {told}")
        first_lost = before.steps.get(run.begin)
        if first_lost is not None:
            seconds = max(at["at"] for entries in before.steps.values() for at in entries) - first_lost[0]["at"]
            self._tally.longest_loss = max(self._tally.longest_loss, seconds)
            unwritten, allowed = before.unwritten(run.begin)
            self._tally.longest_unwritten = max(self._tally.longest_unwritten, unwritten)
            if unwritten > allowed:
                self._tally.fail(
                    f"{seconds:.2f} s of training were lost, {unwritten:.2f} s of them while no checkpoint was being "
                    f"written; {allowed:.2f} s are allowed: {told}"
                )

    def _judge_end(self, codes: list[int], blow: Blow | None, told: str) -> None:
        if blow is None:
            raise AssertionError(f"a run that nothing happened to failed: {told}")
        if blow.number == signal.SIGTERM:
            self._tally.stops += 1
            if codes != [143] * len(codes):
                self._tally.fail(f"a stop must end all replicas with 143: {told}")
            return
        self._tally.kills += 1
        struck = range(len(codes)) if blow.replica is None else [blow.replica]
        # One that is struck by the clock may have come to its end just before.
        ends = (-signal.SIGKILL, 1) if blow.step is not None else (-signal.SIGKILL, 1, 0)
        if any(codes[replica] not in ends for replica in struck):
            self._tally.fail(f"a killed replica went on: {told}")
        # The others find out by a closed connection; one that had to be killed after 90 s hung.
        if any(code == -signal.SIGKILL for replica, code in enumerate(codes) if replica not in struck):
            self._tally.fail(f"a replica hung after another was killed: {told}")

    def _reference(self) -> dict[int, float]:
        """The loss of every step where nothing happens, on one replica."""
        running, log = self._start(self._root / "undisturbed", 1, 0, None)
        (result,) = running.wait(90.0)
        if result.exit_code != 0:
            raise AssertionError(f"{self.plan}: {result.output}")
        run = Run.read(log, 1, 0.0)
        assert run is not None
        return {step: entries[0]["loss"] for step, entries in run.steps.items()}

    def _check(self, reference: dict[int, float], ledger: list[dict[str, Any]]) -> None:
        """Put the steps that count together and compare."""
        taken: dict[int, Counter[int]] = {number: Counter() for number in range(PASSES)}
        losses: dict[int, float] = {}
        ends = [run.begin for run in self._runs[1:]] + [10**9]
        for run, end in zip(self._runs, ends, strict=True):
            for step in range(run.begin, min(end, max(run.steps, default=-1) + 1)):
                entries = run.steps.get(step, [])
                losses[step] = sum(entry["loss"] for entry in entries)
                for entry in entries:
                    taken[entry["pass"]].update(entry["ids"])
        for number in range(PASSES):
            expected = expected_samples(self.plan, number)
            self._tally.lost += (expected - taken[number]).total()
            self._tally.repeated += (taken[number] - expected).total()
            if taken[number] != expected:
                self._tally.problems.append(f"{self.plan}: pass {number} took other samples than it has")
        if losses.keys() != reference.keys():
            self._tally.fail(f"{self.plan}: {len(losses)} steps instead of {len(reference)}")
        elif max(abs(losses[step] / reference[step] - 1.0) for step in losses) > 1e-12:
            self._tally.fail(f"{self.plan}: the losses are not those of a run that nothing happened to")
        self._check_ledger(ledger)

    def _check_ledger(self, ledger: list[dict[str, Any]]) -> None:
        expected = []
        for number in range(PASSES):
            sums = SampleLedger()
            sums.add(np.array(sorted(expected_samples(self.plan, number).elements()), dtype=np.int64))
            expected.append({"pass": number, "samples": sums.count, "hash": f"{sums.digest:#018x}"})
        if ledger != expected:
            self._tally.fail(f"{self.plan}: the ledger is {ledger}, {expected} was expected")


def campaign(server: ReplicaServer, seed: int, events: int, kills_only: bool = False) -> Tally:
    """Jobs one after the other until there were so many events."""
    generator = random.Random(seed)
    tally = Tally()
    left = events
    with tempfile.TemporaryDirectory(prefix="pollux-faults-") as folder:
        number = 0
        while left > 0:
            root = Path(folder) / str(number)
            root.mkdir()
            left -= History(server, draw_plan(generator), generator, tally, root).play(min(left, 12), kills_only)
            number += 1
    return tally


def measure(quick: bool, seed: int) -> dict[str, Any]:
    """Samples lost and repeated over stops, kills and resumes; and kills -9 alone, with what they cost."""
    with ReplicaServer([__file__]) as server:
        mixed = campaign(server, seed, 9 if quick else 200)
        kills = campaign(server, seed + 1, 6 if quick else 100, kills_only=True)
    for problem in [*mixed.problems, *kills.problems]:
        print(problem, file=sys.stderr)
    return {
        "samples_lost": mixed.lost + kills.lost,
        "samples_repeated": mixed.repeated + kills.repeated,
        "resume_events": mixed.stops + mixed.kills,
        "resumes": mixed.resumes + kills.resumes,
        "kills": kills.kills,
        "kill_resume_failures": mixed.failures + kills.failures,
        "kill_longest_loss_seconds": max(mixed.longest_loss, kills.longest_loss),
        "kill_longest_loss_unwritten_seconds": max(mixed.longest_unwritten, kills.longest_unwritten),
        "checkpoint_every_seconds": CHECKPOINT_EVERY,
        "problems": [problem[:500] for problem in (*mixed.problems, *kills.problems)],
        "seed": seed,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(options.quick, options.seed)))
