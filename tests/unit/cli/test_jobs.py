"""Commands about jobs, against a fake service: what they ask for, what they print, how they end."""

import json
import os
import subprocess
import sys

import pytest

from pollux.cli.arguments.options import complete_jobs
from pollux.testing.waiting import PATIENCE_SECONDS


@pytest.fixture
def jobs(fake):
    fake.answers["GET", "/v1/jobs"] = {
        "jobs": [
            fake.job("resnet"),
            fake.job("bert", state="queued", gpus=0, placement={}, goodput=None, eta=None, progress=None,
                     reason={"code": "waits", "at": 1.0, "text": "waits for 2 GPUs of resnet", "next_step": ""}),
            fake.job("lost", state="failed", gpus=0, ended_at=5.0, detail="replica 0 exited with code 3"),
        ],
        "next": None,
    }  # fmt: skip
    return fake


def test_ls(run, jobs):
    result = run("ls")
    assert result.exit_code == 0, result.stderr
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    for cell in ("running", "4/8", "1,024", "1,620", "81%", "42%", "11min–22min", "shrunk 8→4"):
        assert cell in lines["resnet"], cell
    assert "waits for 2 GPUs" in lines["bert"]
    assert "exited with code 3" in lines["lost"]
    assert jobs.asked[0][2] == {"active": "true", "limit": "100"}


def test_ls_of_everything_pages(run, fake):
    names = [f"job-{number}" for number in range(2500)]

    def page(query, body):
        start = names.index(query["after"]) + 1 if "after" in query else 0
        found = names[start : start + int(query["limit"])]
        more = start + len(found) < len(names)
        return {"jobs": [fake.job(name) for name in found], "next": found[-1] if more else None}

    fake.answers["GET", "/v1/jobs"] = page
    answer = json.loads(run("ls", "--all", "--limit", 2200, "--queue", "vision", "--json").stdout)
    assert [job["id"] for job in answer["jobs"]] == names[:2200]
    assert answer["next"] == "job-2199"
    assert [query["limit"] for _, _, query, _, _ in fake.asked] == ["1000", "1000", "200"]
    assert all("active" not in query and query["queue"] == "vision" for _, _, query, _, _ in fake.asked)
    assert "the first 5; --limit 50 shows more" in run("ls", "--limit", 5).stdout


def test_ls_without_jobs(run, fake):
    fake.answers["GET", "/v1/jobs"] = {"jobs": [], "next": None}
    assert "pollux ls --all" in run("ls").stdout
    assert run("ls", "--state", "failed").stdout == "no jobs\n"
    assert json.loads(run("ls", "--json").stdout) == {"jobs": [], "next": None}


def test_show(run, fake):
    fake.answers["GET", "/v1/jobs/resnet"] = {
        "job": fake.job(
            "resnet",
            after=["first"],
            resize_seconds=0.41,
            resize_kind="live",
            resize_costs={"shrink": 0.2, "grow": 0.41},
        ),
        "request": {
            "name": "resnet",
            "run": ["python", "train.py", "a b"],
            "env": {"SEED": "1"},
            "queue": "default",
            "grace": 60.0,
        },
        "events": [{"at": 1.0, "kind": "placed", "text": "given 4 GPUs: node-a 4"}],
        "eta_quality": {"inside": 0.9, "predictions": 20},
    }
    text = run("show", "resnet").stdout
    for phrase in (
        "4 of 1..8 on node-a 4", "11min–22min; 15min if it keeps its GPUs", "1,024 (128 per GPU, 2 micro-steps)",
        "learning rate × 1.5", "1,620 useful samples/s (statistical efficiency 81%)", "2.00 GPU-hours",
        "1 re-allocation,", "0 of 3 retries", "python train.py 'a b'", "SEED=1", "placed     given 4 GPUs: node-a 4",
        "grace        1min", "costs it about 0.41 s, without a restart; so far: grow 0.41 s, shrink 0.2 s",
        "pollux resize resnet --gpus 6..16", "inside          0.9", "after", "first",
    ):  # fmt: skip
        assert phrase in text, phrase
    assert json.loads(run("show", "resnet", "--json").stdout)["eta_quality"]["predictions"] == 20


@pytest.mark.parametrize(
    ("extra", "said"), [(None, "(64 per GPU),"), (0, "(64 per GPU),"), (1, "2 micro-steps),"), (3, "4 micro-steps),")]
)
def test_micro_steps_are_those_beyond_the_first_and_the_first(run, fake, extra, said):
    shown = fake.job("resnet", gpus=1, local_batch=64, accumulation=extra, batch_size=64 * ((extra or 0) + 1))
    fake.answers["GET", "/v1/jobs/resnet"] = {"job": shown, "request": None, "events": [], "eta_quality": None}
    assert said in run("show", "resnet").stdout


def test_figures_from_before_the_last_start_are_marked(run, fake):
    old = fake.job("resnet", outdated=True, reported_at=fake.status["now"] - 630)
    fake.answers["GET", "/v1/jobs/resnet"] = {"job": old, "request": {}, "events": [], "eta_quality": {}}
    text = run("show", "resnet").stdout
    assert "42%, epoch 3.50, reported 10min ago, before it was given these GPUs" in text
    assert "by its last report" in text
    fake.answers["GET", "/v1/jobs"] = {"jobs": [old], "next": None}
    assert "~42%" in run("ls").stdout


