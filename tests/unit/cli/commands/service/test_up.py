"""`pollux up` and `down`: what is refused before anything starts, what is said, and how stopping is waited for."""

import json
import subprocess
import sys
import threading

import pytest

from pollux.cli.client.client import connect
from pollux.cli.client.shutdown_wait import is_alive
from pollux.cli.commands.service.up import _words, greeting
from pollux.core.errors import StoreFailed
from pollux.service.settings import ServiceSettings
from pollux.testing.waiting import PATIENCE_SECONDS


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
    warned = greeting("http://x", settings, {**status, "warnings": ["jobs get CPU slots (NVML: mismatch): restart"]})
    assert "  found     2 CPU slots (no GPU that can be used, see below)" in warned
    assert warned[-1] == "  warning: jobs get CPU slots (NVML: mismatch): restart"
    asked = ServiceSettings(home=tmp_path, backend_options={"slots": 2})
    assert "2 CPU slots (as asked with --slots)" in "\n".join(greeting("http://x", asked, status))


def test_a_detached_service_gets_the_same_settings(tmp_path, monkeypatch, run):
    settings = ServiceSettings(
        home=tmp_path, backend_options={"slots": 3}, policy="tiresias", trigger="rounds", interval_seconds=30.0,
        host="127.0.0.2", port=0, tls_cert=tmp_path / "c", tls_key=tmp_path / "k", insecure_bind=True, at_stop="keep",
    )  # fmt: skip
    (tmp_path / "c").touch()
    monkeypatch.setattr("pollux.cli.commands.service.up._check_certificate", lambda cert, key: None)
    seen = []
    monkeypatch.setattr("pollux.service.server.serve.serve", lambda settings, on_ready: seen.append(settings))
    result = run("up", *_words(settings))
    assert result.exit_code == 0, result.stderr
    assert seen == [settings]


@pytest.fixture
def process():
    """A process that ends when it is told to."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as running:
        yield running


def announce(home, url, pid):
    (home / "service.json").write_text(json.dumps({"url": url, "pid": pid}))


def test_down_waits_until_the_process_is_gone_and_says_for_whom(run, fake, process):
    announce(fake.home, fake.url, process.pid)
    fake.answers["POST", "/v1/shutdown"] = {"status": "stopping", "seconds": 30.0}
    holding = {"jobs": [fake.job("resnet", state="running"), fake.job("bert", state="queued")], "next": None}

    def jobs(query, body):
        process.stdin.close()
        return holding

    fake.answers["GET", "/v1/jobs"] = jobs
    result = run("down")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == "waiting for resnet to save and stop, at most 45 s\n"
    assert "stopped" in result.stdout
    assert not fake.calls("GET") or "/healthz" not in [path for path, _ in fake.calls("GET")]
    # Not waited for by its parent, which is this test: ended all the same.
    assert not is_alive(process.pid)


def test_down_gives_up_in_the_end_and_says_how_to_go_on(run, fake, process, monkeypatch):
    announce(fake.home, fake.url, process.pid)
    monkeypatch.setattr("pollux.cli.client.shutdown_wait._CLOSING_SECONDS", 0.2)
    fake.answers["POST", "/v1/shutdown"] = {"status": "stopping", "seconds": 0.1}
    fake.answers["GET", "/v1/jobs"] = {"jobs": [fake.job("resnet", state="running")], "next": None}
    result = run("down", "--json")
    assert result.exit_code == 1
    for phrase in (f"process {process.pid}", "waiting for resnet", "service.log", f"kill -9 {process.pid}"):
        assert phrase in result.stderr
    process.stdin.close()


def test_down_waits_until_nobody_answers(run, fake, tmp_path, monkeypatch):
    monkeypatch.setenv("POLLUX_SERVER", fake.url)
    (tmp_path / "home" / "service.json").unlink()
    fake.answers["POST", "/v1/shutdown"] = {"status": "stopping"}
    answers = iter([{"status": "ok"}, {"status": "ok"}, (503, fake.error("Unreachable", "gone"))])
    fake.answers["GET", "/healthz"] = lambda query, body: next(answers)
    result = run("down", "--keep", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {"url": fake.url, "stopped": True, "jobs": "keep"}
    assert fake.calls("POST") == [("/v1/shutdown", {"jobs": "keep"})]
    assert next(answers, None) is None


@pytest.fixture
def slurm(monkeypatch):
    """A machine with Slurm's commands, whose service is not really started; what it would be started with."""
    monkeypatch.setattr("pollux.backends.available", lambda name: None)
    monkeypatch.setattr("pollux.cli.commands.service.up._check_certificate", lambda cert, key: None)
    seen = []
    monkeypatch.setattr("pollux.service.server.serve.serve", lambda settings, on_ready: seen.append(settings))
    return seen


