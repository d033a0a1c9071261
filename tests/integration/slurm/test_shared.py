"""Folders that a real node does not share are refused when a job is submitted, in one line that says where."""

import json
import sys
import urllib.error

import pytest
from tests.integration.slurm.service import Service

BLIND = "node2"


@pytest.fixture(scope="module")
def hidden(slurm, tmp_path_factory):
    """A folder that one node has, and in it nothing of what is here."""
    folder = tmp_path_factory.mktemp("hidden")
    restart(slurm, [folder])
    yield folder
    restart(slurm, [])


def restart(slurm, hide):
    slurm.kill_node(BLIND)
    slurm.start_node(BLIND, hide)
    slurm.wait_for(lambda: slurm.states()[BLIND] == "idle", "node that starts again")


@pytest.fixture(scope="module")
def service(slurm, hidden, tmp_path_factory):
    home = tmp_path_factory.mktemp("service") / "home"
    options = {"nodes": "2", "words": "--exclude=node3"}
    running = Service(home, slurm, slots=1, options=options)
    try:
        running.wait("two nodes", lambda: running.nodes().keys() == {"node1", BLIND})
        yield running
    finally:
        running.end()


@pytest.fixture(params=["workdir", "checkpoint"])
def job(request, service, hidden):
    """What a job asks for, and the folder of it that cannot be used."""
    if request.param == "workdir":
        return {"workdir": str(hidden)}, hidden
    return {"workdir": str(service.home), "checkpoint": {"dir": str(hidden / "ckpt")}}, hidden / "ckpt"


def explained(text, folder):
    assert f"folder '{folder}' is not the same on node '{BLIND}' as here" in text
    assert "put it on a file system that all nodes share" in text


def test_the_service_refuses_it(service, job):
    asked, folder = job
    before = service.jobs()
    with pytest.raises(urllib.error.HTTPError) as refused:
        service.submit("apart", ["-c", "pass"], 1, **asked)
    assert refused.value.code == 422
    explained(json.loads(refused.value.read())["error"]["message"], folder)
    assert service.jobs() == before


def test_the_command_line_says_so_in_one_line(service, job, tmp_path):
    asked, folder = job
    lines = [
        "name: apart",
        "gpus: 1",
        f"workdir: {asked['workdir']}",
        "run: " + json.dumps([sys.executable, "-c", "pass"]),
    ]
    lines += [f"checkpoint: {{dir: {folder}}}"] if "checkpoint" in asked else []
    (tmp_path / "job.yaml").write_text("\n".join(lines) + "\n")
    done = service.command("submit", "--no-ship", str(tmp_path / "job.yaml"))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    explained(line, folder)


def test_a_working_folder_is_sent_to_where_all_nodes_see_it(service, hidden, tmp_path):
    (hidden / "told.txt").write_text("of this folder")
    code = "import os, time; print(open('told.txt').read()); time.sleep(1)"
    lines = ["name: sent", "gpus: 2", f"workdir: {hidden}", "run: " + json.dumps([sys.executable, "-c", code])]
    (tmp_path / "job.yaml").write_text("\n".join(lines) + "\n")
    done = service.command("submit", str(tmp_path / "job.yaml"))
    assert done.returncode == 0, done.stderr
    assert f"sent: {hidden} does not exist where jobs run: sent (" in done.stdout
    job = service.until("sent", "end", lambda job: job["state"] == "succeeded")
    assert job["crashes"] == 0
    for replica in range(2):
        assert "of this folder" in service.call(f"/v1/jobs/sent/logs?replica={replica}")["text"]


def test_a_folder_that_both_nodes_have_is_taken(service, tmp_path):
    service.submit("together", ["-c", "pass"], 2, workdir=str(tmp_path), checkpoint={"dir": str(tmp_path / "ckpt")})
    job = service.until("together", "end", lambda job: job["state"] == "succeeded")
    assert job["crashes"] == 0
