"""What engines cost: a round over 1,000 nodes' worth of recorded inventory, and the start of a replica on a lent node.

    python benchmarks/engines.py [--quick] [--nodes N] [--repeats N] [--only slurm|ray]

A round is all that an adapter does in the steady state with a job on every second node: commands run (played by scripts
that print what was recorded), what Ray's driver tells read, nodes offered, pilots and places counted, every job asked
after. What is asked of the engine meanwhile is counted: Slurm's commands, what Ray's driver is told, and its own calls
to Ray (which is played) with a tenth of all claims waiting.

The start is measured on a real Slurm and a real Ray cluster of this machine where they are installed, with a real
service: from the decision, by the service's own record of it, to the end of the first training step on a node whose
host is up. Beside it, in turns: a plain `srun` step that imports PyTorch, and a plain actor.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import finish

from pollux.backends._ray_driver import Driver
from pollux.backends._ray_lender import RayLender
from pollux.backends._ray_nodes import seen_nodes
from pollux.backends._slurm_calls import SlurmCalls
from pollux.backends._slurm_lender import SlurmLender
from pollux.backends._slurm_script import PilotOptions

MOST_SECONDS = 1.0
TOOLS = Path(__file__).resolve().parents[1] / "tools"


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
    """An environment whose Slurm commands print what was recorded, and note that they were run."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for name, text in (
        ("squeue", "cat squeue.txt"),
        ("sinfo", "cat sinfo.txt"),
        ("scancel", ":"),
        ("sbatch", "echo 9"),
    ):
        path = bin_folder / name
        path.write_text(f"#!/bin/sh\ncd {folder}\necho {name} >> commands.txt\n{text}\n")
        path.chmod(0o755)
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{bin_folder}:{before}"
    try:
        yield dict(os.environ)
    finally:
        os.environ["PATH"] = before


def jobs_of(nodes: list[str]) -> dict[str, dict[str, int]]:
    """A job with eight GPUs on every second node, every tenth of them on the node beside it as well."""
    wanted = {}
    for number in range(0, len(nodes) - 1, 2):
        places = {nodes[number]: 8}
        wanted[f"job-{number}"] = places if number % 20 else {**places, nodes[number + 1]: 8}
    return wanted


