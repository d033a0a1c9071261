"""How the cluster page feels with a large cluster: `python benchmarks/page.py [--quick] [--repeats N]`.

10,000 jobs, 1,000 nodes and a day of history (`--quick`: 1,000 and 100) in the store of a service in its own process;
only the replicas are made up. Chromium opens the page with an empty cache, and the time until everything that it shows
first is there is taken; then it scrolls through nodes and jobs, while facts happen, and its main thread is traced.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from measure import finish
from playwright.sync_api import Browser, Page, sync_playwright

START_SECONDS = 600.0
WHEEL_STEPS = 60
STIR_SECONDS = 0.5
# The service is on this machine: whatever proxy its user has for others is not asked.
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
OWN = ("FunctionCall", "EvaluateScript", "FireAnimationFrame", "RunMicrotasks", "v8.callFunction")


def serve(home: Path, jobs: int, nodes: int) -> None:
    """Fill the home, and serve it."""
    from big_store import build_big_store

    from pollux import policies
    from pollux.service import Engine, ServiceSettings, SystemClock
    from pollux.service.server import serve as serve_module
    from pollux.testing.servers.service import FakeBackend

    big = build_big_store(home, jobs, nodes, now=time.time())

    def build(settings: ServiceSettings) -> Engine:
        store = serve_module.open_store(serve_module.store_file(home))
        telemetry = serve_module.open_telemetry(serve_module.telemetry_file(home))
        tokens = serve_module.Tokens(serve_module.operator_token(serve_module.token_file(home)), "benchmark")
        backend = FakeBackend(big.nodes, SystemClock(), by_itself=True)  # type: ignore[arg-type]
        return Engine(policies.create("pollux"), backend, store, telemetry, settings, tokens=tokens)

    serve_module.build_engine = build
    serve_module.serve(ServiceSettings(home=home, port=0, trigger="rounds", interval_seconds=60.0))


def started(home: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the service is, once it answers."""
    until = time.monotonic() + START_SECONDS
    while not (home / "service.json").exists():
        if process.poll() is not None or time.monotonic() > until:
            sys.exit("the service did not start")
        time.sleep(0.1)
    url: str = json.loads((home / "service.json").read_text())["url"]
    return url


def memory_mib(pid: int) -> dict[str, float]:
    """Resident memory of a process, now and at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {
        line.split(":")[0]: float(line.split()[1]) / 1024.0 for line in lines if line.startswith(("VmRSS", "VmHWM"))
    }
    return {"now": round(found["VmRSS"], 1), "most": round(found["VmHWM"], 1)}


def open_page(browser: Browser, url: str, state: Any) -> tuple[Page, float]:
    """The page in a browser that knows nothing but its cookie, and the milliseconds until it was ready."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, storage_state=state)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("html[data-ready]", state="attached", timeout=120_000)
    ready = float(page.evaluate("performance.getEntriesByName('pollux-ready')[0].startTime"))
    return page, ready


class Stir(threading.Thread):
    """Something happens twice a second: the page reads anew while it is scrolled, as on a cluster that works."""

    def __init__(self, url: str, token: str) -> None:
        super().__init__(daemon=True)
        self._url, self._token = url, token
        self._done = threading.Event()

    def run(self) -> None:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        weight = 1
        while not self._done.wait(STIR_SECONDS):
            weight = 1 + weight % 9
            body = json.dumps({"weight": weight}).encode()
            request = urllib.request.Request(f"{self._url}/v1/queues/stirred", body, headers, method="PUT")
            with contextlib.suppress(OSError), _DIRECTLY(request, timeout=30):
                pass

    def stop(self) -> None:
        self._done.set()
        self.join()


def scroll(browser: Browser, page: Page) -> tuple[float, float]:
    """The longest task of our own on the main thread while nodes and jobs are scrolled through; see below."""
    browser.start_tracing(page=page, categories=["toplevel", "devtools.timeline", "v8"])
    for place in ("#nodes", "#jobs-view"):
        page.locator(place).scroll_into_view_if_needed()
        page.locator(place).hover()
        for _ in range(WHEEL_STEPS):
            page.mouse.wheel(0, 400)
            page.wait_for_timeout(16)
    return longest_own_task(json.loads(browser.stop_tracing())["traceEvents"])


def longest_own_task(events: list[dict[str, Any]]) -> tuple[float, float]:
    """The longest task of a page's main thread in which a script ran: milliseconds by the clock, and of the CPU.

    Where others use the machine as well, the clock says more of them than of the page.
    """
    main = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and event["args"].get("name") == "CrRendererMain"
    }
    spans = [event for event in events if event.get("ph") == "X" and (event["pid"], event["tid"]) in main]
    tasks = [event for event in spans if event["name"] in ("RunTask", "ThreadControllerImpl::RunTask")]
    scripts = [event for event in spans if event["name"] in OWN]
    if not tasks or not scripts:
        sys.exit("the trace has no tasks or no scripts: this Chromium names them otherwise")
    own = [task for task in tasks if task["dur"] > 5000 and any(_within(script, task) for script in scripts)]
    clock = max((task["dur"] for task in own), default=0)
    cpu = max((task.get("tdur", task["dur"]) for task in own), default=0)
    return clock / 1000.0, cpu / 1000.0


def _within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    same = inner["pid"] == outer["pid"] and inner["tid"] == outer["tid"]
    return bool(same and outer["ts"] <= inner["ts"] <= outer["ts"] + outer["dur"])


def measure(browser: Browser, url: str, token: str, repeats: int) -> dict[str, Any]:
    """Times over several visits."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{url}/signin")
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"{url}/")
    page.wait_for_selector("html[data-ready]", state="attached", timeout=120_000)
    state = context.storage_state()
    context.close()
    ready: list[float] = []
    tasks: list[tuple[float, float]] = []
    kilobytes = 0.0
    stir = Stir(url, token)
    stir.start()
    for _ in range(repeats):
        page, milliseconds = open_page(browser, f"{url}/", state)
        ready.append(milliseconds)
        sizes = page.evaluate("performance.getEntriesByType('resource').map((one) => one.transferSize)")
        kilobytes = sum(sizes) / 1000.0
        tasks.append(scroll(browser, page))
        page.context.close()
    stir.stop()
    return {
        "interactive_ms": round(statistics.median(ready), 1),
        "interactive_ms_all": [round(value, 1) for value in ready],
        "longest_task_ms": round(statistics.median(clock for clock, _ in tasks), 1),
        "longest_task_ms_all": [round(clock, 1) for clock, _ in tasks],
        "longest_task_cpu_ms": round(statistics.median(cpu for _, cpu in tasks), 1),
        "first_load_kb": round(kilobytes, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(Path(chosen.serve[0]), int(chosen.serve[1]), int(chosen.serve[2]))
        return
    program = shutil.which("chromium") or sys.exit("there is no Chromium; run tools/install_chromium.sh")
    jobs, nodes = (1000, 100) if chosen.quick else (10_000, 1_000)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        process = subprocess.Popen([sys.executable, __file__, "--serve", str(home), str(jobs), str(nodes)])
        try:
            url = started(home, process)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
                found = measure(browser, url, (home / "token").read_text().strip(), chosen.repeats)
                browser.close()
            found["server_memory_mib"] = memory_mib(process.pid)
        finally:
            process.kill()
            process.wait()
    finish("page", {"jobs": jobs, "nodes": nodes, **found}, chosen.quick)


if __name__ == "__main__":
    main()
