"""`pollux nodes`, against a service that answers from the test's hands."""

import json

import pytest

from pollux.cli.commands.cluster import nodes as commands

NODES = [
    {"id": "n0", "gpus": 4, "gpu_type": "a100", "used": 1, "jobs": {"a": 1}, "schedulable": True, "set_aside": ""},
    {"id": "n1", "gpus": 4, "gpu_type": "a100", "used": 0, "jobs": {}, "schedulable": False, "set_aside": "it burns"},
]


class Service:
    """Keeps what was asked of it."""

    def __init__(self, nodes):
        self.nodes, self.posted = nodes, []

    def get(self, path):
        assert path == "/v1/cluster"
        return {"nodes": self.nodes}

    def post(self, path, body=None):
        self.posted.append((path, body))
        aside = (body or {}).get("why", "by an operator") if path.endswith("set-aside") else ""
        return {**self.nodes[0], "set_aside": aside}


@pytest.fixture
def service(monkeypatch):
    found = Service(NODES)
    monkeypatch.setattr("pollux.cli.client.client.connect", lambda: found)
    return found


def run(*words):
    from typer.testing import CliRunner

    result = CliRunner().invoke(commands.app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


def test_the_list_says_which_are_set_aside_and_how_to_end_that(service):
    text = run()
    assert "n0 (a100)" in text
    assert "n1 (a100, set aside)" in text
    assert "n1 is set aside: it burns; 'pollux nodes take-back n1' ends that" in text.replace("\n", "")
    assert json.loads(run("--json")) == {"nodes": NODES}
    service.nodes = []
    assert run() == "the service has no nodes now\n"


def test_a_node_is_set_aside_and_taken_back(service):
    assert run("set-aside", "n0", "--why", "its fan is broken") == "n0: set aside: its fan is broken\n"
    assert run("take-back", "rack/n0") == "n0: used again\n"
    assert json.loads(run("set-aside", "n0", "--json"))["set_aside"] == "by an operator"
    assert service.posted == [
        ("/v1/nodes/n0/set-aside", {"why": "its fan is broken"}),
        ("/v1/nodes/rack%2Fn0/take-back", None),
        ("/v1/nodes/n0/set-aside", {}),
    ]
