"""What engines cost: a round over 1,000 nodes' worth of recorded inventory, and the start of a replica on a lent node.

    python benchmarks/engines.py [--quick] [--nodes N]

A round is all that an adapter does in the steady state: commands run (played by scripts that print what was recorded),
output read, nodes offered, pilots counted. The start is measured on a real Slurm cluster of this machine where its
daemons are installed: from the launch of a job whose host is up until its first training step, against a plain `srun`
step that imports PyTorch, in the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import finish

from pollux.backends._ray_lender import RayLender
from pollux.backends._ray_nodes import seen_nodes
from pollux.backends._slurm_calls import SlurmCalls
from pollux.backends._slurm_lender import SlurmLender
from pollux.backends._slurm_script import PilotOptions
from pollux.backends.protocol import Launch
from pollux.backends.slurm import SlurmBackend
from pollux.core import Placement


def recorded(folder: Path, nodes: int, changed: int) -> None:
    """What squeue and sinfo print for a pool of single-node pilots, `changed` of which are drained or ending."""
    squeue, sinfo = [], []
    for number in range(nodes):
        ending = number < changed
        left = "1:30" if ending and number % 2 else "23:59:59"
        squeue.append(f"77_{number}|RUNNING|{left}|1-00:00:00|node{number}|pilot|None")
        state = "draining" if ending and not number % 2 else "mixed"
        sinfo += [f"node{number}|{state}|gpu:a100:8(S:0-1)|10.0.0.1|64|none"] * 2
    (folder / "squeue.txt").write_text("\n".join(squeue) + "\n")
    (folder / "sinfo.txt").write_text("\n".join(sinfo) + "\n")


def announce(folder: Path, nodes: int) -> None:
    pilots = folder / "pool" / "pilots"
    facts = json.dumps({"gpu_type": "A100", "cpus": 64.0, "memory_bytes": 0.0})
    for number in range(nodes):
        host = {"node": f"node{number}", "address": "10.0.0.1", "port": 4000, "places": 8, "gpus": list(range(8))}
        (pilots / f"77_{number}.node{number}.facts").write_text(facts)
        (pilots / f"77_{number}.node{number}.json").write_text(json.dumps(host))


@contextmanager
def played_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """An environment whose Slurm commands print what was recorded."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for name, text in (
        ("squeue", "cat squeue.txt"),
        ("sinfo", "cat sinfo.txt"),
        ("scancel", ":"),
        ("sbatch", "echo 9"),
    ):
        path = bin_folder / name
        path.write_text(f"#!/bin/sh\ncd {folder}\n{text}\n")
        path.chmod(0o755)
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{bin_folder}:{before}"
    try:
        yield dict(os.environ)
    finally:
        os.environ["PATH"] = before


