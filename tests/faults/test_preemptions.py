"""Notices of every kind, again and again, with random graces, disks and sizes of state: no work is done twice.

`POLLUX_FAULT_EVENTS` sets the number of notices over all backends, `POLLUX_FAULT_SEED` the seed. A job writes down each
step as it begins it. Where the grace is long enough for a checkpoint, however slow the disk, the next generation begins
with the step after the last; where it is not, it may repeat some, and the result is right all the same. Slurm's own
ways to take a node back, with real daemons, are in `tests/integration/slurm/test_taken_back.py`.
"""

import os
import random
import signal
from dataclasses import dataclass

import pytest
from tests.support.fleet_run import FleetNodes

from pollux.backends.local import LocalBackend
from pollux.testing.conformance.backends import Bench

EVENTS = int(os.environ.get("POLLUX_FAULT_EVENTS", "20"))
SEED = int(os.environ.get("POLLUX_FAULT_SEED", "20217"))
SAMPLES, BATCH, EPOCHS = 24, 4, 20
STEPS = SAMPLES // BATCH * EPOCHS
KINDS = ("stop", "stop twice", "SIGTERM", "SIGTERM to all", "no grace")
LONG_GRACE_SECONDS = 240.0
# So that the end of a job's run never waits for a checkpoint that a slow disk delays.
SLOWEST_DISK_SECONDS = 0.2

JOB = """
    import os, time
    from pathlib import Path
    import torch
    import torch.nn.functional as F
    import pollux
    folder, delay, size = Path(os.environ["JOB_FOLDER"]), float(os.environ["DISK"]), int(os.environ["SIZE"])
    flush = os.fsync
    def slow(number):
        time.sleep(delay)
        flush(number)
    os.fsync = slow
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1).double()
    model.register_buffer("ballast", torch.zeros(size, dtype=torch.uint8))
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES, dtype=torch.float64)[:, None] / SAMPLES)
    job = pollux.init(model, torch.optim.SGD(model.parameters(), 0.1), data, BATCH, checkpoint_dir=folder / "saved")
    def say(text):
        if job.is_first:
            with open(folder / "steps", "a") as file:
                file.write(text + "\\n")
    (folder / f"replica-{os.environ['TURN']}-{os.environ['RANK']}").write_text(str(os.getpid()))
    for epoch in job.epochs(EPOCHS):
        for (x,) in job.batches():
            say(f"{job.step + 1}")
            job.backward(F.mse_loss(job.model(x), 2.0 * x))
            time.sleep(0.02)
    say("weights " + " ".join(f"{each.item():.12f}" for each in model.parameters()))
"""
JOB = JOB.replace("SAMPLES", str(SAMPLES)).replace("BATCH", str(BATCH)).replace("EPOCHS", str(EPOCHS))


