"""What is degraded is said wherever people look: at the start, in `top` and `ls`, and for a job that waits."""

import io
import json
import threading

import pytest
from rich.console import Console

from pollux.cli.client.client import connect
from pollux.cli.commands.service import up
from pollux.cli.display.top_view import draw, fetch
from pollux.cli.display.warnings_output import warning_lines
from pollux.service.settings import ServiceSettings

LINE = "warning: Ray does not answer at head:6379: check 'ray status'"


@pytest.fixture
def service(fake):
    fake.degraded = {**fake.status, "warnings": ["Ray does not answer at head:6379: check 'ray status'"]}
    fake.answers["GET", "/v1/status"] = fake.degraded
    fake.answers["GET", "/v1/jobs"] = {"jobs": [fake.job("bert", state="queued")], "next": None}
    return fake


def test_lists_and_pictures(run, service):
    assert run("ls").stderr == f"{LINE}\n"
    service.answers["GET", "/v1/jobs"] = {"jobs": [], "next": None}
    assert run("ls").stderr == f"{LINE}\n"
    assert LINE in run("top", "--once").stdout
    assert json.loads(run("ls", "--json").stdout) == {"jobs": [], "next": None}


def test_a_job_that_waits(run, service):
    def shown(state):
        job = service.job("bert", state=state)
        service.answers["GET", "/v1/jobs/bert"] = {"job": job, "request": {}, "events": [], "eta_quality": {}}
        return run("show", "bert").stderr

    assert shown("queued") == shown("starting") == f"{LINE}\n"
    assert shown("running") == ""
    answer = {"job_id": "bert", "text": "It waits.", "next_step": "", "reason": None}
    service.answers["GET", "/v1/jobs/bert/explain"] = answer
    assert run("explain", "bert").stderr == f"{LINE}\n"


def test_nothing_is_said_where_all_is_well(run, fake):
    fake.answers["GET", "/v1/jobs"] = {"jobs": [], "next": None}
    for answer in (fake.status, (503, fake.error("StoreFailed", "the disk is full"))):
        fake.answers["GET", "/v1/status"] = answer
        assert run("ls").stderr == ""


def test_many_are_counted():
    lines = warning_lines({"warnings": [f"node {number}" for number in range(20)]})
    assert len(lines) == 8
    assert "and 13 more" in lines[-1]


@pytest.mark.parametrize("height", [24, 40])
def test_a_picture_with_warnings_fits(service, height):
    service.answers["GET", "/v1/status"] = {**service.degraded, "warnings": ["word " * 40] * 2}
    service.answers["GET", "/v1/jobs"] = {"jobs": [service.job(f"job-{n}") for n in range(30)], "next": None}
    console = Console(file=io.StringIO(), width=80, height=height)
    console.print(draw(fetch(connect(), 100), (), 80, height))
    assert len(console.file.getvalue().splitlines()) <= height


def test_the_greeting(service, tmp_path, monkeypatch, capsys):
    settings = ServiceSettings(home=service.home)
    assert f"  {LINE}" in up.greeting("http://x", settings, service.degraded)
    answers = [{**service.status, "nodes": []}, {**service.status, "nodes": []}, {**service.degraded, "nodes": []}]
    service.answers["GET", "/v1/status"] = lambda query, body: answers.pop(0)
    monkeypatch.setattr(up, "_POLL_SECONDS", 0.001)
    up._greet(settings, True, threading.Lock())
    assert json.loads(capsys.readouterr().out)["status"]["warnings"] == service.degraded["warnings"]
    # An engine that says nothing at all is not waited for without end.
    monkeypatch.setattr(up, "_ENGINE_SECONDS", 0.0)
    service.answers["GET", "/v1/status"] = {**service.status, "nodes": []}
    up._greet(settings, False, threading.Lock())
    assert "no nodes yet" in capsys.readouterr().out
