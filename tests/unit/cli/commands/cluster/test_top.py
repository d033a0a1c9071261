"""`pollux top`: one picture at any size, and a service that goes away and comes back."""

import io
import json
import select

import pytest
from rich.console import Console

from pollux.cli.client.client import connect
from pollux.cli.commands.cluster.top import Listener, refreshed
from pollux.cli.display.top_view import EventLine, Frame, draw, fetch


@pytest.fixture
def service(fake):
    fake.answers["GET", "/v1/status"] = fake.status
    fake.answers["GET", "/v1/jobs"] = {
        "jobs": [fake.job(f"job-{number}") for number in range(30)],
        "next": None,
    }
    return fake


def picture(frame, width, height=None, heard=()):
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(draw(frame, heard, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_once(run, service):
    result = run("top", "--once")
    assert result.exit_code == 0, result.stderr
    for phrase in (
        "policy pollux by events, backend local", "up 1h 6min, decided 5s ago in 12 ms", "2 running, 1 queued",
        "node-a (h100)", "5/8", "█████░░░", "bert 1, resnet 4", "job-29", "last decisions", "job-9: shrunk 8→4",
    ):  # fmt: skip
        assert phrase in result.stdout, phrase


def test_json(run, service):
    document = json.loads(run("top", "--json").stdout)
    assert document["status"]["revision"] == 17
    assert len(document["jobs"]) == 30


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("height", [20, 24, 40])
def test_fits_its_screen(service, width, height):
    frame = fetch(connect(), 100)
    lines = picture(frame, width, height, [EventLine(1e9, "other", "given 2 GPUs " * 20)]).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any("more; 'pollux ls' has all of them" in line for line in lines)


def test_without_jobs_and_nodes(fake):
    fake.answers["GET", "/v1/status"] = {**fake.status, "nodes": [], "last_decision_at": None, "jobs_by_state": {}}
    fake.answers["GET", "/v1/jobs"] = {"jobs": [], "next": None}
    text = picture(fetch(connect(), 10), 80, 24)
    assert "no unfinished jobs" in text
    assert "no decision yet; jobs: none" in text


def test_a_service_that_goes_away_and_comes_back(service):
    client = connect()
    frame = fetch(client, 10)
    service.answers["GET", "/v1/status"] = (503, service.error("Unreachable", "restarting"))
    away = refreshed(client, frame, 10)
    assert "restarting; trying again" in away.lost
    assert refreshed(client, away, 10) is away
    text = picture(away, 80, 24)
    assert "trying again" in text
    assert "job-0" in text
    service.answers["GET", "/v1/status"] = service.status
    assert refreshed(client, away, 10).lost == ""


def test_a_first_picture_without_a_service():
    assert "http://somewhere" in picture(Frame("http://somewhere", lost="gone"), 80, 24)


def test_the_listener_keeps_what_happened_to_jobs(service):
    lines = [
        {"job_id": "a", "kind": "placed", "text": "given 2 GPUs"},
        {"job_id": "a", "kind": "reported", "text": "its agent reported a change"},
        {"job_id": None, "kind": "node-added", "text": "node"},
    ]
    data = json.dumps({"at": 5.0, "kind": "decision", "lines": lines})
    service.answers["GET", "/v1/events"] = f"id: 3\nevent: decision\ndata: {data}\n\n".encode()
    listener = Listener(connect())
    listener.start()
    assert select.select([listener.wakeup], [], [], 30)[0]
    listener.stop()
    listener.clear_wakeup()
    assert listener.last_lines()[0] == EventLine(5.0, "a", "given 2 GPUs")
    assert all(line.job == "a" and line.text == "given 2 GPUs" for line in listener.last_lines())
