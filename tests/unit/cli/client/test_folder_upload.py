"""`pollux submit --ship`: the working folder goes first, in pieces, and the job names where it went.

Unasked where the service says that it has no such folder.
"""

import base64
import json
import sys
from pathlib import Path

import pytest

from pollux.cli.client import folder_upload
from pollux.core.errors import InvalidInput
from pollux.service.http.uploads import Packages

RUN = "run: " + json.dumps([sys.executable, "train.py"])


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
    monkeypatch.setattr(folder_upload, "_PIECE_BYTES", 64)
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
    Path("inside.yaml").write_text(f"{RUN}\ncheckpoint: {{dir: saved, keep: 2}}\n")
    assert run("submit", "--ship", "inside.yaml").exit_code == 0
    assert job_of(service)["checkpoint"] == {"keep": 2}
    Path("outside.yaml").write_text(f"{RUN}\ncheckpoint: {{dir: {tmp_path}/shared}}\n")
    assert run("submit", "--ship", "outside.yaml").exit_code == 0
    assert job_of(service)["checkpoint"] == {"dir": f"{tmp_path}/shared"}


def test_a_service_that_never_has_it_all_is_given_up(service):
    class Forgetful:
        def post(self, path, body):
            return {"have": 0, "folder": None}

    with pytest.raises(InvalidInput, match="again"):
        folder_upload._send(Forgetful(), "0" * 64, b"abc")


@pytest.fixture
def far(service, tmp_path):
    """A service on another machine, which sees nothing but what was sent to it."""

    def found(answer):
        def said(query, body):
            if Path(body["workdir"]).is_relative_to(tmp_path / "far"):
                return answer(query, body)
            return 422, service.error("WorkdirMissing", f"workdir {body['workdir']} does not exist; try --ship")

        return said

    service.answers["POST", "/v1/jobs"] = found(service.answers["POST", "/v1/jobs"])
    service.answers["POST", "/v1/plan"] = found(lambda query, body: service.plan)
    return service


def test_a_folder_that_is_not_there_is_sent_unasked_and_that_is_said(run, far):
    result = run("submit", "--", sys.executable, "train.py")
    assert result.exit_code == 0, result.stderr
    folder = Path(job_of(far)["workdir"])
    assert (folder / "train.py").read_text().startswith("print('x')")
    said, *_ = result.stdout.splitlines()
    assert said.startswith(f"train: {Path.cwd()} does not exist where jobs run: sent (0.")
    assert said.endswith(f" KiB packed) to {far.url}, as {folder}")
    again = run("submit", "--", sys.executable, "train.py")
    assert f"sent before to {far.url}, as {folder}" in again.stdout


def test_what_is_said_of_it_is_no_part_of_the_document(run, far):
    result = run("submit", "--json", "--", sys.executable, "train.py")
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["submitted"]) == 1
    assert " does not exist where jobs run: sent (" in result.stderr


def test_who_wants_nothing_sent_hears_of_the_option(run, far):
    for words in ((), ("--dry-run",)):
        result = run("submit", "--no-ship", *words, "--", sys.executable, "train.py")
        assert result.exit_code == 2
        assert "--ship" in result.stderr
    assert "/v1/packages" not in [path for path, _ in far.calls("POST")]


def test_a_plan_for_a_folder_that_is_not_there_sends_nothing(run, far, tmp_path):
    result = run("submit", "--dry-run", "--", sys.executable, "train.py")
    assert result.exit_code == 0, result.stderr
    assert f"would send {Path.cwd()} (" in result.stdout
    assert not [*(tmp_path / "far").rglob("train.py")]
    run("submit", "--", sys.executable, "train.py")
    result = run("submit", "--dry-run", "--", sys.executable, "train.py")
    assert "would send" not in result.stdout
    assert far.calls("POST")[-1][1]["workdir"] == job_of(far)["workdir"]


@pytest.mark.parametrize("home", [".", "own"])
def test_a_home_folder_is_sent_only_when_that_is_said(run, far, monkeypatch, home):
    monkeypatch.setenv("HOME", str(Path.cwd() / home))
    for words in ((), ("--dry-run",)):
        result = run("submit", *words, "--", sys.executable, "train.py")
        assert result.exit_code == 2
        assert "a home folder is sent only with --ship" in result.stderr
        assert "--ship" in result.stderr
    assert "/v1/packages" not in [path for path, _ in far.calls("POST")]
    assert run("submit", "--ship", "--", sys.executable, "train.py").exit_code == 0
    monkeypatch.setenv("HOME", str(Path.cwd().parent))
    assert run("submit", "--", sys.executable, "train.py").exit_code == 0, "what lies below one is sent"


def test_who_has_no_home_folder_has_none_to_be_sent(run, far, monkeypatch):
    """As users of some containers, of whom the system knows nothing but a number."""
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert run("submit", "--", sys.executable, "train.py").exit_code == 0


def test_what_is_too_large_is_not_sent_and_the_reason_says_why_it_would_be(run, far, monkeypatch):
    monkeypatch.setattr("pollux.storage.archive.MAX_PACKED_BYTES", 10)
    result = run("submit", "--", sys.executable, "train.py")
    assert result.exit_code == 2
    assert f"{Path.cwd()} does not exist where jobs run, and it cannot be sent: " in result.stderr
    assert ".polluxignore" in result.stderr
    assert "/v1/packages" not in [path for path, _ in far.calls("POST")]


def test_what_is_refused_when_it_was_sent_is_refused(run, far):
    far.answers["POST", "/v1/jobs"] = 422, far.error("WorkdirMissing", "nodes do not see it")
    result = run("submit", "--", sys.executable, "train.py")
    assert result.exit_code == 2
    assert "error: nodes do not see it" in result.stderr
    assert [path for path, _ in far.calls("POST")].count("/v1/jobs") == 2


def test_several_jobs_of_one_folder_go_with_paths_from_their_files(run, far, tmp_path, monkeypatch):
    for name in ("one", "two"):
        Path(f"{name}.yaml").write_text(f"{RUN}\nworkdir: .\ncheckpoint: {{dir: saved}}\n")
    folder = Path.cwd()
    monkeypatch.chdir(tmp_path)
    result = run("submit", "work/one.yaml", "work/two.yaml")
    assert result.exit_code == 0, result.stderr
    jobs = [body for path, body in far.calls("POST") if path == "/v1/jobs"]
    refused, sent = jobs[::2], jobs[1::2]
    assert {job["workdir"] for job in refused} == {str(folder)}
    assert [job["name"] for job in sent] == ["one", "two"]
    assert len({job["workdir"] for job in sent} - {str(folder)}) == 1
    assert all("checkpoint" not in job for job in sent)
