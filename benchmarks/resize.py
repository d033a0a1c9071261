"""How long training pauses when its replicas change: living processes against warm and cold restarts of the same job.

    python benchmarks/resize.py [--quick] [--seed N] [--events N]

2 to 4 to 3 to 1 to 4 replicas on CPU, for 0.2 and 5 million parameters (AdamW). The pause is from the end of the last
step before to the end of the first step after, on the slowest replica. *Live*: processes stay. *Warm*: a checkpoint on
SIGTERM, then replicas forked from a process that has imported everything. *Cold*: the same with new interpreters. Then
random events (resizes, kills, hangs, notices of preemption) on a small job, whose parameters at the end are compared
with those of plain PyTorch in float64. A supervisor of its own stands for the local backend.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pollux.testing.live import LiveSupervisor
from pollux.testing.training import ReplicaServer

SEQUENCE = (4, 3, 1, 4)
WIDTHS = {"small": 415, "mid": 2200}
SAMPLES, FEATURES, BATCH = 4096, 64, 64
LEAST_STEPS = 8
EXACT_SAMPLES, EXACT_BATCH = 98, 12


def replica(folder: str, width: int) -> None:
    """One replica of the measured job: trains until it is stopped, and leaves the times of its first and last step."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import pollux

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(0, 10, (SAMPLES,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    job = pollux.init(model, optimizer, data, BATCH, checkpoint_dir=Path(folder) / "checkpoints", checkpoint_every=1e6)
    times: list[float] = []
    try:
        for _ in job.epochs(1000):
            for x, y in job.batches():
                job.backward(F.cross_entropy(job.model(x), y))
                times.append(time.monotonic())
                if len(times) in (1, LEAST_STEPS):
                    (Path(folder) / f"steps-{len(times)}-{os.getpid()}").write_text(str(times[0]))
    finally:
        if times:
            (Path(folder) / f"last-{os.getpid()}").write_text(str(times[-1]))


def live_pauses(server: ReplicaServer, width: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="pollux-resize-") as folder:
        supervisor = LiveSupervisor(server, f"{__file__}:replica", {"folder": folder, "width": width})
        try:
            supervisor.start(2)
            _until(lambda: supervisor.step() >= LEAST_STEPS, "the first steps")
            for num_replicas in SEQUENCE:
                outcome = supervisor.resize(num_replicas)
                if outcome != "done":
                    raise SystemExit(f"a live resize came out as '{outcome}'\n{supervisor.outputs()}")
                time.sleep(0.5)
            return list(supervisor.pauses)
        finally:
            supervisor.close()


def restart_pauses(start: Callable[[int, str], Restarted], folder: str) -> list[float]:
    """Pauses of a job that is stopped and started again at each size."""
    pauses = []
    run = start(2, folder)
    for num_replicas in (*SEQUENCE, None):
        first = run.first_steps(Path(folder))
        if pauses and pauses[-1] < 0.0:
            pauses[-1] += max(first)
        run.stop()
        if num_replicas is None:
            break
        pauses.append(-max(_last_steps(Path(folder), run.processes)))
        run = start(num_replicas, folder)
    return pauses


class Restarted:
    """The replicas of one generation, by their process numbers, and how to wait for their end."""

    def __init__(self, processes: Sequence[int], wait: Callable[[], object]) -> None:
        self.processes = list(processes)
        self._wait = wait

    def first_steps(self, folder: Path) -> list[float]:
        """When each replica ended its first step; waits until all have done a few."""
        names = [folder / f"steps-{LEAST_STEPS}-{process}" for process in self.processes]
        _until(lambda: all(name.exists() for name in names), "the first steps")
        return [float((folder / f"steps-1-{process}").read_text()) for process in self.processes]

    def stop(self) -> None:
        """Stop as a scheduler does; the state is saved."""
        for process in self.processes:
            os.kill(process, signal.SIGTERM)
        self._wait()


def _last_steps(folder: Path, processes: Sequence[int]) -> list[float]:
    return [float((folder / f"last-{process}").read_text()) for process in processes]


def warm_start(server: ReplicaServer, width: int) -> Callable[[int, str], Restarted]:
    def start(num_replicas: int, folder: str) -> Restarted:
        run = server.start(f"{__file__}:replica", num_replicas, {"folder": folder, "width": width})
        return Restarted(run.processes, run.wait)

    return start


def cold_start(width: int) -> Callable[[int, str], Restarted]:
    def start(num_replicas: int, folder: str) -> Restarted:
        port = _free_port()
        children = []
        for rank in range(num_replicas):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_replicas, "LOCAL_WORLD_SIZE": num_replicas}
            fixed = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            environment = {**os.environ, **fixed, **{k: str(v) for k, v in place.items()}, "MASTER_PORT": str(port)}
            command = [sys.executable, __file__, "--replica", json.dumps({"folder": folder, "width": width})]
            children.append(subprocess.Popen(command, env=environment))
        return Restarted([child.pid for child in children], lambda: [child.wait(60) for child in children])

    return start


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _until(look: Callable[[], bool], what: str, timeout: float = 120.0) -> None:
    end = time.monotonic() + timeout
    while not look():
        if time.monotonic() > end:
            raise SystemExit(f"waited {timeout:g} s in vain: {what}")
        time.sleep(0.005)


def exact_task() -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(5)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    features = torch.randn(EXACT_SAMPLES, 6, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(features, torch.randint(0, 3, (EXACT_SAMPLES,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), data


def exact_replica(folder: str, epochs: int) -> dict[str, Any]:
    """One replica of the job that random events happen to."""
    import torch.nn.functional as F

    import pollux

    model, optimizer, data = exact_task()
    job = pollux.init(
        model, optimizer, data, EXACT_BATCH, checkpoint_dir=Path(folder) / "checkpoints", checkpoint_every=0.3
    )
    for _ in job.epochs(epochs):
        for x, y in job.batches():
            job.backward(F.cross_entropy(job.model(x), y))
            if not (Path(folder) / "fast").exists():
                time.sleep(0.01)
    passes = [entry["samples"] for entry in job.receipt.to_json()["ledger"]]
    job.close()
    return {"parameters": [float(v) for p in model.parameters() for v in p.detach().reshape(-1)], "passes": passes}


def exact_plain(epochs: int) -> list[float]:
    import torch.nn.functional as F

    from pollux.agent.order import pass_order

    model, optimizer, data = exact_task()
    for number in range(epochs):
        for indices in pass_order(EXACT_SAMPLES, 0, number).split(EXACT_BATCH):
            x, y = data[indices]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return [float(value) for parameter in model.parameters() for value in parameter.detach().reshape(-1)]


def random_events(server: ReplicaServer, count: int, seed: int) -> dict[str, Any]:
    """Many events to one run, and what they did to its samples and parameters."""
    chance = random.Random(seed)
    epochs = 40 + 12 * count
    with tempfile.TemporaryDirectory(prefix="pollux-resize-") as folder:
        supervisor = LiveSupervisor(
            server,
            f"{__file__}:exact_replica",
            {"folder": folder, "epochs": epochs},
            {"POLLUX_TIMEOUT": "20"},
            hang_seconds=3.0,
        )
        outcomes: list[str] = []
        try:
            supervisor.start(2)
            _until(lambda: supervisor.step() >= 3, "the first steps")
            outcomes += [supervisor.random_event(chance) for _ in range(count)]
            (Path(folder) / "fast").touch()
            results = supervisor.wait(60.0 + 0.05 * epochs)
            ended = [result.value for result in results if result.exit_code == 0 and result.value]
        except AssertionError as error:
            print(error, file=sys.stderr)
            ended = []
        finally:
            supervisor.close()
    wanted = exact_plain(epochs)
    size = max(abs(value) for value in wanted)
    apart = [max(abs(a - b) for a, b in zip(e["parameters"], wanted, strict=True)) / size for e in ended]
    passes = [samples for value in ended for samples in value["passes"]]
    return {
        "events": len(outcomes),
        "outcomes": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        "samples_lost": sum(max(EXACT_SAMPLES - samples, 0) for samples in passes),
        "samples_repeated": sum(max(samples - EXACT_SAMPLES, 0) for samples in passes),
        "largest_difference": max(apart, default=None),
        "false_alarms": supervisor.false_alarms,
        "stuck": 0 if ended else 1,
    }


def measure(seed: int, events: int) -> dict[str, Any]:
    result: dict[str, Any] = {"pauses": []}
    with ReplicaServer() as server:
        for size, width in WIDTHS.items():
            live = live_pauses(server, width)
            with tempfile.TemporaryDirectory(prefix="pollux-resize-") as folder:
                warm = restart_pauses(warm_start(server, width), folder)
            with tempfile.TemporaryDirectory(prefix="pollux-resize-") as folder:
                cold = restart_pauses(cold_start(width), folder)
            for number, pause in enumerate(live):
                before, after = (2, *SEQUENCE)[number], SEQUENCE[number]
                row = {"size": size, "change": f"{before} to {after}", "live": pause["pause_seconds"]}
                row |= {"warm": warm[number], "cold": cold[number], "parts": pause["parts"], "bytes": pause["bytes"]}
                result["pauses"].append(row)
                print({key: row[key] for key in ("size", "change", "live", "warm", "cold")}, file=sys.stderr)
            seconds = [pause["pause_seconds"] for pause in live]
            # The worst of the four changes, as the bar is on every pause.
            result[f"live_over_cold_{size}"] = max(a / b for a, b in zip(seconds, cold, strict=True))
            result[f"live_over_warm_{size}"] = max(a / b for a, b in zip(seconds, warm, strict=True))
            result[f"mean_live_over_cold_{size}"] = statistics.mean(seconds) / statistics.mean(cold)
            result[f"mean_live_over_warm_{size}"] = statistics.mean(seconds) / statistics.mean(warm)
        result |= random_events(server, events, seed)
    return result


def draw(result: dict[str, Any], path: Path) -> None:
    """Pause by method and change, one panel for each size of the state."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for panel, (size, label) in zip(panels, (("small", "0.2 M parameters"), ("mid", "5 M parameters")), strict=True):
        rows = [row for row in result["pauses"] if row["size"] == size]
        for offset, method in enumerate(("live", "warm", "cold")):
            places = [number + 0.27 * (offset - 1) for number in range(len(rows))]
            panel.bar(places, [row[method] for row in rows], width=0.25, label=method)
        panel.set_xticks(range(len(rows)), [row["change"] for row in rows])
        panel.set_yscale("log")
        panel.set_title(label)
    panels[0].set_ylabel("pause (s)")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few random events, and nothing is kept")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int, help="random events; 10 when quick, else 100")
    parser.add_argument("--replica", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.replica:
        replica(**json.loads(asked.replica))
        return
    # Not above: replicas are forked by a process that does not have this folder on its path.
    from measure import finish

    result = measure(asked.seed, asked.events or (10 if asked.quick else 100))
    if not asked.quick:
        draw(result, Path(__file__).resolve().parents[1] / "docs" / "images" / "resize.png")
    finish("resize", result, asked.quick)


if __name__ == "__main__":
    main()
