"""Do agents get through while strangers hold connections?  `python benchmarks/strangers.py [--quick] [--seed N]`.

100 agents report once a second, each over a new connection as real ones do, undisturbed for 15 seconds; then as long
while 10,000 peers without a token connect and send a request slowly, a few bytes of its headers or body at a time, and
come again a while after they are dropped; both three times in turn (`--quick`: 2,000 peers, 6 seconds, twice). The
service is the real one with its store in a process of its own; agents and strangers are processes of their own as well.
Loopback only. The result is p99 of the reports with strangers over that without, what was reported while the strangers
arrive told apart, the share of a core that the service takes, and how much its log and memory have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import finish
from service import SECRET, Load, serve
from viewers import Client

from pollux.service import Tokens

NUM_AGENTS, NUM_STRANGERS = 100, 10_000
REPORT_SECONDS, COME_AGAIN_SECONDS, TRICKLE_SECONDS = 1.0, 10.0, 2.0
ARRIVE_SECONDS = 5.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
BEGINNINGS = (
    b"",
    b"G",
    b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: ",
    b"POST /v1/session HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 8000\r\n\r\n{",
    b"POST /v1/jobs/a/reports HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer no\r\ncontent-length: 9\r\n\r\n{",
)


class Stranger(asyncio.Protocol):
    """A peer that sends a letter now and then, and comes again some time after it was dropped."""

    def __init__(self, crowd: Strangers) -> None:
        self.crowd = crowd
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.crowd.connected += 1
        transport.write(self.crowd.random.choice(BEGINNINGS))
        self.crowd.soon(TRICKLE_SECONDS, self.trickle)

    def trickle(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(b"x")
            self.crowd.soon(TRICKLE_SECONDS, self.trickle)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.crowd.dropped += 1
        self.crowd.soon(COME_AGAIN_SECONDS, self.crowd.connect)


class Strangers:
    """So many peers, for so long."""

    def __init__(self, port: int, count: int, seed: int) -> None:
        self.port, self.count = port, count
        self.random = random.Random(seed)
        self.connected = self.dropped = self.failed = 0
        self.tasks: set[asyncio.Task[None]] = set()

    def soon(self, seconds: float, call: Any) -> None:
        asyncio.get_running_loop().call_later(seconds * self.random.uniform(0.5, 1.5), call)

    def connect(self) -> None:
        task = asyncio.get_running_loop().create_task(self.try_to_connect())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def try_to_connect(self) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: Stranger(self), "127.0.0.1", self.port)
        except OSError:
            self.failed += 1
            self.soon(COME_AGAIN_SECONDS, self.connect)

    async def run(self, seconds: float) -> None:
        """Come, stay, say what happened, and be gone at once: ten thousand farewells would take a while."""
        loop = asyncio.get_running_loop()
        for number in range(self.count):
            loop.call_later(ARRIVE_SECONDS * number / self.count, self.connect)
        await asyncio.sleep(seconds)
        print(json.dumps({"connected": self.connected, "dropped": self.dropped, "failed": self.failed}), flush=True)
        os._exit(0)


class Agents:
    """Agents that report over a new connection each time; how long each report took, connecting included."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.random = port, random.Random(seed)
        self.tokens = Tokens("operator", SECRET)
        self.load = Load(port, "", seed, 0)
        self.took: list[float] = []
        self.errors = 0

    async def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(self.agent(number, until) for number in range(NUM_AGENTS)))

    async def agent(self, number: int, until: float) -> None:
        name, step = f"job-{number}", 0
        token = self.tokens.for_job(name)
        await asyncio.sleep(self.random.uniform(0.0, REPORT_SECONDS))
        while time.monotonic() < until:
            step += 1
            body = self.load.report(number, step)
            began = time.perf_counter()
            client = Client(self.port, token)
            try:
                status, _ = await client.ask("POST", f"/v1/jobs/{name}/reports", body)
                self.errors += status != 200
            except (OSError, asyncio.IncompleteReadError, ValueError, IndexError):
                self.errors += 1
            client.close()
            self.took.append(time.perf_counter() - began)
            await asyncio.sleep(max(0.0, REPORT_SECONDS - (time.perf_counter() - began)))


async def submit(port: int, token: str) -> None:
    client = Client(port, token)
    for number in range(NUM_AGENTS):
        body = {"name": f"job-{number}", "run": "sleep 1000", "workdir": "/", "gpus": "1..4"}
        status, answer = await client.ask("POST", "/v1/jobs", json.dumps(body).encode())
        if status != 201:
            raise SystemExit(f"submit failed: {answer!r}")
    client.close()


