"""How long the command line takes to start: `pollux --help` and `pollux ls`, against importing what it is made with.

    python benchmarks/cli.py [--quick] [--seed N]

Both are given as ratios to `python -c "import typer, rich"`, run in turn with it, so that a busy machine
slows all three. `pollux ls` lists 20 jobs of a stand-in for a service, on loopback; its time is the whole command's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from measure import finish

from pollux.wire.codec import encode
from pollux.wire.status import Eta, JobStatus, ReasonStatus

REFERENCE = ("-c", "import typer, rich")
HELP = ("-m", "pollux", "--help")
LS = ("-m", "pollux", "ls")
JOBS = 20


def answer() -> bytes:
    now = time.time()
    jobs = [
        JobStatus(
            f"job-{number}", f"job-{number}", "running", "default", "normal", now - 900, 1, 8, 4, {"node": 4},
            goodput=1234.5, batch_size=1024, efficiency=0.8, progress=0.3, eta=Eta(now + 600, now + 1200),
            reason=ReasonStatus("grown", now, text="grew from 2 to 4: job-3 ended"),
        )
        for number in range(JOBS)
    ]  # fmt: skip
    return json.dumps({"jobs": encode(jobs), "next": None}).encode()


class StandIn(BaseHTTPRequestHandler):
    content = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, format: str, *values: object) -> None:
        pass


def seconds(words: tuple[str, ...], environment: Mapping[str, str]) -> float:
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, env=dict(environment)) as process:
        # A wait with a limit looks every 50 ms only.
        late = threading.Timer(120.0, process.kill)
        late.start()
        code = process.wait()
        taken = time.perf_counter() - began
        late.cancel()
    if code:
        raise subprocess.CalledProcessError(code, words)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 25")
    parser.add_argument("--seed", type=int, default=1, help="accepted like everywhere; nothing here is random")
    arguments = parser.parse_args()
    StandIn.content = answer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    times: dict[tuple[str, ...], list[float]] = {REFERENCE: [], HELP: [], LS: []}
    with tempfile.TemporaryDirectory() as home:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        Path(home, "service.json").write_text(json.dumps({"url": url}), encoding="utf-8")
        environment = {**os.environ, "POLLUX_HOME": home}
        environment.pop("POLLUX_SERVER", None)
        # As for most people: what the first round has compiled is kept, of the reference and of ours.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for words in times:
            seconds(words, environment)
        for _ in range(5 if arguments.quick else 25):
            for words, taken in times.items():
                taken.append(seconds(words, environment))
    server.shutdown()
    typical = {words: statistics.median(taken) for words, taken in times.items()}
    for words, taken_seconds in typical.items():
        print(f"{' '.join(words):<28} {taken_seconds * 1e3:6.0f} ms", flush=True)
    result = {
        "help_ratio": round(typical[HELP] / typical[REFERENCE], 2),
        "ls_ratio": round(typical[LS] / typical[REFERENCE], 2),
        "reference_ms": round(typical[REFERENCE] * 1e3, 1),
    }
    finish("cli", result, arguments.quick)


if __name__ == "__main__":
    main()
