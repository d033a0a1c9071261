"""Commands that tell what is there: backends, doctor, config; and histories that cannot be used."""

import json

import pytest

from pollux import backends
from pollux.backends.process import devices
from pollux.cli.commands.service.doctor import Finding, findings
from pollux.cli.commands.simulation.whatif import node_counts
from pollux.core.errors import InvalidInput
from pollux.wire.environment import USER_VARIABLES


@pytest.mark.parametrize("missing", [None, "no engine: " + "install what it needs, and " * 9 + "try again"])
def test_backends(run, monkeypatch, missing):
    """Whatever is installed here, and however long the reason is."""
    monkeypatch.setattr(backends, "available", lambda name: missing)
    entries = json.loads(run("backends", "--json").stdout)["backends"]
    assert [entry["name"] for entry in entries] == list(backends.names())
    assert {(entry["available"], entry["missing"]) for entry in entries} == {(missing is None, missing)}
    shown = " ".join(run("backends").stdout.split())
    assert all(entry["summary"] in shown for entry in entries)


def test_backends_that_do_not_work_say_why(run, monkeypatch):
    monkeypatch.setattr(backends, "available", lambda name: "no such engine: install it")
    lines = run("backends").stdout.splitlines()
    for name in backends.names():
        assert f"{name} does not work here: no such engine: install it" in lines
    result = run("up", "--backend", "local")
    assert result.exit_code == 2
    assert "no such engine: install it" in result.stderr


def by_name(found):
    return {finding.name: finding for finding in found}


def test_doctor_on_this_machine(run, fake):
    fake.answers["GET", "/v1/status"] = fake.status
    found = by_name(findings())
    assert found["service"].level == "ok"
    assert fake.url in found["service"].value
    assert found["token"].level == "ok"
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.stdout
    assert json.loads(result.stdout)["usable"] is True
    assert run("doctor").stdout.endswith("ready\n")


def test_doctor_finds_a_token_that_others_can_read(run, fake):
    (fake.home / "token").chmod(0o644)
    assert by_name(findings())["token"] == Finding(
        "token", "missing", f"{fake.home / 'token'} is open to others (mode 644)", f"chmod 600 {fake.home / 'token'}"
    )
    assert run("doctor").exit_code == 1


