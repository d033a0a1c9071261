"""How fast the service answers under load: `python benchmarks/service.py [--quick] [--seed N] [--viewers N]`.

1,000 jobs, 1,000 agents that report every 30 seconds (durable before the reply) and 20 clients that list 100 jobs once
a second, for 60 seconds (`--quick`: 20), from a process of its own. The service is the real one, SQLite included, in a
process of its own as well; only the replicas are made up. Then a while without load, for what it costs when idle, and
the same for a service with the real `local` backend and two jobs that sleep, all its processes counted.
Decisions are made in their own process as soon as they take long; `--decide-here`: in the service, to compare.
`--viewers N`: after that time, as long again with so many open pages besides, each with its stream of events and the
requests that the page makes after them; what decisions suffer is read from the one half beside the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import finish
from viewers import Client, Crowd

from pollux.service import Tokens

NUM_JOBS, NUM_CLIENTS, REPORT_SECONDS = 1000, 20, 30.0
NODES, GPUS_PER_NODE = 100, 8
EXTRA_JOBS, CHURN_SECONDS = 5, 2.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
SECRET = "benchmark"
SLEEPERS = 2


def serve(home: Path, seed: int, decide_here: bool = False) -> None:
    """The service, with replicas that only exist on paper."""
    from pollux import policies
    from pollux.core import Node
    from pollux.service import Engine, ServiceSettings, SystemClock
    from pollux.service.deciding.process_policy import LONG_SECONDS
    from pollux.service.server import serve as serve_module
    from pollux.testing.servers.service import FakeBackend

    class Paper(FakeBackend):
        def __init__(self) -> None:
            nodes = [Node(f"node-{index}", GPUS_PER_NODE, "cpu") for index in range(NODES)]
            super().__init__(nodes, SystemClock(), by_itself=True)  # type: ignore[arg-type]

    def build(settings: ServiceSettings) -> Engine:
        store = serve_module.open_store(serve_module.store_file(home))
        telemetry = serve_module.open_telemetry(serve_module.telemetry_file(home))
        tokens = serve_module.Tokens(serve_module.operator_token(serve_module.token_file(home)), SECRET)
        settings = replace(settings, long_decision_seconds=math.inf if decide_here else LONG_SECONDS)
        engine = Engine(policies.create("pollux"), Paper(), store, telemetry, settings, tokens=tokens)
        decided = engine.pipeline.apply_decision

        def watched(*answer: Any) -> None:
            decided(*answer)
            times = engine.last_decision
            with (home / "decisions.txt").open("a") as file:
                file.write(f"{time.time()} {times.delay_seconds} {times.seconds}\n")

        engine.pipeline.apply_decision = watched  # type: ignore[method-assign]
        return engine

    serve_module.build_engine = build
    serve_module.serve(ServiceSettings(home=home, port=0, seed=seed))


class Load:
    """The load generator: agents and clients, and how long each answer took."""

    def __init__(self, port: int, token: str, seed: int, pid: int, viewers: int = 0) -> None:
        self.port, self.token, self.viewers, self.seed, self.pid = port, token, viewers, seed, pid
        self.random = random.Random(seed)
        self.took: dict[str, list[float]] = {"report": [], "list": []}
        self.errors = 0
        self.generations: dict[str, int] = {}
        self.extras = 0

    async def learn(self, until: float) -> None:
        """Agents know their generation from their environment; here one client asks for all of them."""
        client = Client(self.port, self.token)
        after = ""
        while time.monotonic() < until:
            _, answer = await client.ask("GET", f"/v1/jobs?limit=100{after}")
            page = json.loads(answer)
            self.generations |= {job["id"]: job["generation"] for job in page["jobs"]}
            after = f"&after={page['next']}" if page["next"] else ""
            await asyncio.sleep(1.0)
        client.close()

    async def submit_all(self) -> None:
        clients = [Client(self.port, self.token) for _ in range(8)]

        async def some(client: Client, numbers: range) -> None:
            for number in numbers:
                low = self.random.choice([1, 1, 1, 2])
                body = {
                    "name": f"job-{number}", "run": "sleep 1000", "workdir": "/",
                    "gpus": f"{low}..{self.random.choice([4, 8, 16])}",
                }  # fmt: skip
                status, answer = await client.ask("POST", "/v1/jobs", json.dumps(body).encode())
                if status != 201:
                    raise SystemExit(f"submit failed: {answer!r}")

        shares = [range(index, NUM_JOBS, len(clients)) for index in range(len(clients))]
        await asyncio.gather(*(some(client, share) for client, share in zip(clients, shares, strict=True)))
        for client in clients:
            client.close()

    def report(self, number: int, step: int) -> bytes:
        draw = random.Random(number)
        noise = draw.uniform(100, 3000) * (1 + 0.02 * step)
        report = {
            "generation": self.generations.get(f"job-{number}", 0), "step": step, "samples": 128 * step,
            "progress": 1000.0 * step,
            "epoch": 0.01 * step,
            "num_replicas": 1, "num_nodes": 1, "batch_size": 128, "local_batch": 128, "accumulation": 1,
            "throughput": 100.0, "goodput": 80.0, "efficiency": 0.8, "total_progress": 1e6 * draw.uniform(1, 5),
            "noise": {"scale": noise, "low": noise * 0.8, "high": noise * 1.2, "measured": 10 * step},
            "model": {
                "parameters": [0.02, 0.002 * draw.uniform(1, 2), 0.02, 0.003, 0.01, 0.002, 1.5], "gpu_type": "cpu",
                "initial_batch": 128, "max_batch": 4096, "local_batch_max": 512, "grad_sqr": 1.0, "grad_var": noise,
            },
            "loss": 1.0 / (1 + step), "resize_seconds": 12.0,
        }  # fmt: skip
        return json.dumps(report).encode()

    async def timed(self, kind: str, client: Client, method: str, path: str, body: bytes = b"") -> None:
        began = time.perf_counter()
        try:
            status, _ = await client.ask(method, path, body)
            self.errors += status != 200
        except (OSError, asyncio.IncompleteReadError, ValueError, IndexError):
            self.errors += 1
        self.took[kind].append((time.perf_counter() - began) * 1e3)

    async def agent(self, number: int, until: float) -> None:
        """As agents report: with the token of their job, over a connection of its own for every report."""
        token = Tokens(self.token, SECRET).for_job(f"job-{number}")
        step = 1
        pause = self.random.uniform(0, REPORT_SECONDS)
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(pause, left))
            if pause < left:
                client = Client(self.port, token)
                await self.timed("report", client, "POST", f"/v1/jobs/job-{number}/reports", self.report(number, step))
                client.close()
            step += 1
            pause = REPORT_SECONDS

    async def lister(self, until: float) -> None:
        client = Client(self.port, self.token)
        await asyncio.sleep(self.random.uniform(0, 1))
        while time.monotonic() < until:
            began = time.monotonic()
            await self.timed("list", client, "GET", "/v1/jobs?limit=100")
            await asyncio.sleep(max(began + 1.0 - time.monotonic(), 0.0))
        client.close()

    async def come_and_go(self, until: float) -> None:
        """A job comes every two seconds, and one goes: without news pages would have nothing to read."""
        client = Client(self.port, self.token)
        while (left := until - time.monotonic()) > 0:
            self.extras += 1
            body = {"name": f"extra-{self.extras}", "run": "sleep 1000", "workdir": "/", "gpus": "1..4"}
            await client.ask("POST", "/v1/jobs", json.dumps(body).encode())
            if self.extras > EXTRA_JOBS:
                await client.ask("POST", f"/v1/jobs/extra-{self.extras - EXTRA_JOBS}/cancel")
            await asyncio.sleep(min(CHURN_SECONDS, left))
        client.close()

    async def run(self, seconds: float) -> dict[str, Any]:
        """Submit, then agents and clients; with viewers a second time, with them. Both times are told apart."""
        began = time.monotonic()
        await self.submit_all()
        submitted = round(time.monotonic() - began, 1)
        found = await self.span(seconds)
        if self.viewers:
            found = {
                **{f"alone_{name}": value for name, value in found.items()},
                **await self.span(seconds, self.viewers),
            }
        return {**found, "submit_seconds": submitted}

    async def span(self, seconds: float, viewers: int = 0) -> dict[str, Any]:
        """Agents and clients for a while, and so many open pages."""
        self.took, self.errors = {"report": [], "list": []}, 0
        crowd = Crowd(self.port, self.token, self.seed)
        began, until, cores = time.time(), time.monotonic() + seconds, core_seconds(self.pid)
        agents = [self.agent(number, until) for number in range(NUM_JOBS)]
        listers = [self.lister(until) for _ in range(NUM_CLIENTS)]
        others = [self.come_and_go(until)] if self.viewers else []
        await asyncio.gather(*agents, self.learn(until), *listers, *others, crowd.watch(viewers, until))
        every = sorted(self.took["report"] + self.took["list"])
        found: dict[str, Any] = {
            "span": [began, began + seconds],
            "p50_ms": round(statistics.median(every), 2), "p99_ms": round(percentile(every, 0.99), 2),
            "requests_per_second": round(len(every) / seconds, 1), "errors": self.errors, "requests": len(every),
            "max_ms": round(every[-1], 1),
            "busy_core_fraction": round((core_seconds(self.pid) - cores) / (time.time() - began), 3),
        }  # fmt: skip
        for kind, took in self.took.items():
            found[f"{kind}_p99_ms"] = round(percentile(sorted(took), 0.99), 2)
        if viewers:
            took = sorted(crowd.took_ms)
            found |= {
                "viewers": viewers, "viewer_requests_per_second": round(len(took) / seconds, 1),
                "viewer_p50_ms": round(statistics.median(took), 2), "viewer_p99_ms": round(percentile(took, 0.99), 2),
                "viewer_errors": crowd.errors, "viewer_mb_per_second": round(crowd.received_bytes / seconds / 1e6, 2),
                "viewer_messages_per_second": round(crowd.messages / seconds, 1), "viewer_drops": crowd.drops,
                "viewer_lag_p99_ms": round(percentile(sorted(crowd.lags_ms), 0.99), 1),
            }  # fmt: skip
        return found


def percentile(values: list[float], share: float) -> float:
    return values[min(int(len(values) * share), len(values) - 1)]


def core_seconds(pid: int) -> float:
    """CPU time of a process so far, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def _directly(request: Any) -> Any:
    """Request what is on this machine, whatever proxy its user has for others."""
    import urllib.request

    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30)