def test_a_service_listens_where_its_nodes_reach_it(run, tmp_path, slurm):
    words = ["up", "--home", tmp_path, "--backend", "slurm"]
    result = run(*words, "--option", "head=10.0.0.5", "--insecure-bind", "--allow-host", "pollux.lab")
    assert result.exit_code == 0, result.stderr
    (tmp_path / "c").touch()
    run(*words, "--option", "head=10.0.0.5", "--tls-cert", tmp_path / "c", "--tls-key", tmp_path / "c")
    run(*words, "--option", "head=127.0.0.1")
    run(*words, "--option", "head=10.0.0.5", "--host", "127.0.0.1")
    assert [settings.host for settings in slurm] == ["10.0.0.5", "10.0.0.5", "127.0.0.1", "127.0.0.1"]
    assert slurm[0].allowed_hosts == ("pollux.lab",)
    assert run("up", *_words(slurm[0])).exit_code == 0
    assert slurm[-1] == slurm[0]


def test_a_service_that_its_nodes_would_not_reach_is_not_started(run, tmp_path, slurm, monkeypatch):
    monkeypatch.setattr("pollux.backends.fleet.backend.own_address", lambda: "10.0.0.9")
    result = run("up", "--home", tmp_path, "--backend", "slurm")
    assert result.exit_code == 2
    for phrase in ("10.0.0.9", "--tls-cert", "--insecure-bind", "head=", "--host 127.0.0.1"):
        assert phrase in result.stderr
    assert slurm == []
    # What would be asked for can be seen all the same.
    assert run("up", "--home", tmp_path, "--backend", "slurm", "--slots", 1, "--dry-run").exit_code == 0


def test_a_dry_run_is_one_document_too(run, tmp_path, slurm):
    words = ["up", "--home", tmp_path, "--backend", "slurm", "--slots", "1", "--dry-run"]
    document = json.loads(run(*words, "--json").stdout)
    assert document == {"backend": "slurm", "asks_for": run(*words).stdout}
    assert "#SBATCH" in document["asks_for"]


def test_a_dry_run_says_what_ray_is_asked_for(run, tmp_path, slurm):
    said = run("up", "--home", tmp_path, "--backend", "ray", "--dry-run").stdout
    assert "asks no engine" not in said
    for phrase in ("actor", "placement group", "at auto"):
        assert phrase in said
    assert "asks no engine" in run("up", "--home", tmp_path, "--dry-run").stdout


@pytest.mark.parametrize("fault", [StoreFailed("the disk is full;\ncheck it"), KeyboardInterrupt()])
def test_standard_output_has_one_document_also_where_it_ends_badly(run, fake, monkeypatch, fault):
    monkeypatch.setattr("pollux.cli.commands.service.up._own_client", lambda home: connect())
    fake.answers["GET", "/v1/status"] = fake.status
    greeted = threading.Event()
    before: list[threading.Thread] = []
    here = threading.current_thread()

    def serve(settings, on_ready):
        if greeted.is_set():
            on_ready(None)
            before[-1].join(PATIENCE_SECONDS)
        raise fault

    class Thread(threading.Thread):
        def start(self):
            # The service that answers starts threads, too.
            if threading.current_thread() is here:
                before.append(self)
            super().start()

    monkeypatch.setattr("pollux.cli.commands.service.up.threading.Thread", Thread)
    monkeypatch.setattr("pollux.service.server.serve.serve", serve)
    alone = run("up", "--home", fake.home, "--slots", 1, "--json")
    greeted.set()
    result = run("up", "--home", fake.home, "--slots", 1, "--json")
    assert "error" in json.loads(alone.stdout)
    assert json.loads(result.stdout)["status"] == fake.status
    assert result.exit_code == alone.exit_code != 0
    assert result.stderr == alone.stderr
