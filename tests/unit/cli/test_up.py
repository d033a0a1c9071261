"""`pollux up` and `down`: what is refused before anything starts, what is said, and how stopping is waited for."""

import json

import pytest

from pollux.cli.up import _words, greeting
from pollux.service.settings import ServiceSettings


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "slurmm"], "unknown backend 'slurmm'"),
        (["--policy", "polux"], "did you mean 'pollux'"),
        (["--trigger", "sometimes"], "'sometimes'"),
        (["--jobs", "drop"], "'drop'"),
        (["--port", "70000"], "70000"),
        (["--port", "-1"], "-1"),
        (["--slots", "0"], "'0'"),
        (["--interval", "0"], "'0'"),
        (["--host", "0.0.0.0"], "--tls-cert"),
        (["--tls-cert", "cert.pem"], "key"),
        (["--tls-cert", "none.pem", "--tls-key", "none.key"], "none.pem"),
        (["--tls-cert", __file__, "--tls-key", __file__], "no certificate with its key"),
    ],
)
def test_refusals_are_one_line(run, tmp_path, words, said):
    result = run("up", "--home", tmp_path / "home", *words)
    assert result.exit_code == 2, result.stdout
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert said in result.stderr
    assert not (tmp_path / "home").exists()


def test_missing_packages_are_named_with_the_command(run, tmp_path, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else find(name, *rest)
    )
    result = run("up", "--home", tmp_path)
    assert result.exit_code == 2
    assert "pip install 'pollux-scheduler[service]'" in result.stderr


def test_greeting(fake, tmp_path):
    settings = ServiceSettings(home=tmp_path)
    said = "\n".join(greeting("http://127.0.0.1:7341", settings, fake.status))
    for phrase in ("at http://127.0.0.1:7341", str(tmp_path / "token"), "8 × h100 on node-a", "pollux submit job.yaml"):
        assert phrase in said
    slots = {"id": "here", "gpus": 2, "gpu_type": "cpu"}
    status = {**fake.status, "nodes": [slots]}
    assert "2 CPU slots (no GPU found)" in "\n".join(greeting("http://x", settings, status))
    asked = ServiceSettings(home=tmp_path, backend_options={"slots": 2})
    assert "2 CPU slots (as asked with --slots)" in "\n".join(greeting("http://x", asked, status))


def test_a_detached_service_gets_the_same_settings(tmp_path, monkeypatch, run):
    settings = ServiceSettings(
        home=tmp_path, backend_options={"slots": 3}, policy="tiresias", trigger="rounds", interval_seconds=30.0,
        host="127.0.0.2", port=0, tls_cert=tmp_path / "c", tls_key=tmp_path / "k", insecure_bind=True, at_stop="keep",
    )  # fmt: skip
    (tmp_path / "c").touch()
    monkeypatch.setattr("pollux.cli.up._check_certificate", lambda cert, key: None)
    seen = []
    monkeypatch.setattr("pollux.service.server.serve", lambda settings, on_ready: seen.append(settings))
    result = run("up", *_words(settings))
    assert result.exit_code == 0, result.stderr
    assert seen == [settings]


def test_down_waits_until_nobody_answers(run, fake):
    fake.answers["POST", "/v1/shutdown"] = {"status": "stopping"}
    answers = iter([{"status": "ok"}, {"status": "ok"}, (503, fake.error("Unreachable", "gone"))])
    fake.answers["GET", "/healthz"] = lambda query, body: next(answers)
    result = run("down", "--keep", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {"url": fake.url, "stopped": True, "jobs": "keep"}
    assert fake.calls("POST") == [("/v1/shutdown", {"jobs": "keep"})]
    assert next(answers, None) is None