def ask_after(lender: Any, jobs: dict[str, dict[str, int]]) -> None:
    """What the service asks of its lender in a round: who holds what, who is refused, what there is."""
    for job in jobs:
        lender.held(job)
        lender.refusal(job)
    lender.hosts()
    lender.warnings()


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
            jobs = jobs_of([f"node{number}" for number in range(nodes)])
            for job, places in jobs.items():
                lender.ask(job, places)
            assert all(len(lender.held(job)) == len(places) for job, places in jobs.items())

            def turn() -> None:
                lender.turn()
                ask_after(lender, jobs)

            commands = folder / "commands.txt"
            commands.unlink()
            steady = [timed(turn) for _ in range(repeats)]
            run = len(commands.read_text().splitlines())
            recorded(folder, nodes, nodes // 20)
            changed = timed(turn)
            assert len(lender.leaving()) == nodes // 20
    return {
        "slurm_first_round_seconds": round(first, 4),
        "slurm_round_seconds": round(statistics.median(steady), 4),
        "slurm_changed_round_seconds": round(changed, 4),
        "slurm_commands_per_round": run / repeats,
    }


class PlayedLink:
    """In place of the driver: keeps what it is told."""

    is_connected, trouble = True, ""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def send(self, order: dict[str, Any]) -> None:
        """One line to the driver."""
        self.told.append(order)


def ray_rows(nodes: int) -> list[dict[str, Any]]:
    """What `ray.nodes()` returns."""
    return [
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


def ray_rounds(nodes: int, repeats: int) -> dict[str, Any]:
    """As for Slurm, over what `ray.nodes()` returns; every replica has its placement group."""
    rows = ray_rows(nodes)
    with tempfile.TemporaryDirectory(prefix="pollux-engines-") as name:
        lender, link = RayLender(Path(name)), PlayedLink()
        lender._link = link  # type: ignore[assignment]

        def look(rows: list[dict[str, Any]]) -> None:
            seen = [node.described() for node in seen_nodes(rows, None, True)]
            lender._hear(json.loads(json.dumps({"kind": "nodes", "nodes": seen})))
            lender.hosts()

        first = timed(lambda: look(rows))
        for node in seen_nodes(rows, None, True):
            lender._hear({"kind": "host", "node": node.name, "address": [node.address, 4000], "gpus": list(range(8))})
        jobs = jobs_of([hosted.node.id for hosted in lender.hosts()])
        for job, places in jobs.items():
            lender.ask(job, places)
        for order in [*link.told]:
            for number, claim in enumerate(order.get("claims", ())):
                lender._hear({"kind": "granted", "claim": claim, "gpu": str(number % 8)})
        assert all(len(lender.held(job)) == len(places) for job, places in jobs.items())

        def turn(rows: list[dict[str, Any]]) -> None:
            look(rows)
            ask_after(lender, jobs)

        link.told.clear()
        steady = [timed(lambda: turn(rows)) for _ in range(repeats)]
        orders = len(link.told)
        assert len(lender.hosts()) == nodes
        changed = timed(lambda: turn(rows[nodes // 20 :]))
        assert len(lender.hosts()) == nodes - nodes // 20
    return {
        "ray_first_round_seconds": round(first, 4),
        "ray_round_seconds": round(statistics.median(steady), 4),
        "ray_changed_round_seconds": round(changed, 4),
        "ray_orders_per_round": orders / repeats,
        **ray_calls(nodes, repeats, None),
        **ray_calls(nodes, repeats, 8),
    }


class CountedRay:
    """As much of Ray as its driver uses, with every call counted that would leave the process."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self.states: dict[str, str] = {}
        self.calls = 0
        self.util = types.SimpleNamespace(placement_group_table=self._table, remove_placement_group=self._counted)
        self.kill = self.wait = self._counted

    def modules(self) -> dict[str, Any]:
        """What the driver looks up by name."""
        strategies = {
            name: lambda *given, **named: None
            for name in ("NodeAffinitySchedulingStrategy", "PlacementGroupSchedulingStrategy")
        }
        return {
            "ray": types.ModuleType("ray"),
            "ray.util": types.ModuleType("ray.util"),
            "ray.util.scheduling_strategies": types.SimpleNamespace(**strategies),
            "ray.util.placement_group": types.SimpleNamespace(placement_group=self._group),
        }

    def nodes(self) -> list[dict[str, Any]]:
        self.calls += 1
        return self._rows

    def remote(self, what: Any) -> Any:
        """A class or function whose calls never answer."""
        future = types.SimpleNamespace(add_done_callback=lambda handle: None)
        called = types.SimpleNamespace(remote=lambda: self._counted() or types.SimpleNamespace(future=lambda: future))
        actor = types.SimpleNamespace(report=called, watch=called, part=called, future=lambda: future)
        return types.SimpleNamespace(
            options=lambda **options: types.SimpleNamespace(remote=lambda *given, **named: self._counted() or actor)
        )

    def _counted(self, *given: Any, **named: Any) -> None:
        self.calls += 1

    def _group(self, bundles: Any, name: str, lifetime: str, bundle_label_selector: Any) -> str:
        """Nine of ten are created at once."""
        self.calls += 1
        self.states[name] = "PENDING" if len(self.states) % 10 == 0 else "CREATED"
        return name

    def _table(self, group: str | None = None) -> dict[str, Any]:
        self.calls += 1
        if group is not None:
            return {"state": self.states[group]}
        return {name: {"name": name, "state": state} for name, state in self.states.items()}


def ray_calls(nodes: int, repeats: int, slots: int | None) -> dict[str, Any]:
    """Calls to Ray, and seconds, of a driver's look around with a claim on every node."""
    rows = ray_rows(nodes)
    ray, told = CountedRay(rows), []
    order = {"secret": "ab" * 32, "slots": slots, "with_gpus": True, "warm": True, "prefix": "pollux:s:"}
    before = {name: sys.modules.get(name) for name in ray.modules()}
    sys.modules.update(ray.modules())
    try:
        driver = Driver(ray, {**order, "claims": {}, "desired": None}, lambda kind, **more: told.append((kind, more)))
        driver.look_around()
        names = [node["name"] for node in told[0][1]["nodes"]]
        driver.obey({"do": "take", "claims": {f"pollux:s:j:{number}": name for number, name in enumerate(names)}})
        for claim, known in driver._groups.items():
            if slots is None and ray.states[claim] == "CREATED":
                driver._probed(["0"], None, claim, known.group)
            else:
                assert known.waits_since is not None
                known.waits_since -= 3600.0
        driver.look_around()
        assert [kind for kind, _ in told].count("granted") == nodes - math.ceil(nodes / 10)
        ray.calls = 0
        seconds = [timed(driver.look_around) for _ in range(repeats)]
    finally:
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})
    kind = "ray" if slots is None else "ray_slots"
    return {
        f"{kind}_calls_per_look": ray.calls / repeats,
        f"{kind}_look_seconds": round(statistics.median(seconds), 4),
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


class Served:
    """A real service with these words for `pollux up`, in a folder of its own, once it has a node."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        folder.mkdir(mode=0o700)
        self._folder = folder
        (folder / "step.py").write_text(STEP)
        self._pollux("up", "--detach", "--port", "0", *words)
        self._url = json.loads((folder / "service.json").read_text())["url"]
        self._token = (folder / "token").read_text().strip()
        self._until(lambda: self._call("/v1/status")["nodes"])

    def first_step(self, turn: int) -> float:
        """Seconds from the decision to start a job until its first step is done."""
        name, done = f"job-{turn}", self._folder / f"done-{turn}"
        run = [sys.executable, "step.py", str(done)]
        self._call("/v1/jobs", {"name": name, "run": run, "gpus": "1", "workdir": str(self._folder)})
        self._until(done.exists)
        self._until(lambda: self._call(f"/v1/jobs/{name}")["job"]["state"] == "succeeded")
        events = self._call(f"/v1/jobs/{name}")["events"]
        (decided,) = [event["at"] for event in events if event["kind"] == "placed"]
        return float(done.read_text()) - float(decided)

    def down(self) -> None:
        """End it."""
        self._pollux("down")

    def _pollux(self, *words: str) -> None:
        environ = {**os.environ, "POLLUX_HOME": str(self._folder), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pollux", *words]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise SystemExit(f"'pollux {words[0]}' failed: {done.stderr}")

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self._url + path, data, headers), timeout=60) as answer:
            return json.load(answer)

    def _until(self, is_so: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 300.0
        while not is_so():
            if time.monotonic() > deadline:
                log = self._folder / "service.log"
                raise SystemExit(f"nothing came in 300 s: {log.read_text()[-2000:] if log.exists() else ''}")
            time.sleep(0.02)


def in_turns(plain: Callable[[], float], folder: Path, words: list[str], cold: list[str], repeats: int) -> list[float]:
    """Medians of plain, warm and cold starts; in turns, so that what else the machine does meets all of them alike."""
    services: list[Served] = []
    try:
        services.append(Served(folder / "warm", words))
        services.append(Served(folder / "cold", [*words, *cold]))
        times = []
        for turn in range(repeats):
            times.append((plain(), *(service.first_step(turn) for service in services)))
            print("plain {:.2f} s, warm {:.2f} s, cold {:.2f} s".format(*times[-1]), flush=True)
    finally:
        for service in services:
            service.down()
    return [statistics.median(column) for column in zip(*times, strict=True)]


def starts(engine: str, plain_name: str, medians: list[float]) -> dict[str, float]:
    plain, warm, cold = medians
    return {
        f"{engine}_plain_{plain_name}_seconds": round(plain, 3),
        f"{engine}_warm_start_seconds": round(warm, 3),
        f"{engine}_cold_start_seconds": round(cold, 3),
        f"{engine}_warm_start_ratio": round(warm / plain, 3),
        f"{engine}_cold_start_ratio": round(cold / plain, 3),
    }


def slurm_starts(repeats: int) -> dict[str, Any]:
    """Seconds from decisions to first steps on a real Slurm cluster, and of a plain step."""
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
        given = {"gpus_per_node": 4, "cpus_per_node": 4, "time_limit": "60:00", "poll_seconds": 1, "head": "127.0.0.1"}
        words = ["--backend", "slurm", "--slots", "1"]
        words += [word for option, value in given.items() for word in ("--option", f"{option}={value}")]
        os.environ["HOME"] = name
        try:
            cluster.start()
            medians = in_turns(lambda: plain(cluster), Path(name), words, ["--option", "warm=no"], repeats)
        finally:
            cluster.stop()
            os.environ.clear()
            os.environ.update(before)
    return starts("slurm", "step", medians)


def load_tool() -> Any:
    specification = importlib.util.spec_from_file_location("slurm_cluster", TOOLS / "slurm" / "cluster.py")
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


def ray_starts(repeats: int) -> dict[str, Any]:
    """As for Slurm, on a real Ray cluster in a namespace of its own, beside plain actors with a GPU."""
    if importlib.util.find_spec("ray") is None:
        print("ray, start of a replica: not measured (Ray is not installed)", flush=True)
        return {}
    words = [str(TOOLS / "ray" / "inside.sh"), sys.executable, __file__, "--only", "ray", "--repeats", str(repeats)]
    with subprocess.Popen([*words, "--inside"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if not line.startswith("{"):
                print(line, end="", flush=True)
    if process.returncode:
        print(f"ray, start of a replica: not measured (exit code {process.returncode})", flush=True)
        return {}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def ray_starts_inside(repeats: int) -> dict[str, Any]:
    """The same, once there is a namespace."""
    words = [sys.executable, str(TOOLS / "ray" / "cluster.py"), "--nodes", "2"]
    with (
        tempfile.TemporaryDirectory(prefix="pollux-engines-", ignore_cleanup_errors=True) as name,
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cluster,
    ):
        source, sink = cluster.stdout, cluster.stdin
        assert source is not None
        assert sink is not None
        address = json.loads(source.readline())["address"]

        def ask(**order: Any) -> Any:
            sink.write(json.dumps(order) + "\n")
            sink.flush()
            return json.loads(source.readline())

        node = next(row["NodeID"] for row in ask(do="nodes") if row["Resources"].get("GPU"))
        given = ["--backend", "ray", "--address", address]
        cold = ["--option", "warm=no"]
        medians = in_turns(lambda: float(ask(do="actor", node=node)), Path(name), given, cold, repeats)
        sink.close()
    return starts("ray", "actor", medians)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and no real cluster")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7, help="starts of each kind")
    parser.add_argument("--only", choices=("slurm", "ray"), help="one engine; nothing is kept")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help="unused: nothing here is drawn")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.inside:
        print(json.dumps(ray_starts_inside(arguments.repeats)), flush=True)
        return
    figures: dict[str, Any] = {"nodes": arguments.nodes}
    repeats = 3 if arguments.quick else 10
    engines = (arguments.only,) if arguments.only else ("slurm", "ray")
    for engine in engines:
        figures |= (slurm_rounds if engine == "slurm" else ray_rounds)(arguments.nodes, repeats)
        first, steady, changed = (figures[f"{engine}_{kind}round_seconds"] for kind in ("first_", "", "changed_"))
        print(
            f"{engine}, {arguments.nodes} nodes: first round {first:.3f} s, steady {steady:.3f} s, "
            f"with changes {changed:.3f} s",
            flush=True,
        )
        if max(first, steady, changed) > MOST_SECONDS:
            print(f"MISSED: a round of {engine} takes longer than {MOST_SECONDS:g} s", flush=True)
    if not arguments.quick:
        for engine in engines:
            figures |= (slurm_starts if engine == "slurm" else ray_starts)(arguments.repeats)
    finish("engines", figures, arguments.quick or arguments.only is not None)


if __name__ == "__main__":
    main()