def ask(home: Path, path: str) -> Any:
    import urllib.request

    url = json.loads((home / "service.json").read_text())["url"]
    token = (home / "token").read_text().strip()
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {token}"})
    with _directly(request) as answer:
        return json.load(answer)


def decisions(home: Path, span: list[float], prefix: str = "") -> dict[str, Any]:
    """Of the decisions made in a span of time: how long after they were due the policy began, how long it thought.

    `decision_due` is both together: from when one is due until it is made.
    """
    lines = [tuple(map(float, line.split())) for line in (home / "decisions.txt").read_text().splitlines()]
    made = [(1e3 * late, 1e3 * thought) for at, late, thought in lines if span[0] <= at < span[1]]
    late, thought = sorted(one for one, _ in made), sorted(one for _, one in made)
    due = sorted(late + thought for late, thought in made)
    return {
        f"{prefix}decisions": len(made),
        f"{prefix}decision_late_p50_ms": round(statistics.median(late), 1),
        f"{prefix}decision_late_p99_ms": round(percentile(late, 0.99), 1),
        f"{prefix}decision_p50_ms": round(statistics.median(thought), 1),
        f"{prefix}decision_p99_ms": round(percentile(thought, 0.99), 1),
        f"{prefix}decision_due_p50_ms": round(statistics.median(due), 1),
        f"{prefix}decision_due_p99_ms": round(percentile(due, 0.99), 1),
    }


