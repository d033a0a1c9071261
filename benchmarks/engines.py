"""What engines cost: a round over 1,000 nodes' worth of recorded inventory, and the start of a replica on a lent node.

    python benchmarks/engines.py [--quick] [--nodes N] [--repeats N] [--only slurm|ray]

A round is all that an adapter does: commands run (played by scripts that print what was recorded), what Ray's driver
tells read, nodes offered, pilots and places counted, every job asked after. What four real nodes said while one was
drained and one killed (`engines_record.py`) is played for all nodes at once, and at each moment the adapter must offer
as many nodes as the real service had. What is asked of the engine in the steady state is counted: Slurm's commands,
what Ray's driver is told, and its own calls to Ray (which is played) with a tenth of all claims waiting.

The start is measured on a real Slurm and a real Ray cluster of this machine where they are installed, with a real
service: from the decision, by the service's own record of it, to the end of the first training step on a node whose
host is up. Beside it, in turns: a plain `srun` step that imports PyTorch, and a plain actor.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines_rounds
from measure import finish, timed

# The service is on this machine: whatever proxy its user has for others is not asked.
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
MOST_SECONDS = 1.0
TOOLS = Path(__file__).resolve().parents[1] / "tools"


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
        self.until(self.nodes)

    def first_step(self, turn: int) -> float:
        """Seconds from the decision to start a job until its first step is done."""
        name, done = f"job-{turn}", self._folder / f"done-{turn}"
        self.submit(name, [sys.executable, "step.py", str(done)], 1)
        self.until(done.exists)
        self.until(lambda: self._call(f"/v1/jobs/{name}")["job"]["state"] == "succeeded")
        events = self._call(f"/v1/jobs/{name}")["events"]
        (decided,) = [event["at"] for event in events if event["kind"] == "placed"]
        return float(done.read_text()) - float(decided)

    def submit(self, name: str, run: list[str], gpus: int) -> None:
        """A job of so many GPUs."""
        self._call("/v1/jobs", {"name": name, "run": run, "gpus": str(gpus), "workdir": str(self._folder)})

    def nodes(self) -> list[str]:
        """Names of the nodes it has."""
        return sorted(node["id"] for node in self._call("/v1/status")["nodes"])

    def jobs(self) -> list[dict[str, Any]]:
        """Its jobs, as the API has them."""
        return list(self._call("/v1/jobs")["jobs"])

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
        with _DIRECTLY(urllib.request.Request(self._url + path, data, headers), timeout=60) as answer:
            return json.load(answer)

    def until(self, is_so: Callable[[], Any]) -> None:
        """Wait for that."""
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


class Asked:
    """A real Ray cluster of this machine, and its answers; ends with the block."""

    def __init__(self, nodes: int) -> None:
        words = [sys.executable, str(TOOLS / "ray" / "cluster.py"), "--nodes", str(nodes)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = str(json.loads(self._process.stdout.readline())["address"])

    def __enter__(self) -> Asked:
        return self

    def __call__(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __exit__(self, *error: object) -> None:
        with self._process:
            pass


def ray_starts_inside(repeats: int) -> dict[str, Any]:
    """The same, once there is a namespace."""
    with tempfile.TemporaryDirectory(prefix="pollux-engines-", ignore_cleanup_errors=True) as name, Asked(2) as ask:
        node = next(row["NodeID"] for row in ask(do="nodes") if row["Resources"].get("GPU"))
        given = ["--backend", "ray", "--address", ask.address]
        cold = ["--option", "warm=no"]
        medians = in_turns(lambda: float(ask(do="actor", node=node)), Path(name), given, cold, repeats)
    return starts("ray", "actor", medians)


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
    figures: dict[str, Any] = {}
    engines = (arguments.only,) if arguments.only else ("slurm", "ray")
    for engine in engines:
        found = engines_rounds.measured(engine, arguments.nodes, 3 if arguments.quick else 10)
        figures |= found
        if max(value for name, value in found.items() if name.endswith("_slowest_round_seconds")) > MOST_SECONDS:
            print(f"MISSED: a round of {engine} takes longer than {MOST_SECONDS:g} s", flush=True)
    if not arguments.quick:
        for engine in engines:
            figures |= (slurm_starts if engine == "slurm" else ray_starts)(arguments.repeats)
    finish("engines", figures, arguments.quick or arguments.only is not None)


if __name__ == "__main__":
    main()
