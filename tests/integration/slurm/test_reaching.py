"""A service as the page starts it for nodes on other machines: they reach it at another address than the loopback."""

import json

import pytest
from tests.integration.slurm.service import OPTIONS, Service

from pollux.backends.process.network import own_address

# Where there is no network, another address of the loopback stands for it.
HEAD = own_address() if own_address() != "127.0.0.1" else "127.0.0.2"
REPORTS = """
import json
from dataclasses import asdict
from pollux.agent.distributed.environment import read_environment
from pollux.agent.reporting.report_client import Address, post_report
from pollux.wire.report import Report

here = read_environment()
print("reports to", here.url)
report = Report(here.generation, 7, 70, 70.0, 1.0, 1, 1, 10, 10, 0)
print(post_report(Address(here.url, here.job, here.job_token, here.ca_file, here.ca), json.dumps(asdict(report))))
"""


class Reached(Service):
    """Listens where its one node reaches it."""

    def up(self):
        options = {**OPTIONS, "nodes": "1", "pool": self.home / "pool", "head": HEAD}
        words = [word for name, value in options.items() for word in ("--option", f"{name}={value}")]
        words += ["--host", HEAD] if HEAD == "127.0.0.2" else ["--insecure-bind"]
        self.pollux("up", "--detach", "--port", "0", "--backend", "slurm", "--slots", str(self.slots), *words)
        told = json.loads((self.home / "service.json").read_text())
        self.url, self.pid = told["url"], told["pid"]
        self.token = (self.home / "token").read_text().strip()


@pytest.fixture
def service(slurm, tmp_path):
    running = Reached(tmp_path / "home", slurm, slots=2)
    try:
        yield running
    finally:
        running.end()


def test_a_job_reports_from_its_node(service):
    assert service.url.startswith(f"http://{HEAD}:")
    service.wait("node", service.nodes)
    script = service.home / "reports.py"
    script.write_text(REPORTS)
    service.submit("told", [script], 1)
    service.until("told", "end", lambda job: job["state"] == "succeeded")
    text = service.call("/v1/jobs/told/logs?replica=0")["text"]
    assert f"reports to {service.url}" in text
    assert "report_every_seconds" in text