def slurm_rounds(nodes: int, repeats: int) -> dict[str, Any]:
    """Seconds of a round: the first one, steady ones, and one in which a twentieth of all nodes change."""
    with tempfile.TemporaryDirectory(prefix="pollux-engines-") as name:
        folder = Path(name)
        with played_slurm(folder) as environ:
            options = PilotOptions(nodes=str(nodes), gpus_per_node=8)
            lender = SlurmLender(folder / "pool", options, SlurmCalls(environ, 60.0))
            lender._folder.prepare(b"secret")
            announce(folder, nodes)
            recorded(folder, nodes, 0)
            first = timed(lender.turn)
            assert len(lender.hosts()) == nodes
            for job in range(nodes // 2):
                lender.ask(f"job-{job}", {f"node{job}": 8})
            began = time.process_time()
            steady = [timed(lender.turn) for _ in range(repeats)]
            cpu = (time.process_time() - began) / repeats
            recorded(folder, nodes, nodes // 20)
            changed = timed(lender.turn)
            assert len(lender.leaving()) == nodes // 20
    return {
        "slurm_first_round_seconds": round(first, 4),
        "slurm_round_seconds": round(statistics.median(steady), 4),
        "slurm_round_cpu_seconds": round(cpu, 4),
        "slurm_changed_round_seconds": round(changed, 4),
    }


def ray_rounds(nodes: int, repeats: int) -> dict[str, Any]:
    """Seconds of a round over what `ray.nodes()` returns: read, told to the lender, offered; then with fewer nodes."""
    rows = [
        {
            "NodeID": f"{number:06x}" * 9,
            "Alive": True,
            "NodeManagerAddress": f"10.0.{number // 256}.{number % 256}",
            "NodeManagerHostname": f"node{number}",
            "Resources": {"CPU": 64.0, "GPU": 8.0, "memory": 5e11, "accelerator_type:A100": 1.0},
            "Labels": {},
        }
        for number in range(nodes)
    ]
    with tempfile.TemporaryDirectory(prefix="pollux-engines-") as name:
        lender = RayLender(Path(name))

        def look(rows: list[dict[str, Any]]) -> None:
            seen = [node.described() for node in seen_nodes(rows, None, True)]
            lender._hear(json.loads(json.dumps({"kind": "nodes", "nodes": seen})))
            lender.hosts()

        first = timed(lambda: look(rows))
        for node in seen_nodes(rows, None, True):
            lender._hear({"kind": "host", "node": node.name, "address": [node.address, 4000], "gpus": list(range(8))})
        steady = [timed(lambda: look(rows)) for _ in range(repeats)]
        assert len(lender.hosts()) == nodes
        changed = timed(lambda: look(rows[nodes // 20 :]))
        assert len(lender.hosts()) == nodes - nodes // 20
    return {
        "ray_first_round_seconds": round(first, 4),
        "ray_round_seconds": round(statistics.median(steady), 4),
        "ray_changed_round_seconds": round(changed, 4),
    }


STEP = """
import os, sys, time
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
with open(sys.argv[1] + ".part", "w") as file:
    file.write(repr(time.time()))
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""


def slurm_starts(repeats: int) -> dict[str, Any]:
    """Seconds from a launch to the end of its first training step, on a node whose host is up; and of a plain step."""
    tool = load_tool()
    wrong = tool.missing()
    if wrong:
        print(f"slurm, start of a replica: not measured ({wrong})", flush=True)
        return {}
    with tempfile.TemporaryDirectory(prefix="pollux-engines-", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        cluster = tool.SlurmCluster(Path(name) / "lab", nodes=2, with_parent=True)
        before = dict(os.environ)
        os.environ.update(cluster.environ)
        try:
            cluster.start()
            # In turns: what else the machine does meets all of them alike.
            with lent(cluster, Path(name) / "warm", True) as warm, lent(cluster, Path(name) / "cold", False) as cold:
                times = [(plain(cluster), warm.first_step(turn), cold.first_step(turn)) for turn in range(repeats)]
        finally:
            cluster.stop()
            os.environ.clear()
            os.environ.update(before)
    plain_seconds, warm_seconds, cold_seconds = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "slurm_plain_step_seconds": round(plain_seconds, 3),
        "slurm_warm_start_seconds": round(warm_seconds, 3),
        "slurm_cold_start_seconds": round(cold_seconds, 3),
        "slurm_warm_start_ratio": round(warm_seconds / plain_seconds, 3),
        "slurm_cold_start_ratio": round(cold_seconds / plain_seconds, 3),
    }


def load_tool() -> Any:
    path = Path(__file__).resolve().parents[1] / "tools" / "slurm" / "cluster.py"
    specification = importlib.util.spec_from_file_location("slurm_cluster", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["slurm_cluster"] = module
    specification.loader.exec_module(module)
    return module


def plain(cluster: Any) -> float:
    """A step inside an allocation that is held, importing PyTorch in a fresh interpreter."""
    pilot = cluster.run("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%A").split()[0]
    words = ["srun", f"--jobid={pilot}", "--overlap", "-n1", sys.executable, "-c", "import torch"]
    return timed(lambda: cluster.run(*words, timeout=300.0))


class Lent:
    """A backend with one node whose host is up."""

    def __init__(self, backend: SlurmBackend, folder: Path) -> None:
        self._backend = backend
        self._folder = folder
        (folder / "step.py").write_text(STEP)
        backend.start(lambda event: None)
        self._until(backend.inventory)
        self._node = backend.inventory()[0].id

    def first_step(self, turn: int) -> float:
        """Seconds from a launch until its first step is done."""
        done = self._folder / f"done-{turn}"
        placement = Placement.of({self._node: 1})
        began = time.time()
        self._backend.submit(Launch(f"job-{turn}", 1, placement, ("python", "step.py", str(done)), str(self._folder)))
        self._until(done.exists)
        return float(done.read_text()) - began

    def _until(self, is_so: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 300.0
        while not is_so():
            if time.monotonic() > deadline:
                raise SystemExit(f"nothing came in 300 s: {self._backend.warnings()}")
            time.sleep(0.005)


@contextmanager
def lent(cluster: Any, folder: Path, warm: bool) -> Iterator[Lent]:
    folder.mkdir()
    backend = SlurmBackend(
        folder, gpus_per_node=4, slots=1, cpus_per_node=4, time_limit="60:00", poll_seconds=1.0, warm=warm,
        head="127.0.0.1", pool=folder / "pool",
    )  # fmt: skip
    try:
        yield Lent(backend, folder)
    finally:
        for each in backend.running():
            backend.stop(each.job_id, each.generation, 0.0)
            backend.forget(each.job_id)
        backend.close()


def timed(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and no real cluster")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0, help="unused: nothing here is drawn")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    figures: dict[str, Any] = {"nodes": arguments.nodes}
    repeats = 3 if arguments.quick else 10
    figures |= slurm_rounds(arguments.nodes, repeats) | ray_rounds(arguments.nodes, repeats)
    for engine in ("slurm", "ray"):
        first, steady, changed = (figures[f"{engine}_{kind}round_seconds"] for kind in ("first_", "", "changed_"))
        print(
            f"{engine}, {arguments.nodes} nodes: first round {first:.3f} s, steady {steady:.3f} s, "
            f"with changes {changed:.3f} s",
            flush=True,
        )
    if not arguments.quick:
        figures |= slurm_starts(arguments.repeats)
        print(json.dumps({name: value for name, value in figures.items() if "start" in name or "plain" in name}))
    finish("engines", figures, arguments.quick)


if __name__ == "__main__":
    main()
