"""`pollux submit`: what is sent for files and commands, what options change, and the plan in words."""

import json
import sys

import pytest

from pollux.cli.commands.jobs import logs
from pollux.cli.display.plan_text import plan_lines
from pollux.core.errors import Conflict

RUN = "run: " + json.dumps([sys.executable, "train.py"])


@pytest.fixture
def service(fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logs, "_POLL_SECONDS", 0.0)
    (tmp_path / "train.py").write_text("")

    def submitted(query, body):
        return (201, {"job": fake.job(body["name"]), "plan": {**fake.plan, "job_id": body["name"]}})

    fake.answers["POST", "/v1/jobs"] = submitted
    fake.answers["POST", "/v1/plan"] = lambda query, body: {**fake.plan, "job_id": body["name"]}
    return fake


def write(path, text):
    path.write_text(text)
    return path


def test_a_file(run, service, tmp_path):
    file = write(tmp_path / "resnet.yaml", f"{RUN}\ngpus: 1..4\nqueue: vision\n")
    result = run("submit", file)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        "resnet: starts now on 2 GPUs\n  predicted: 1 to 4 GPUs; ends in 1h–2h; 1h 30min if it keeps 2\n"
    )
    [(path, body)] = service.calls("POST")
    assert path == "/v1/jobs"
    assert (body["name"], body["gpus"], body["queue"], body["workdir"]) == ("resnet", "1..4", "vision", str(tmp_path))
    assert "Idempotency-Key" in service.asked[0][4]


def test_options_replace_what_is_in_the_file(run, service, tmp_path, monkeypatch):
    monkeypatch.setenv("FROM_HERE", "yes")
    file = write(tmp_path / "a.yaml", f"{RUN}\ngpus: 1..4\nenv: {{SEED: 1, KEPT: 2}}\n")
    options = "--name other --gpus 2..8 --queue q --priority high --env SEED=7 -e FROM_HERE --after x --after y"
    assert run("submit", *options.split(), file).exit_code == 0
    [(_, body)] = service.calls("POST")
    assert (body["name"], body["gpus"], body["queue"], body["priority"]) == ("other", "2..8", "q", "high")
    assert body["env"] == {"SEED": "7", "KEPT": "2", "FROM_HERE": "yes"}
    assert body["after"] == ["x", "y"]


def test_a_command_after_dashes(run, service, tmp_path):
    words = [sys.executable, "train.py", "--epochs", "3", "--gpus", "9", "--", "x"]
    result = run("submit", "--gpus", "1..2", "--json", "--", *words)
    assert result.exit_code == 0, result.stderr
    [(_, body)] = service.calls("POST")
    assert body["run"] == words
    assert (body["gpus"], body["name"], body["workdir"]) == ("1..2", "train", str(tmp_path))
    assert json.loads(result.stdout)["submitted"][0]["plan"]["job_id"] == "train"


def test_dry_run_prints_plan_and_request_and_submits_nothing(run, service):
    result = run("submit", "--dry-run", "--", sys.executable, "train.py")
    assert result.stdout.startswith("train: would start now on 2 GPUs\n")
    assert json.loads(result.stdout[result.stdout.index("\n{") :])["run"] == [sys.executable, "train.py"]
    document = json.loads(run("submit", "--dry-run", "--json", "--", sys.executable, "train.py").stdout)
    assert document["planned"][0]["plan"]["gpus"] == 2
    assert [path for path, _ in service.calls("POST")] == ["/v1/plan", "/v1/plan"]


