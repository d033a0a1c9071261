"""How long training pauses when its replicas change: living processes against warm and cold restarts of the same job.

    python benchmarks/resize.py [--quick] [--seed N] [--events N] [--no-workload]
    python benchmarks/resize.py --gpu [--device cuda|cpu] [--quick]

2 to 4 to 3 to 1 to 4 replicas on CPU, for 0.2 and 5 million parameters (AdamW). The pause is from the end of the last
step before to the end of the first step after, on the slowest replica; live and warm ones the median of three, as a
moment in which the machine does something else is soon as long as they are. *Live*: processes stay. *Warm*: a
checkpoint on SIGTERM, then replicas forked from a process that has imported everything. *Cold*: the same with new
interpreters. The supervisor of the tests stands for the local backend there. While joiners prepare, steps of the others
are slower: by how much is measured from the same runs. Then random events (resizes, kills, hangs, notices of
preemption, new services) on small jobs of the local backend, whose parameters at the end are compared with those of
plain PyTorch in float64; the share of all GPU-seconds that pauses take in a whole workload. `--gpu` is in
`resize_gpu`, and needs PyTorch only.
"""

from __future__ import annotations

import argparse
import itertools
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

from pollux.testing.jobs.replica_server import ReplicaServer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.live_supervisor import LiveSupervisor

EVENTS_A_JOB = 40
SEQUENCE = (4, 3, 1, 4)
WIDTHS = {"small": 415, "mid": 2200}
SAMPLES, FEATURES, BATCH = 4096, 64, 64
LEAST_STEPS = 8
REPEATS = 3
CALM_SECONDS = 2.0
JUST_BEFORE_SECONDS = 0.02


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
            (Path(folder) / f"times-{os.getpid()}").write_text(json.dumps(times))


def live_pauses(server: ReplicaServer, width: int) -> tuple[list[dict[str, Any]], list[float]]:
    """The pauses, and for each change with joiners how much longer steps took while these prepared."""
    with tempfile.TemporaryDirectory(prefix="pollux-resize-") as folder:
        supervisor = LiveSupervisor(server, f"{__file__}:replica", {"folder": folder, "width": width})
        spans: list[tuple[float, float]] = []
        try:
            supervisor.start(2)
            _until(lambda: supervisor.step() >= LEAST_STEPS, "the first steps")
            for before, num_replicas in itertools.pairwise((2, *SEQUENCE)):
                time.sleep(CALM_SECONDS)
                began, replicas = time.monotonic(), supervisor.prepare(num_replicas)
                if not supervisor.await_ready(replicas):
                    raise SystemExit(f"a joiner ended before it was ready\n{supervisor.outputs()}")
                if num_replicas > before:
                    spans.append((began, time.monotonic()))
                supervisor.commit(replicas)
                outcome = supervisor.await_change()
                if outcome != "done":
                    raise SystemExit(f"a live resize came out as '{outcome}'\n{supervisor.outputs()}")
            for rank in range(len(supervisor.members)):
                supervisor.kill(rank, signal.SIGTERM)
            first = supervisor.members[0]
            first.run.wait(60.0)
            times = json.loads((Path(folder) / f"times-{first.process}").read_text())
            return list(supervisor.pauses), [ratio for span in spans if (ratio := _slower(times, *span)) is not None]
        finally:
            supervisor.close()


def _slower(times: Sequence[float], began: float, ended: float) -> float | None:
    """How much longer steps took that were under way between two times than those of the seconds before.

    None where there were none, or too few before to compare with. One that had just begun at the end may have gone to
    the new group, and does not count.
    """
    steps = list(itertools.pairwise(times))
    calm = [b - a for a, b in steps if a >= began - CALM_SECONDS and b <= began]
    slow = [b - a for a, b in steps if b > began and a < ended - JUST_BEFORE_SECONDS]
    return statistics.mean(slow) / statistics.mean(calm) - 1.0 if slow and len(calm) > 2 else None


def restart_pauses(start: Callable[[int, str], Restarted], folder: str) -> list[float]:
    """Pauses of a job that is stopped and started again at each size."""
    pauses: list[float] = []
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


def random_events(count: int, seed: int) -> dict[str, Any]:
    """Many events to a job, of the local backend, and what they did to its samples and parameters."""
    chance = random.Random(seed)
    verdicts: list[Any] = []
    stuck, events = 0, 0
    outcomes: dict[str, int] = {}
    while events < count and not stuck:
        try:
            verdict = _job_with_events(chance, min(EVENTS_A_JOB, count - events))
        except AssertionError as error:
            print(error, file=sys.stderr)
            stuck = 1
            break
        verdicts.append(verdict)
        events += verdict.events
        for outcome, number in verdict.outcomes.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + number
        print(f"{events} of {count} events", file=sys.stderr)
    return {
        "events": events,
        "outcomes": dict(sorted(outcomes.items())),
        "samples_lost": sum(verdict.samples_lost for verdict in verdicts),
        "samples_repeated": sum(verdict.samples_repeated for verdict in verdicts),
        "largest_difference": max((verdict.largest_difference for verdict in verdicts), default=None),
        "stuck": stuck,
    }


