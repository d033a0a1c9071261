"""`pollux submit --ship`: the working folder goes first, in pieces, and the job names where it went."""

import base64
import json
import sys
from pathlib import Path

import pytest

from pollux.cli import shipping
from pollux.core.errors import InvalidInput
from pollux.service.packages import Packages


@pytest.fixture
def service(fake, tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("print('x')\n" * 50)
    monkeypatch.chdir(work)
    packages = Packages(tmp_path / "far")

    def take(query, body):
        data = base64.b64decode(body["data"])
        have, folder = packages.add(body["digest"], body["size"], body["offset"], data)
        return {"have": have, "folder": folder}

    fake.answers["POST", "/v1/packages"] = take
    fake.answers["POST", "/v1/jobs"] = lambda query, body: (201, {"job": fake.job(body["name"]), "plan": fake.plan})
    return fake


def job_of(service):
    return [body for path, body in service.calls("POST") if path == "/v1/jobs"][-1]


def test_the_folder_goes_first(run, service, monkeypatch):
    monkeypatch.setattr(shipping, "_PIECE_BYTES", 64)
    result = run("submit", "--ship", "--", sys.executable, "train.py")
    assert result.exit_code == 0, result.stderr
    folder = Path(job_of(service)["workdir"])
    assert (folder / "train.py").read_text().startswith("print('x')")
    assert folder.parent.name == "packages"
    pieces = [body for path, body in service.calls("POST") if path == "/v1/packages"]
    assert len(pieces) > 1
    run("submit", "--ship", "--", sys.executable, "train.py")
    assert job_of(service)["workdir"] == str(folder)
    assert len([1 for path, _ in service.calls("POST") if path == "/v1/packages"]) == len(pieces) + 1


def test_without_the_option_nothing_is_sent(run, service):
    assert run("submit", "--", sys.executable, "train.py").exit_code == 0
    assert [path for path, _ in service.calls("POST")] == ["/v1/jobs"]
    assert job_of(service)["workdir"] == str(Path.cwd())


def test_a_dry_run_sends_nothing_and_plans_what_is_there(run, service, tmp_path):
    service.answers["POST", "/v1/plan"] = lambda query, body: service.plan
    result = run("submit", "--ship", "--dry-run", "--", sys.executable, "train.py")
    assert result.exit_code == 0, result.stderr
    assert f"would send {Path.cwd()} (" in result.stdout
    assert f'"workdir": "{Path.cwd()}"' in result.stdout
    ((path, asked),) = service.calls("POST")
    assert (path, asked["data"]) == ("/v1/packages", "")
    assert not [*(tmp_path / "far").rglob("train.py")]
    told = json.loads(run("submit", "--ship", "--dry-run", "--json", "--", sys.executable, "train.py").stdout)
    assert told["planned"][0]["plan"] is None
    run("submit", "--ship", "--", sys.executable, "train.py")
    result = run("submit", "--ship", "--dry-run", "--", sys.executable, "train.py")
    assert "would send" not in result.stdout
    assert service.calls("POST")[-1][0] == "/v1/plan"
    assert service.calls("POST")[-1][1]["workdir"] == job_of(service)["workdir"]


def test_checkpoints_inside_go_to_the_services_own_place(run, service, tmp_path):
    Path("inside.yaml").write_text(f"run: {sys.executable} train.py\ncheckpoint: {{dir: saved, keep: 2}}\n")
    assert run("submit", "--ship", "inside.yaml").exit_code == 0
    assert job_of(service)["checkpoint"] == {"keep": 2}
    Path("outside.yaml").write_text(f"run: {sys.executable} train.py\ncheckpoint: {{dir: {tmp_path}/shared}}\n")
    assert run("submit", "--ship", "outside.yaml").exit_code == 0
    assert job_of(service)["checkpoint"] == {"dir": f"{tmp_path}/shared"}


def test_a_service_that_never_has_it_all_is_given_up(service):
    class Forgetful:
        def post(self, path, body):
            return {"have": 0, "folder": None}

    with pytest.raises(InvalidInput, match="again"):
        shipping._send(Forgetful(), "0" * 64, b"abc")
