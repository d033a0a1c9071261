"""A service with a certificate of its own making: commands and a job's agent reach it without being told more."""

import json
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pollux.cli.main import app
from pollux.testing.waiting import PATIENCE_SECONDS, wait_until

TLS = Path(__file__).parents[2] / "unit" / "service" / "tls"

REPORTS = """
import json
from dataclasses import asdict
from pollux.agent.distributed.environment import read_environment
from pollux.agent.reporting.report_client import Address, post_report
from pollux.wire.report import Report

here = read_environment()
assert here.url.startswith("https://"), here
report = Report(here.generation, 7, 70, 70.0, 1.0, 1, 1, 10, 10, 0)
print(post_report(Address(here.url, here.job, here.job_token, here.ca_file), json.dumps(asdict(report))))
"""


def pollux(home, *words, code: int | None = 0):
    environment = {"POLLUX_HOME": str(home), "POLLUX_SERVER": None, "POLLUX_TOKEN": None}
    done = CliRunner().invoke(app, [str(word) for word in words], prog_name="pollux", env=environment)
    assert code is None or done.exit_code == code, f"{words}: {done.exit_code}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture
def home():
    with tempfile.TemporaryDirectory(prefix="pollux-") as folder:
        path = Path(folder) / "h"
        yield path
        pollux(path, "down", code=None)
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(json.loads((path / "service.json").read_text())["pid"], signal.SIGKILL)


def test_a_job_reports_over_tls(home, tmp_path):
    certificate = ("--tls-cert", TLS / "localhost.pem", "--tls-key", TLS / "localhost.key")
    started = pollux(home, "up", "--slots", 1, "--port", 0, "--detach", *certificate, "--json")
    assert json.loads(started.stdout)["url"].startswith("https://localhost:")
    (tmp_path / "reports.py").write_text(REPORTS)
    pollux(home, "submit", "--name", "told", "--", sys.executable, tmp_path / "reports.py")

    def ended():
        job = json.loads(pollux(home, "show", "told", "--json").stdout)["job"]
        return job if job["state"] in ("succeeded", "failed") else None

    job = wait_until("end", ended, PATIENCE_SECONDS, 0.2)
    log = pollux(home, "logs", "told").stdout
    assert job["state"] == "succeeded", log
    assert "report_every_seconds" in log