def compared(result: dict[str, Any]) -> dict[str, Any]:
    """What viewers do to decisions: how many there are, and how much later they are made, in the median and at p99."""
    later = {
        share: result[f"decision_due_{share}_ms"] - result[f"alone_decision_due_{share}_ms"] for share in ("p50", "p99")
    }
    return {
        "decisions_ratio": round(result["decisions"] / result["alone_decisions"], 3),
        "decision_later_ms": round(later["p50"], 1),
        "decision_later_p99_ms": round(later["p99"], 1),
    }


def serve_local(home: Path, seed: int) -> None:
    """The service as it is started by `pollux serve`, with replicas that are processes."""
    from pollux.service import ServiceSettings
    from pollux.service.server import serve as serve_module

    serve_module.serve(ServiceSettings(home=home, port=0, seed=seed, backend_options={"slots": SLEEPERS}))


def family(pid: int) -> list[int]:
    """A process with its children and theirs: shims and their replicas, and what is kept warm for the next."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def submit(home: Path, name: str) -> None:
    import urllib.request

    url = json.loads((home / "service.json").read_text())["url"] + "/v1/jobs"
    body = json.dumps({"name": name, "run": "sleep 1000", "workdir": "/", "gpus": 1}).encode()
    headers = {"Authorization": f"Bearer {(home / 'token').read_text().strip()}", "Content-Type": "application/json"}
    _directly(urllib.request.Request(url, body, headers)).close()


def is_at_rest(pid: int, seconds: float = 3.0) -> bool:
    """Whether a process and its family leave the processor alone for a while: a twentieth of a core at most."""
    everyone = family(pid)
    before = sum(core_seconds(each) for each in everyone)
    time.sleep(seconds)
    return sum(core_seconds(each) for each in everyone) - before <= 0.05 * seconds


def idle_local(home: Path, idle_seconds: float, seed: int) -> dict[str, Any]:
    """What a service with real replicas costs when they sleep: all its processes together, and how many there are."""
    service = subprocess.Popen([sys.executable, __file__, "--serve-local", str(home), "--seed", str(seed)])
    everyone: list[int] = []
    try:
        waited(lambda: (home / "service.json").exists(), "no service")
        for number in range(SLEEPERS):
            submit(home, f"sleeper-{number}")
        waited(
            lambda: [job["state"] for job in ask(home, "/v1/jobs")["jobs"]] == ["running"] * SLEEPERS,
            "the jobs do not run",
        )
        # What is imported for the next jobs, in the background, is not rest.
        waited(lambda: is_at_rest(service.pid), "the service does not come to rest", 180.0)
        everyone = family(service.pid)
        began, before = time.monotonic(), [core_seconds(pid) for pid in everyone]
        time.sleep(idle_seconds)
        spent = sum(core_seconds(pid) for pid in everyone) - sum(before)
        share = spent / (time.monotonic() - began)
        return {"idle_core_fraction_local": round(share, 5), "idle_processes_local": len(everyone)}
    finally:
        service.terminate()
        service.wait(60)
        # The service lets its jobs run on; these go with the folder.
        for pid in everyone:
            with contextlib.suppress(OSError):
                if str(home).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGTERM)


def waited(is_so: Callable[[], bool], otherwise: str, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            raise SystemExit(f"{otherwise} after {seconds:g} s")
        time.sleep(0.05)


def resident_mb(pid: int) -> float:
    """Memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def measure(home: Path, seconds: float, idle_seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    seed, viewers = options.seed, options.viewers
    more = ["--decide-here"] if options.decide_here else []
    service = subprocess.Popen([sys.executable, __file__, "--serve", str(home), "--seed", str(seed), *more])
    try:
        until = time.monotonic() + 60
        while not (home / "service.json").exists() and time.monotonic() < until:
            time.sleep(0.05)
        command = [sys.executable, __file__, "--load", str(home), "--seconds", str(seconds), "--seed", str(seed)]
        command += ["--viewers", str(viewers)]
        command += ["--pid", str(service.pid)]
        load = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
        result: dict[str, Any] = json.loads(load.stdout.splitlines()[-1])
        result |= decisions(home, result.pop("span"))
        if viewers:
            result |= decisions(home, result.pop("alone_span"), "alone_")
            result |= compared(result)
        result["revision"] = ask(home, "/v1/status")["revision"]
        result["memory_mb"] = [resident_mb(pid) for pid in family(service.pid)]
        time.sleep(3.0)
        before, began = core_seconds(service.pid), time.monotonic()
        time.sleep(idle_seconds)
        result["idle_core_fraction"] = round((core_seconds(service.pid) - before) / (time.monotonic() - began), 5)
        result["load_average"] = round(os.getloadavg()[0], 1)
        return result
    finally:
        service.terminate()
        service.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="20 seconds of load instead of 60")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--viewers", type=int, default=0, help="people who watch the page meanwhile")
    parser.add_argument("--decide-here", action="store_true", help="make decisions in the service's own process")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve-local", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pid", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.seed, options.decide_here)
    elif options.serve_local is not None:
        serve_local(options.serve_local, options.seed)
    elif options.load is not None:
        url = json.loads((options.load / "service.json").read_text())["url"]
        token = (options.load / "token").read_text().strip()
        load = Load(int(url.rsplit(":", 1)[1]), token, options.seed, options.pid, options.viewers)
        print(json.dumps(asyncio.run(load.run(options.seconds))))
    else:
        with tempfile.TemporaryDirectory(prefix="pollux-service-") as folder:
            seconds = options.seconds or (20.0 if options.quick else 60.0)
            idle_seconds = 10.0 if options.quick else 30.0
            result = measure(Path(folder) / "home", seconds, idle_seconds, options)
            if not options.viewers:
                result |= idle_local(Path(folder) / "local", idle_seconds, options.seed)
        finish("service_viewers" if options.viewers else "service", result, options.quick)


if __name__ == "__main__":
    main()