def test_explain(run, fake):
    answer = {"job_id": "resnet", "text": "It waits.", "next_step": "pollux resize resnet --gpus 1..4", "reason": None}
    fake.answers["GET", "/v1/jobs/resnet/explain"] = answer
    assert run("explain", "resnet").stdout == "It waits.\nNext: pollux resize resnet --gpus 1..4\n"
    assert json.loads(run("explain", "resnet", "--json").stdout) == answer


@pytest.mark.parametrize("verb", ["cancel", "pause", "resume"])
def test_telling_several_jobs(run, fake, verb):
    for name in ("one", "two"):
        fake.answers["POST", f"/v1/jobs/{name}/{verb}"] = {"job": fake.job(name, state="done")}
    result = run(verb, "one", "two", "one")
    assert result.exit_code == 0
    assert result.stdout == "one: done\ntwo: done\n"
    assert [path for path, _ in fake.calls("POST")] == [f"/v1/jobs/one/{verb}", f"/v1/jobs/two/{verb}"]


def test_one_refusal_does_not_keep_the_others_from_it(run, fake):
    fake.answers["POST", "/v1/jobs/two/cancel"] = {"job": fake.job("two", state="cancelled")}
    ended = "job 'three' has ended already: it is cancelled"  # as the service says it: see the tests of its API
    fake.answers["POST", "/v1/jobs/three/cancel"] = (409, fake.error("IllegalTransition", ended))
    result = run("cancel", "one", "two", "three")
    assert result.exit_code == 70
    assert result.stdout == "two: cancelled\n"
    assert result.stderr.count("error: ") == 2
    assert ended in result.stderr
    both = run("cancel", "one", "two", "--json")
    assert (both.exit_code, both.stderr.count("error: ")) == (2, 1)
    document = json.loads(both.stdout)
    assert [job["id"] for job in document["jobs"]] == ["two"]
    assert [(entry["job"], entry["code"]) for entry in document["failed"]] == [("one", "UnknownName")]


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_what_was_done_before_the_service_went_away_is_told(run, fake, words):
    fake.answers["POST", "/v1/jobs/one/pause"] = {"job": fake.job("one", state="paused")}
    fake.answers["POST", "/v1/jobs/three/pause"] = (503, fake.error("Unreachable", "the service is gone"))
    result = run("pause", "one", "two", "three", "four", *words)
    assert result.exit_code == 69
    assert result.stderr.splitlines() == ["error: unknown job '/v1/jobs/two/pause'", "error: the service is gone"]
    assert [path for path, _ in fake.calls("POST")][-1] == "/v1/jobs/three/pause"
    if not words:
        assert result.stdout == "one: paused\n"
        return
    document = json.loads(result.stdout)
    assert list(document) == ["jobs", "failed", "error"]
    assert [job["id"] for job in document["jobs"]] == ["one"]
    assert [(entry["job"], entry["code"]) for entry in document["failed"]] == [("two", "UnknownName")]
    assert (document["error"]["code"], document["error"]["exit_code"]) == ("Unreachable", 69)
    alone = run("pause", "three", "--json")
    assert list(json.loads(alone.stdout)) == ["error"]


def test_resize(run, fake):
    fake.answers["POST", "/v1/jobs/resnet/resize"] = {"job": fake.job("resnet", min_gpus=2)}
    result = run("resize", "resnet", "--gpus", "2..8")
    assert "resnet: may have 2 to 8 GPUs, holds 4" in result.stdout
    assert fake.calls("POST") == [("/v1/jobs/resnet/resize", {"gpus": "2..8"})]
    assert "note:" not in result.stdout
    note = "cannot start here now: it needs 9 GPUs, and there are 8"
    fake.answers["POST", "/v1/jobs/resnet/resize"] = {"job": fake.job("resnet", min_gpus=9, max_gpus=9), "note": note}
    assert run("resize", "resnet", "--gpus", "9").stdout.endswith(f"\n  note: {note}\n")
    bad = run("resize", "resnet", "--gpus", "8..2")
    assert bad.exit_code == 2
    assert "--gpus is '8..2'" in bad.stderr
    assert len(fake.calls("POST")) == 2


def test_a_job_that_is_not_there(run, fake):
    for words in (["show", "x"], ["explain", "x"], ["logs", "x"], ["cancel", "x"]):
        result = run(*words)
        assert result.exit_code == 2, words
        assert result.stdout == ""
        assert result.stderr.startswith("error: unknown job")
        assert result.stderr.count("\n") == 1


def test_a_wrong_token(run, fake, monkeypatch):
    monkeypatch.setenv("POLLUX_TOKEN", "wrong")
    result = run("ls")
    assert result.exit_code == 77
    assert "token" in result.stderr


def test_no_service(run, fake):
    (fake.home / "service.json").unlink()
    for words in (["ls"], ["top", "--once"], ["submit", "--", "true"], ["down"], ["logs", "x"]):
        result = run(*words)
        assert result.exit_code == 69, words
        assert "pollux up" in result.stderr


def test_completion_of_job_names(jobs):
    assert complete_jobs("re") == ["resnet"]
    assert complete_jobs("") == ["resnet", "bert", "lost"]
    (jobs.home / "service.json").unlink()
    assert complete_jobs("") == []


def test_the_shell_completes_job_names(jobs):
    environment = {
        **os.environ, "POLLUX_HOME": str(jobs.home), "_POLLUX_COMPLETE": "complete_bash",
        "COMP_WORDS": "pollux explain be", "COMP_CWORD": "2",
    }  # fmt: skip
    code = "from pollux.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
        env=environment,
    )
    assert done.stdout.split() == ["bert"], done.stderr
