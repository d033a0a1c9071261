"""Jobs on the nodes of a fleet report to the service under an address that the nodes can reach."""

import json
import ssl
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from tests.support.fleet import ProcessFleet

from pollux.backends.fleet.backend import FleetBackend
from pollux.backends.process.network import own_address
from pollux.service import ServiceSettings
from pollux.service.server.serve import serve
from pollux.testing.servers.service import result_of
from pollux.testing.waiting import PATIENCE_SECONDS, wait_until
from pollux.wire.job import JobRequest

TLS = Path(__file__).parents[2] / "unit" / "service" / "tls"
# Another address than the one that the service is known by on its own machine.
HEAD = own_address() if own_address() != "127.0.0.1" else "127.0.0.2"
REPORTS = """
import json
from dataclasses import asdict
from pollux.agent.distributed.environment import read_environment
from pollux.agent.reporting.report_client import Address, post_report
from pollux.wire.report import Report

here = read_environment()
print("reports to", here.url, "trusting", here.ca_file, len(here.ca))
report = Report(here.generation, 7, 70, 70.0, 1.0, 1, 1, 10, 10, 0)
address = Address(here.url, here.job, here.job_token, here.ca_file, here.ca)
print(post_report(address, json.dumps(asdict(report))))
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a service with one node, in a thread; it is stopped at the end."""
    hosts = ProcessFleet(tmp_path / "hosts", num_nodes=1, cold=True)
    running = []

    def started(head, **settings):
        home = tmp_path / "home"
        monkeypatch.setattr(
            "pollux.backends.create",
            lambda name, **options: FleetBackend(home, hosts, head=head, warm=False),
        )
        ready = threading.Event()
        found = []

        def on_ready(service):
            found.append(service)
            ready.set()

        given = ServiceSettings(home=home, port=0, min_gap_seconds=0.1, **settings)
        thread = threading.Thread(target=serve, args=(given, on_ready), daemon=True)
        thread.start()
        assert ready.wait(PATIENCE_SECONDS)
        running.append((found[0], thread))
        return found[0]

    yield started
    for service, thread in running:
        token = (service.home / "token").read_text().strip()
        asked = urllib.request.Request(
            f"{service.url}/v1/shutdown",
            json.dumps({"jobs": "stop"}).encode(),
            {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        trust = ssl.create_default_context(cafile=str(TLS / "localhost.pem"))
        urllib.request.urlopen(asked, timeout=PATIENCE_SECONDS, context=trust).close()
        thread.join(PATIENCE_SECONDS)
    hosts.kill_all()


def ran(service, tmp_path):
    script = tmp_path / "reports.py"
    script.write_text(REPORTS)
    engine = service.engine
    wait_until("node", lambda: engine.backend.inventory(), PATIENCE_SECONDS, 0.05)
    result_of(engine.submit(JobRequest(name="told", run=(sys.executable, str(script)), workdir=str(tmp_path))))
    ended = wait_until(
        "end", lambda: (job := engine.job("told")).state in ("succeeded", "failed") and job, PATIENCE_SECONDS, 0.1
    )
    return ended, engine.logs("told").text


def test_the_address_is_the_backends_head(start, tmp_path):
    service = start(HEAD, host="0.0.0.0", insecure_bind=True)
    assert service.url.startswith("http://127.0.0.1:")
    job, log = ran(service, tmp_path)
    assert job.state == "succeeded", log
    assert f"reports to http://{HEAD}:" in log
    assert "report_every_seconds" in log


def test_no_file_of_the_services_machine_is_needed_for_tls(start, tmp_path):
    service = start("127.0.0.1", host="localhost", tls_cert=TLS / "localhost.pem", tls_key=TLS / "localhost.key")
    (service.home / "ca.pem").unlink()
    job, log = ran(service, tmp_path)
    assert job.state == "succeeded", log
    assert "reports to https://localhost:" in log
    assert "trusting None" in log