def test_several_files_are_all_checked_before_one_is_sent(run, service, tmp_path):
    good = write(tmp_path / "good.yaml", f"{RUN}\n")
    bad = write(tmp_path / "bad.yaml", f"{RUN}\ngpu: 3\n")
    missing = write(tmp_path / "missing.yaml", f"run: {json.dumps([sys.executable, 'absent.py'])}\n")
    other = write(tmp_path / "other.yaml", f"{RUN}\n")
    result = run("submit", good, bad)
    assert result.exit_code == 2
    assert "bad.yaml" in result.stderr
    assert "gpu" in result.stderr
    assert "absent.py" in run("submit", good, missing).stderr
    assert service.asked == []
    assert run("submit", good, other).exit_code == 0
    assert [body["name"] for _, body in service.calls("POST")] == ["good", "other"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "after '--'"),
        (["--"], "after '--'"),
        (["a.yaml", "--", "true"], "after '--'"),
        (["none.yaml"], "none.yaml"),
        (["--name", "x", "a.yaml", "b.yaml"], "--name is 'x' for 2 files"),
        (["--gpus", "0..4", "--", "true"], "0..4"),
        (["--priority", "urgent", "--", "true"], "urgent"),
        (["--env", "NOT_SET_ANYWHERE", "--", "true"], "NOT_SET_ANYWHERE"),
        (["--env", "RANK=1", "--", "true"], "RANK"),
        (["--", "no-such-command-anywhere"], "no-such-command-anywhere"),
        (["--follow", "--json", "--", "true"], "--follow"),
    ],
)
def test_refusals_are_one_line_and_nothing_is_sent(run, service, words, said):
    result = run("submit", *words)
    assert result.exit_code == 2, result.stdout
    assert (result.stdout == "") is ("--json" not in words)
    assert result.stderr.count("\n") == 1
    assert said in result.stderr
    assert service.asked == []


@pytest.mark.parametrize("words", [("--json",), ("--json", "--wait"), ()])
def test_what_was_submitted_before_a_refusal_is_told(run, service, tmp_path, words):
    files = [write(tmp_path / f"{name}.yaml", f"{RUN}\n") for name in ("a", "b", "c")]
    submitted = service.answers["POST", "/v1/jobs"]

    def answer(query, body):
        refused = service.error("Conflict", "there is a job 'b' already")
        return (409, refused) if body["name"] == "b" else submitted(query, body)

    service.answers["POST", "/v1/jobs"] = answer
    result = run("submit", *words, *files)
    assert result.exit_code == Conflict.exit_code
    assert result.stderr == "error: there is a job 'b' already\n"
    assert [body["name"] for _, body in service.calls("POST")] == ["a", "b"]
    if not words:
        assert result.stdout.startswith("a: starts now on 2 GPUs\n")
        return
    document = json.loads(result.stdout)
    assert list(document) == ["submitted", "error"]
    assert [entry["job"]["id"] for entry in document["submitted"]] == ["a"]
    assert (document["error"]["code"], document["error"]["exit_code"]) == ("Conflict", Conflict.exit_code)


@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("failed", 1), ("cancelled", 1)])
def test_wait_and_follow_end_as_the_job_did(run, service, state, code):
    ended = service.job("train", state=state, detail="exit code 3" if code else "", ended_at=1.0)
    service.answers["GET", "/v1/jobs/train"] = {"job": ended}
    service.answers["GET", "/v1/jobs/train/logs"] = {"text": "hello\n", "offset": 6, "at_end": True}
    followed = run("submit", "--follow", "--", sys.executable, "train.py")
    assert followed.exit_code == code
    assert "hello\n" in followed.stdout
    assert f"train: {state}" in followed.stderr
    waited = run("submit", "--wait", "--json", "--", sys.executable, "train.py")
    assert waited.exit_code == code
    assert json.loads(waited.stdout)["submitted"][0]["job"]["state"] == state


def test_plan_of_a_job_that_waits(fake):
    plan = {**fake.plan, "starts_now": False, "gpus": 0, "behind": ["a", "b"], "eta": None}
    no_eta = "  no ETA yet: how fast the job is will be measured while it runs"
    assert plan_lines(plan, 0.0) == ["train: waits behind a, b", "  predicted: 1 to 4 GPUs", no_eta]
    unknown = {**plan, "behind": [], "low_gpus": 0, "high_gpus": 0}
    assert plan_lines(unknown, 0.0, planned=True) == ["train: would wait for free GPUs", no_eta]
    nowhere = {**unknown, "text": "cannot start here now: it needs 99 GPUs, and there are 2"}
    assert plan_lines(nowhere, 0.0)[0] == "train: cannot start here now: it needs 99 GPUs, and there are 2"
    new = {**unknown, "starts_now": True, "gpus": 1, "low_gpus": 1, "high_gpus": 1}
    assert plan_lines(new, 0.0) == ["train: starts now on 1 GPU", "  predicted: 1 GPU", no_eta]