def test_doctor_names_the_command_for_what_is_missing(run, fake, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    absent = {"starlette", "matplotlib", "pynvml"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in absent else find(name, *rest))
    found = by_name(findings())
    assert found["extra 'service'"].level == "missing"
    assert "pip install 'pollux-scheduler[service]'" in found["extra 'service'"].remedy
    assert found["extra 'plot'"].level == "note"
    assert run("doctor").exit_code == 1
    absent.discard("starlette")
    assert by_name(findings())["extra 'service'"].level == "note"


def test_doctor_says_why_gpus_are_not_used(run, fake, monkeypatch):
    def gpus():
        raise devices._NoGpus("NVML: Driver/library version mismatch", "see what 'nvidia-smi' says", is_sure=True)

    monkeypatch.setattr(devices, "_gpus", gpus)
    found = by_name(findings())["GPUs"]
    assert (found.level, found.remedy) == ("note", "see what 'nvidia-smi' says")
    assert found.value.startswith("none found (NVML: Driver/library version mismatch); ")
    entries = json.loads(run("doctor", "--json").stdout)["findings"]
    assert {entry["name"]: entry["value"] for entry in entries}["GPUs"] == found.value
    text = run("doctor").stdout
    assert found.value in text
    assert found.remedy in text
    monkeypatch.setattr(devices, "_gpus", list)
    assert by_name(findings())["GPUs"].value.startswith("none found; ")


def test_doctor_without_a_service_or_a_place_to_write(fake, monkeypatch, tmp_path):
    (fake.home / "service.json").unlink()
    assert by_name(findings())["service"].level == "note"
    (tmp_path / "file").touch()
    monkeypatch.setattr("os.access", lambda *_: False)
    assert by_name(findings())["home"].level == "missing"


def test_config_names_every_variable_and_hides_the_token(run, fake, monkeypatch):
    monkeypatch.setenv("POLLUX_TOKEN", "very-secret")
    result = run("config", "--json")
    entries = {entry["name"]: entry for entry in json.loads(result.stdout)["settings"]}
    assert set(USER_VARIABLES) <= set(entries)
    assert entries["POLLUX_HOME"] == {
        "name": "POLLUX_HOME", "value": str(fake.home), "source": "environment",
        "meaning": USER_VARIABLES["POLLUX_HOME"],
    }  # fmt: skip
    assert (entries["POLLUX_SERVER"]["value"], entries["POLLUX_TOKEN"]["value"]) == (fake.url, "set")
    assert (entries["port"]["value"], entries["port"]["source"]) == (7341, "default")
    assert "very-secret" not in result.stdout + run("config").stdout
    monkeypatch.delenv("POLLUX_TOKEN")
    assert str(fake.home / "token") in run("config").stdout
    (fake.home / "service.json").unlink()
    assert "no service runs here" in run("config").stdout


def test_config_shows_what_the_running_service_was_started_with(run, fake):
    running = {**fake.status, "policy": "tiresias", "trigger": "rounds", "interval_seconds": 30.0, "at_stop": "keep"}
    fake.answers["GET", "/v1/status"] = running
    entries = {entry["name"]: entry for entry in json.loads(run("config", "--json").stdout)["settings"]}
    for name in ("policy", "trigger", "interval_seconds", "at_stop"):
        assert (entries[name]["value"], entries[name]["source"]) == (running[name], "the running service")
    assert entries["port"]["value"] == int(fake.url.rsplit(":", 1)[1])


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [(None, [4]), ("", [4]), ("+2", [4, 6]), ("-1", [4, 3]), ("6", [4, 6]), ("+2,-1, 8,4", [4, 6, 3, 8])],
)
def test_sizes(asked, sizes):
    assert node_counts(asked, 4) == sizes


@pytest.mark.parametrize("asked", ["-4", "0", "two", "+", "1e3", "9999999"])
def test_sizes_that_are_none(asked):
    with pytest.raises(InvalidInput, match="--nodes is"):
        node_counts(asked, 4)


def test_histories_that_cannot_be_used(run, fake, tmp_path):
    for words in (["history", "import", tmp_path / "none"], ["whatif", "--history", tmp_path / "none"]):
        result = run(*words)
        assert result.exit_code == 2, words
        assert "none" in result.stderr
        assert result.stderr.count("\n") == 1
    (tmp_path / "x.ndjson").write_text("not a history\n")
    for words in (
        ["history", "import", tmp_path / "x.ndjson"],
        ["whatif", "--history", tmp_path / "x.ndjson"],
        ["simulate", tmp_path / "x.ndjson"],
    ):
        result = run(*words)
        assert result.exit_code == 2, (words, result.stderr)
        assert result.stderr.startswith("error: ")
    both = run("simulate", tmp_path / "x.ndjson", "--profiles", tmp_path)
    assert "give it alone" in both.stderr
    assert run("history", "export", "--json").exit_code == 2


def test_history_export_from_the_service(run, fake, tmp_path):
    fake.answers["GET", "/readyz"] = {"status": "ok"}
    fake.answers["GET", "/v1/history"] = b'{"format":"pollux-history"}\n{"a":1}\n'
    assert run("history", "export").stdout == '{"format":"pollux-history"}\n{"a":1}\n'
    assert "2 lines" in run("history", "export", "-o", tmp_path / "h").stdout
    assert (tmp_path / "h").read_text().count("\n") == 2
    # What jobs were given is in it, secrets too.
    assert (tmp_path / "h").stat().st_mode & 0o777 == 0o600
    (fake.home / "service.json").unlink()
    assert run("history", "export").exit_code == 69
