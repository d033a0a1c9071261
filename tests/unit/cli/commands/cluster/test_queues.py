"""`pollux queues`, against a fake service: what is listed, what is asked for, what is refused."""

import json

import pytest

from pollux.cli.arguments.options import complete_policies, complete_queues

QUEUES = [
    {"name": "default", "weight": 1.0, "gpu_quota": None, "used": 1, "jobs": 2},
    {"name": "vision", "weight": 2.5, "gpu_quota": 8, "used": 4, "jobs": 3},
]


@pytest.fixture
def queues(fake):
    fake.answers["GET", "/v1/queues"] = {"queues": QUEUES}
    fake.answers["PUT", "/v1/queues/vision"] = lambda query, body: {**QUEUES[1], **body}
    return fake


def test_the_list(run, queues):
    result = run("queues")
    assert result.exit_code == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == ["queue", "weight", "quota", "in", "use", "jobs"]
    assert ["default", "1", "none", "1", "2"] in rows
    assert ["vision", "2.5", "8", "4", "3"] in rows
    assert json.loads(run("queues", "--json").stdout) == {"queues": QUEUES}


def test_an_empty_list_says_what_to_type(run, queues):
    queues.answers["GET", "/v1/queues"] = {"queues": []}
    assert "pollux queues set" in run("queues").stdout


@pytest.mark.parametrize(
    ("words", "body", "said"),
    [
        (["--weight", 3, "--quota", 4], {"weight": 3.0, "gpu_quota": 4}, "weight 3, quota 4; its jobs hold 4 GPUs"),
        (["--weight", 0.5], {"weight": 0.5}, "weight 0.5, quota 8"),
        (["--quota", "none"], {"gpu_quota": None}, "weight 2.5, no quota"),
        (["--quota", 0], {"gpu_quota": 0}, "weight 2.5, quota 0"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_setting_one(run, queues, words, body, said):
    result = run("queues", "set", "vision", *words)
    assert result.exit_code == 0, result.stderr
    assert f"vision: {said}" in result.stdout
    assert queues.calls("PUT") == [("/v1/queues/vision", body)]
    assert json.loads(run("queues", "set", "vision", *words, "--json").stdout)["name"] == "vision"


@pytest.mark.parametrize(
    "words", [[], ["--weight", 0], ["--weight", "heavy"], ["--quota", -1], ["--quota", 1.5]], ids=str
)
def test_what_cannot_be_set_is_refused(run, queues, words):
    result = run("queues", "set", "vision", *words)
    assert result.exit_code == 2
    assert queues.calls("PUT") == []


def test_the_shell_completes_queues_and_policies(queues):
    assert complete_queues("vi") == ["vision"]
    assert complete_policies("pollux,opt") == ["pollux,optimus-oracle"]
    assert "tiresias" in complete_policies("")
    (queues.home / "service.json").unlink()
    assert complete_queues("") == []