def _job_with_events(chance: random.Random, count: int) -> Any:
    from pollux.backends.local import LocalBackend
    from pollux.testing.jobs.random_changes import EventRun

    with tempfile.TemporaryDirectory(prefix="pollux-resize-") as folder:
        home = Path(folder) / "home"
        home.mkdir()
        job = Path(folder) / "job"
        run = EventRun(lambda: LocalBackend(home, slots=4, hang_seconds=2.5), job, 30 + 4 * count, home=home)
        try:
            run.wait_for("warm backend", lambda: isinstance(run.backend, LocalBackend) and run.backend.is_warm)
            run.start(2)
            run.await_running()
            for _ in range(count):
                if not run.change_at_random(chance):
                    break
            return run.finish()
        finally:
            run.close()


def measure(seed: int, events: int, quick: bool, with_workload: bool) -> dict[str, Any]:
    import resize_gpu
    import resize_workload

    result: dict[str, Any] = {"pauses": [], "slower_while_joiners_prepare": {}}
    with ReplicaServer() as server:
        for size, width in WIDTHS.items():
            lives, slower, warms = [], [], []
            for _ in range(1 if quick else REPEATS):
                live, slowed = live_pauses(server, width)
                lives.append(live)
                slower.append(slowed)
                with tempfile.TemporaryDirectory(prefix="pollux-resize-") as folder:
                    warms.append(restart_pauses(warm_start(server, width), folder))
            result["slower_while_joiners_prepare"][size] = slower
            with tempfile.TemporaryDirectory(prefix="pollux-resize-") as folder:
                cold = restart_pauses(cold_start(width), folder)
            for number, (before, after) in enumerate(itertools.pairwise((2, *SEQUENCE))):
                mine = sorted((live[number] for live in lives), key=lambda pause: pause["pause_seconds"])
                middle, waits = mine[len(mine) // 2], [warm[number] for warm in warms]
                row = {"size": size, "change": f"{before} to {after}", "live": middle["pause_seconds"]}
                row |= {"warm": statistics.median(waits), "cold": cold[number]}
                row |= {"parts": middle["parts"], "bytes": middle["bytes"]}
                row |= {"live_all": [pause["pause_seconds"] for pause in mine], "warm_all": waits}
                result["pauses"].append(row)
                print({key: row[key] for key in ("size", "change", "live", "warm", "cold")}, file=sys.stderr)
            rows = [row for row in result["pauses"] if row["size"] == size]
            seconds, warm = [row["live"] for row in rows], [row["warm"] for row in rows]
            # The worst of the four changes, as the bar is on every pause.
            result[f"live_over_cold_{size}"] = max(a / b for a, b in zip(seconds, cold, strict=True))
            result[f"live_over_warm_{size}"] = max(a / b for a, b in zip(seconds, warm, strict=True))
            result[f"mean_live_over_cold_{size}"] = statistics.mean(seconds) / statistics.mean(cold)
            result[f"mean_live_over_warm_{size}"] = statistics.mean(seconds) / statistics.mean(warm)
    result["profile_of_steps"] = resize_gpu.profiles("cpu")
    if with_workload:
        result["workload"] = resize_workload.measure(quick)
    return result | random_events(events, seed)


def draw(result: dict[str, Any], path: Path) -> None:
    """Pause by method and change, one panel for each size of the state."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for panel, (size, label) in zip(panels, (("small", "0.2 M parameters"), ("mid", "5 M parameters")), strict=True):
        rows = [row for row in result["pauses"] if row["size"] == size]
        for offset, method in enumerate(("live", "warm", "cold")):
            places = [number + 0.27 * (offset - 1) for number in range(len(rows))]
            panel.bar(places, [row[method] for row in rows], width=0.25, label=method)
        panel.set_xticks(range(len(rows)), [row["change"] for row in rows])
        panel.set_yscale("log")
        panel.set_title(label)
    panels[0].set_ylabel("pause (s)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short workload, few random events, and nothing is kept")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int, help="random events; 10 when quick, else 100")
    parser.add_argument("--no-workload", action="store_true", help="leave out the workload under a service")
    parser.add_argument("--gpu", action="store_true", help="what one GPU can show, and nothing else")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="with --gpu; cpu tries the same out")
    parser.add_argument("--replica", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.replica:
        replica(**json.loads(asked.replica))
        return
    # Not above: replicas are forked by a process that does not have this folder on its path.
    from measure import finish

    if asked.gpu:
        import resize_gpu

        finish("resize_gpu", resize_gpu.measure(asked.device, asked.quick), asked.quick or asked.device == "cpu")
        return
    result = measure(asked.seed, asked.events or (10 if asked.quick else 100), asked.quick, not asked.no_workload)
    if not asked.quick:
        draw(result, Path(__file__).resolve().parents[1] / "docs" / "images" / "resize.png")
    finish("resize", result, asked.quick)


if __name__ == "__main__":
    main()