def memory_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024.0


def p(times: list[float], percent: int) -> float:
    """A percentile in milliseconds."""
    return 1e3 * statistics.quantiles(times, n=100)[percent - 1]


def start(*words: str, **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, *words], **more)


@contextlib.contextmanager
def service(home: Path, seed: int) -> Iterator[tuple[int, str, int]]:
    """The service's port, token and process id."""
    with (home / "service.log").open("ab") as log:
        process = start("--serve", str(home), "--seed", str(seed), stdout=log, stderr=log)
    try:
        announced, deadline = home / "service.json", time.monotonic() + 60.0
        while not announced.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the service does not start: {(home / 'service.log').read_text()[-2000:]}")
            time.sleep(0.05)
        port = int(json.loads(announced.read_text())["url"].rpartition(":")[2])
        yield port, (home / "token").read_text().strip(), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


class Round:
    """One while of reports: how long each took, and what the service used."""

    def __init__(self, port: int, pid: int, seconds: float, seed: int) -> None:
        agents, began, used = Agents(port, seed), time.monotonic(), cpu_seconds(pid)
        asyncio.run(agents.run(seconds))
        self.took, self.errors = agents.took, agents.errors
        self.cores = (cpu_seconds(pid) - used) / (time.monotonic() - began)


def among_strangers(
    port: int, pid: int, seconds: float, strangers: int, seed: int
) -> tuple[Round, Round, dict[str, int]]:
    """While they arrive, when all have come, and what they say of it."""
    crowd = start(
        "--strangers", str(strangers), "--port", str(port), "--seconds", str(ARRIVE_SECONDS + seconds + 3.0),
        "--seed", str(seed), stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        arriving = Round(port, pid, ARRIVE_SECONDS + 2.0, seed)
        there = Round(port, pid, seconds, seed)
        return arriving, there, json.loads(crowd.communicate(timeout=60.0)[0])
    finally:
        if crowd.poll() is None:
            crowd.kill()
            crowd.wait()


def compare(seconds: float, strangers: int, rounds: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pollux-strangers-") as folder, service(Path(folder), seed) as found:
        port, token, pid = found
        asyncio.run(submit(port, token))
        time.sleep(5.0)
        log = Path(folder, "service.log")
        memory, written = memory_mib(pid), log.stat().st_size
        alone: list[Round] = []
        arriving: list[Round] = []
        there: list[Round] = []
        said = {"connected": 0, "dropped": 0, "failed": 0}
        for number in range(rounds):
            alone.append(Round(port, pid, seconds, seed + number))
            first, then, told = among_strangers(port, pid, seconds, strangers, seed + number)
            arriving.append(first)
            there.append(then)
            said = {name: said[name] + told[name] for name in said}
        before, among, between = (pooled(each) for each in (alone, there, arriving))
        return {
            "p99_ratio": p(among, 99) / p(before, 99), "p50_alone_ms": p(before, 50), "p99_alone_ms": p(before, 99),
            "p50_ms": p(among, 50), "p99_ms": p(among, 99), "p99_arriving_ms": p(between, 99),
            "cores_alone": statistics.mean(each.cores for each in alone),
            "cores": statistics.mean(each.cores for each in there), "reports": len(among), "seconds": seconds,
            "errors": sum(each.errors for each in (*alone, *there, *arriving)), "strangers": strangers, **said,
            "memory_grew_mib": memory_mib(pid) - memory, "log_grew_bytes": log.stat().st_size - written,
        }  # fmt: skip


def pooled(rounds: list[Round]) -> list[float]:
    return [took for each in rounds for took in each.took]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer strangers, for a shorter time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--strangers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve, given.seed)
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if given.strangers is not None:
        asyncio.run(Strangers(given.port, given.strangers, given.seed).run(given.seconds))
        return
    os.environ["no_proxy"] = "*"
    seconds, strangers, rounds = (6.0, 2000, 2) if given.quick else (15.0, NUM_STRANGERS, 3)
    if hard != resource.RLIM_INFINITY and hard < strangers + 200:
        raise SystemExit(
            f"error: {strangers} connections need as many open files, and 'ulimit -Hn' is {hard}; raise it"
        )
    result = compare(seconds, strangers, rounds, given.seed)
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in result.items()}
    finish("strangers", rounded, given.quick)


if __name__ == "__main__":
    main()
