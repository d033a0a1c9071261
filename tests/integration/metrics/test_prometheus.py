"""The dashboard's queries against a real Prometheus server that scrapes a real service: every one returns data."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pollux import policies
from pollux.core import Node
from pollux.service import Engine, ServiceSettings, SystemClock, Tokens
from pollux.service.presenters.metrics import NAMES
from pollux.service.server import serve
from pollux.store import MemoryStore, MemoryTelemetry
from pollux.testing.ports import free_port
from pollux.testing.servers.service import SAMPLE_MODEL, FakeBackend, result_of, sample_report
from pollux.testing.waiting import PATIENCE_SECONDS, wait_until
from pollux.wire.job import JobRequest
from pollux.wire.report import NoiseReport

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "pollux.json").read_text())
STARTING = 503  # what Prometheus answers between the moment it listens and the one its data is open


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A real service over HTTP with replicas on paper: jobs that train, one that waits, one that is done."""
    home = tmp_path_factory.mktemp("home")
    backend = FakeBackend([Node("node-0", 4, "cpu")], SystemClock(), by_itself=True)
    backend.false_alarms = backend.refusals = 0

    def build(settings: ServiceSettings) -> Engine:
        viewer = serve.operator_token(home / "viewer-token")
        tokens = Tokens(serve.operator_token(home / "token"), "secret", viewer)
        return Engine(policies.create("pollux"), backend, MemoryStore(), MemoryTelemetry(), settings, tokens=tokens)

    ready: list[serve.Service] = []
    heard = threading.Event()

    def on_ready(found: serve.Service) -> None:
        ready.append(found)
        heard.set()

    patch = pytest.MonkeyPatch()
    patch.setattr(serve, "build_engine", build)
    settings = ServiceSettings(home=home, port=0, min_gap_seconds=0.05, store="memory")
    thread = threading.Thread(target=serve.serve, args=(settings, on_ready), daemon=True)
    thread.start()
    assert heard.wait(PATIENCE_SECONDS)
    try:
        train(ready[0].engine, backend, home)
        yield ready[0]
    finally:
        request(ready[0].url + "/v1/shutdown", (home / "token").read_text().strip(), b'{"jobs": "keep"}')
        thread.join(PATIENCE_SECONDS)
        patch.undo()
    assert not thread.is_alive()


def train(engine: Engine, backend: FakeBackend, home: Path) -> None:
    def submit(name: str, **limits: Any) -> None:
        result_of(engine.submit(JobRequest(name=name, run=("sleep", "1"), workdir=str(home), queue="vision", **limits)))
        wait_for(lambda: engine.job(name).gpus > 0 or name == "waits")

    def report(name: str, progress: float, **more: Any) -> None:
        wait_for(lambda: engine.job(name).state == "running")
        generation = engine.job(name).generation
        result_of(engine.report(name, sample_report(generation, progress, model=SAMPLE_MODEL, loss=1.0, **more)))

    submit("done", min_gpus=1, max_gpus=1)
    for progress in (150.0, 300.0, 600.0, 1000.0):
        report("done", progress, final=progress == 1000.0)
    backend.ended("done", "succeeded")
    submit("a", min_gpus=1, max_gpus=2)
    report("a", 200.0, noise=NoiseReport(50.0, 40.0, 60.0, 9))
    submit("b", min_gpus=2, max_gpus=2)
    report("b", 100.0)
    submit("waits", min_gpus=4, max_gpus=4)


def request(url: str, token: str = "", body: bytes | None = None) -> bytes:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=PATIENCE_SECONDS) as answer:
        found: bytes = answer.read()
        return found


def wait_for(condition: Any) -> None:
    wait_until("value", condition)


@pytest.fixture(scope="module")
def program():
    script = ROOT / "tools" / "install_prometheus.sh"
    done = subprocess.run([script], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(done.stderr.strip())
    return Path(done.stdout.split()[-1])


@pytest.fixture(scope="module")
def prometheus(service, program, tmp_path_factory):
    """Asks a Prometheus that scrapes the service every second, as docs/metrics.md says."""
    folder = tmp_path_factory.mktemp("prometheus")
    address = urllib.parse.urlsplit(service.url).netloc
    text = (ROOT / "docs" / "metrics.md").read_text()
    config = re.search(r"```yaml\n(scrape_configs:.*?)```", text, re.DOTALL).group(1)
    config = config.replace("/path/to/viewer-token", str(service.home / "viewer-token"))
    config = config.replace("127.0.0.1:7341", address)
    (folder / "prometheus.yml").write_text(f"global: {{scrape_interval: 1s}}\n{config}")
    port = free_port()
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [
            str(program), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
        ],
        stdout=log, stderr=log, cwd=folder,
    )  # fmt: skip
    base = f"http://127.0.0.1:{port}/api/v1"

    def ask(path: str, **query: str) -> Any:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return json.loads(request(f"{base}/{path}?{urllib.parse.urlencode(query)}"))["data"]
        except urllib.error.HTTPError as error:
            if error.code == STARTING:
                return None
            raise AssertionError(error.read().decode()) from None
        except (urllib.error.URLError, ConnectionError):
            return None

    yield ask
    process.kill()
    process.wait(PATIENCE_SECONDS)
    log.close()


def expressions() -> list[str]:
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [expr.replace("$instance", ".*").replace("$queue", ".*") for expr in found]


def test_every_query_of_the_dashboard_returns_data(prometheus):
    asked = expressions()
    assert len(asked) >= 20

    def missing():
        answers = {expr: prometheus("query", query=expr) for expr in asked}
        return [expr for expr, answer in answers.items() if not answer or not answer["result"]]

    wait_until("data", lambda: not missing(), PATIENCE_SECONDS, 0.5, missing)


def test_the_choices_of_the_dashboard_have_values(prometheus):
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] != "query":
            continue
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()
        wait_for(lambda m=metric, n=label: prometheus(f"label/{n}/values", **{"match[]": m}))


def test_every_documented_number_is_scraped(prometheus, service):
    wait_for(lambda: set(NAMES) <= set(prometheus("label/__name__/values") or ()))
    assert "pollux_gpus" in NAMES


def test_numbers_are_those_of_the_service(prometheus, service):
    def value(query: str) -> float | None:
        found = prometheus("query", query=query)
        return float(found["result"][0]["value"][1]) if found and found["result"] else None

    wait_for(lambda: value("pollux_gpus") == 4.0)
    wait_for(lambda: value('sum(pollux_job_gpus{queue="vision"})') == result_of(service.engine.status()).nodes[0].used)
    wait_for(lambda: value('pollux_jobs{state="succeeded"}') == 1.0)


def test_the_text_is_as_prometheus_wants_it(service, program):
    text = request(service.url + "/metrics", (service.home / "viewer-token").read_text().strip())
    done = subprocess.run(
        [program.with_name("promtool"), "check", "metrics"],
        input=text,
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
