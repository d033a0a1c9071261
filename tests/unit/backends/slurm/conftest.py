"""Slurm without pilots, against one that is played."""

import json

import pytest

from pollux.backends.slurm.job_provider import SlurmJobProvider
from pollux.backends.slurm.job_requests import host_port
from pollux.backends.slurm.script import SlurmOptions
from pollux.core.errors import BackendFailed


class PlayedSlurm:
    """As much of Slurm as the provider without pilots uses."""

    def __init__(self):
        self.rows: dict[str, str] = {}
        self.states = {"node1": "idle", "node2": "mixed", "node3": "allocated", "node4": "drained"}
        self.scripts: list[str] = []
        self.cancelled: list[str] = []
        self.used: dict[str, int] = {}
        self.kept: list[tuple[str, list[str]]] = []
        self.failing = ""
        self.stiff = ""
        self.slow = False
        self.odd = ""

    def jobs(self, name):
        if self.failing:
            raise BackendFailed(self.failing)
        return "".join(f"{pilot}|{rest}\n" for pilot, rest in self.rows.items())

    def all_nodes(self, partition):
        if self.failing:
            raise BackendFailed(self.failing)
        used = {name: 4 * (state == "allocated") for name, state in self.states.items()} | self.used
        return self.odd + "".join(
            f"{name}|{state}|gpu:a100:4|10.0.0.{name[-1]}|64|gpu:a100:{used[name]}(IDX:0)|0/64/0/64|none\n"
            for name, state in self.states.items()
        )

    def limits(self):
        return "KillWait = 30 sec\n", ""

    def submit(self, script, count, exclude=()):
        self.scripts.append(script)
        (comment,) = [line.split("=", 1)[1] for line in script.splitlines() if line.startswith("#SBATCH --comment")]
        pilot = f"{len(self.scripts)}_0"
        self.rows[pilot] = f"PENDING|10:00|10:00||{comment.strip(chr(39))}|Priority"
        return str(len(self.scripts))

    def cancel(self, pilots):
        self.cancelled += pilots
        for pilot in pilots if not self.slow else ():
            self.rows[pilot] = "CANCELLED|0:00|10:00||(null)|None"

    def keep_only(self, pilot, nodes):
        if self.stiff:
            raise BackendFailed(self.stiff)
        self.kept.append((pilot, list(nodes)))
        state, left, limit, _, comment, reason = self.rows[pilot].split("|")
        self.rows[pilot] = "|".join((state, left, limit, ",".join(nodes), comment, reason))


class Bench:
    """A provider without pilots, and what it does in a round after some seconds."""

    def __init__(self, folder, slurm):
        self.now = 1000.0
        self.slurm = slurm
        self.folder = folder / "pool"
        self.changes = 0
        options = SlurmOptions(gpus_per_node=4, mode="job")
        self.lender = SlurmJobProvider(self.folder, options, self.slurm, lambda: self.now)
        self.lender.queue.folder.prepare(b"secret")
        self.lender.books._changed = self.changed

    def changed(self):
        self.changes += 1

    def turn(self, seconds=1.0):
        self.now += seconds
        self.lender.do_round()

    def grant(self, pilot, nodes, names, comment, told=None, found=None):
        self.slurm.rows[pilot] = f"RUNNING|1:00:00|1:00:00|{nodes}|{comment}|None"
        for name in names:
            port = host_port(str(self.folder), name)
            host = {"node": name, "address": f"10.0.0.{name[-1]}", "port": port, "places": 4, "gpus": [0, 1, 2, 3]}
            facts = {"gpu_type": "A100", "cpus": 8.0, "memory_bytes": 0.0}
            (self.folder / "pilots" / f"{pilot}.{name}.facts").write_text(json.dumps(facts | (found or {})))
            (self.folder / "pilots" / f"{pilot}.{name}.json").write_text(json.dumps(host | (told or {})))

    @property
    def nodes(self):
        return [hosted.node.id for hosted in self.lender.hosts()]


@pytest.fixture
def slurm():
    return PlayedSlurm()


@pytest.fixture
def bench(tmp_path, slurm):
    bench = Bench(tmp_path, slurm)
    bench.turn()
    return bench
