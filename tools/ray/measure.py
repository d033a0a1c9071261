"""How long a replica takes to start on a Ray node, against a plain actor with a GPU; and 1,000 nodes in the books.

    tools/ray/inside.sh python tools/ray/measure.py [--repeats N]

From a launch to the end of its first training step, with the node's host up: warm (everything imported) and cold; the
GPU behind a bundle found by a task inside it, as on real GPUs. All in turns on one cluster. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pollux.backends._ray_lender import RayLender
from pollux.backends._ray_nodes import seen_nodes
from pollux.backends.protocol import Launch
from pollux.backends.ray import RayBackend
from pollux.core import Placement

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


def until(is_so: Callable[[], Any]) -> Any:
    """Whatever it gives, once it gives something."""
    deadline = time.monotonic() + 300.0
    while not (found := is_so()):
        if time.monotonic() > deadline:
            raise SystemExit("nothing came in 300 s")
        time.sleep(0.005)
    return found


class Lent:
    """A backend whose nodes are up."""

    def __init__(self, address: str, folder: Path, warm: bool) -> None:
        folder.mkdir()
        self._folder = folder
        (folder / "step.py").write_text(STEP)
        self.backend = RayBackend(folder, address, warm=warm)
        self.backend.start(lambda event: None)
        self.node = until(self.backend.inventory)[0].id

    def first_step(self, turn: int) -> float:
        """Seconds from a launch until its first step is done."""
        done = self._folder / f"done-{turn}"
        words = ("python", "step.py", str(done))
        began = time.time()
        self.backend.submit(Launch(f"job-{turn}", 1, Placement.of({self.node: 1}), words, str(self._folder)))
        until(done.exists)
        until(lambda: all(each.state == "ended" for each in self.backend.running()))
        return float(done.read_text()) - began


def starts(repeats: int) -> dict[str, float]:
    """Medians of the starts, in turns."""
    words = [sys.executable, str(Path(__file__).with_name("cluster.py")), "--nodes", "2"]
    with (
        tempfile.TemporaryDirectory(prefix="pollux-ray-", ignore_cleanup_errors=True) as name,
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cluster,
    ):
        assert cluster.stdin is not None
        assert cluster.stdout is not None
        address = json.loads(cluster.stdout.readline())["address"]

        def ask(**order: Any) -> Any:
            cluster.stdin.write(json.dumps(order) + "\n")
            cluster.stdin.flush()
            return json.loads(cluster.stdout.readline())

        warm, cold = Lent(address, Path(name) / "warm", True), Lent(address, Path(name) / "cold", False)
        rows = [row["NodeID"] for row in ask(do="nodes") if row["Resources"].get("GPU")]
        times = []
        for turn in range(repeats):
            times.append((ask(do="actor", node=rows[0]), warm.first_step(turn), cold.first_step(turn)))
            print("actor {:.2f} s, warm {:.2f} s, cold {:.2f} s".format(*times[-1]), flush=True)
        for lent in (warm, cold):
            lent.backend.close()
        cluster.stdin.close()
    actor, warm_start, cold_start = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "ray_plain_actor_seconds": round(actor, 3),
        "ray_warm_start_seconds": round(warm_start, 3),
        "ray_cold_start_seconds": round(cold_start, 3),
        "ray_warm_start_ratio": round(warm_start / actor, 3),
        "ray_cold_start_ratio": round(cold_start / actor, 3),
    }


def rounds(nodes: int) -> dict[str, float]:
    """What a look at so many nodes costs, and a round of questions with a job of eight GPUs on each."""
    rows = [
        {
            "NodeID": f"{number:056x}"[::-1],
            "Alive": True,
            "NodeManagerAddress": f"10.0.{number >> 8}.{number & 255}",
            "NodeManagerHostname": f"gpu{number}",
            "Resources": {"CPU": 64.0, "GPU": 8.0, "memory": 1e12, "accelerator_type:H100": 1.0},
        }
        for number in range(nodes)
    ]
    began = time.perf_counter()
    described = [node.described() for node in seen_nodes(rows, None, True)]
    look = time.perf_counter() - began
    with tempfile.TemporaryDirectory(prefix="pollux-ray-") as home:
        lender = RayLender(Path(home), command=(sys.executable, "-c", "import sys; sys.stdin.read()"))
        lender.start(b"1" * 32, "127.0.0.1", lambda: None)
        lender._hear({"kind": "nodes", "nodes": described})
        for node in described:
            lender._hear({"kind": "host", "node": node["name"], "address": ["h", 1], "gpus": list(range(8))})
            lender.ask(node["name"], {node["name"]: 8})
        began = time.perf_counter()
        for node in described:
            lender.held(node["name"])
            lender.refusal(node["name"])
        lender.hosts()
        questions = time.perf_counter() - began
        lender.close()
    return {"ray_look_seconds": round(look, 4), "ray_round_seconds": round(questions, 4)}


def main() -> None:
    """Measure both, and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--nodes", type=int, default=1000)
    options.add_argument("--repeats", type=int, default=7)
    given = options.parse_args()
    print(json.dumps({"nodes": given.nodes, **rounds(given.nodes), **starts(given.repeats)}))


if __name__ == "__main__":
    main()