@dataclass
class Life:
    """One job over its generations."""

    bench: Bench
    name: str
    chance: random.Random
    generation: int = 0
    num_before: int = 0
    may_repeat: bool = False

    def __post_init__(self):
        self.folder = self.bench.folder / self.name
        self.folder.mkdir()

    def steps(self):
        path = self.folder / "steps"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [int(line) for line in lines if line.isdigit()]

    def begin(self, kind):
        """Start the generation after such a notice, with another disk and size; True once it has gone on."""
        self.generation += 1
        self.num_before, self.may_repeat = len(self.steps()), kind == "no grace"
        env = {
            "JOB_FOLDER": str(self.folder),
            "DISK": f"{self.chance.choice((0.0, 0.0, SLOWEST_DISK_SECONDS * self.chance.random())):.3f}",
            "SIZE": str(self.size),
            "TURN": str(self.generation),
        }
        wanted = self.chance.randint(1, 12)
        self.bench.submit(self.name, JOB, self.generation, gpus=self.chance.randint(1, 2), env=env)
        self.bench.wait(
            f"{wanted} steps of {self.name}",
            lambda: len(self.steps()) >= self.num_before + wanted or self.bench.ends(self.name, self.generation),
        )
        assert not self.is_over or self.outcome == "succeeded", self.bench.log(self.name)
        return not self.is_over

    @property
    def size(self):
        return random.Random(self.name).choice((1, 100_000, 8_000_000))

    @property
    def is_over(self):
        return bool(self.bench.ends(self.name, self.generation))

    @property
    def outcome(self):
        return self.bench.end(self.name, self.generation).outcome

    def replicas(self):
        return [int(path.read_text() or 0) for path in self.folder.glob(f"replica-{self.generation}-*")]

    def notice(self, kind):
        backend = self.bench.backend
        grace = 0.0 if kind == "no grace" else LONG_GRACE_SECONDS
        if kind.startswith("SIGTERM"):
            for pid in self.replicas()[: None if kind.endswith("all") else 1]:
                os.kill(pid, signal.SIGTERM)
        else:
            backend.stop(self.name, self.generation, grace)
            if kind == "stop twice":
                backend.stop(self.name, self.generation, grace)

    def check(self):
        """This generation went on with the next step; after a kill, with the next one of the last checkpoint."""
        found = self.steps()
        before, steps = found[: self.num_before], found[self.num_before :]
        due = before[-1] + 1 if before else 1
        if steps:
            assert steps == [*range(steps[0], steps[0] + len(steps))], f"{self.name}: {found}"
            assert steps[0] == due or (self.may_repeat and 1 <= steps[0] < due), f"{self.name}, {due} was due: {found}"

    def check_end(self, weights):
        assert self.outcome == "succeeded", self.bench.log(self.name)
        assert sorted(set(self.steps())) == [*range(1, STEPS + 1)]
        text = (self.folder / "steps").read_text().split("weights ")[1].split()
        assert [float(number) for number in text] == pytest.approx(weights, abs=1e-9)


def trained_once():
    """The weights after plain training."""
    import torch
    import torch.nn.functional as F

    from pollux.agent.data.permutation import pass_order

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.arange(SAMPLES, dtype=torch.float64)[:, None] / SAMPLES
    for epoch in range(EPOCHS):
        for rows in pass_order(SAMPLES, 0, epoch).split(BATCH):
            optimizer.zero_grad()
            F.mse_loss(model(data[rows]), 2.0 * data[rows]).backward()
            optimizer.step()
    return [each.item() for each in model.parameters()]


def endure(bench: Bench, chance: random.Random, events: int, name: str) -> None:
    """Give that many notices to one job after the other; each job is then let finish."""
    weights, given, jobs = trained_once(), 0, 0
    while given < events:
        life, kind = Life(bench, f"{name}-{jobs}", chance), ""
        jobs += 1
        while life.begin(kind):
            life.check()
            if given == events:
                break
            kind = chance.choice(KINDS)
            life.notice(kind)
            given += 1
            if life.outcome == "succeeded":
                break
            # Nobody told the backend of a signal that came from elsewhere: it is a crash to it, but all was saved.
            assert life.outcome == "stopped" or not kind.startswith("stop"), (kind, bench.log(life.name))
        life.check()
        life.check_end(weights)
        bench.backend.forget(life.name)


@pytest.fixture(params=["local", "fleet"])
def bench(request, tmp_path):
    nodes = None
    if request.param == "local":
        made = Bench(tmp_path, lambda home: LocalBackend(home, slots=2))
        made.wait("warm backend", lambda: made.backend.is_warm)
    else:
        nodes = FleetNodes(tmp_path / "hosts", num_nodes=1)
        nodes.start()
        made = Bench(tmp_path, lambda home: nodes.backend(home, lease_seconds=300.0))
    made.kind = request.param
    yield made
    for each in made.backend.running():
        made.backend.stop(each.job_id, each.generation, 0.0)
        made.backend.forget(each.job_id)
    made.wait("empty backend", lambda: not made.backend.running())
    made.backend.close()
    if nodes is not None:
        nodes.hosts.kill_all()


def test_no_work_is_done_twice_whatever_the_notice(bench):
    chance = random.Random(f"{SEED} {bench.kind}")
    endure(bench, chance, max(EVENTS // 2, 1), bench.kind)
