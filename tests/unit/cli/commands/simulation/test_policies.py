"""`pollux policies`: every policy, with what it needs."""

import json

from pollux import policies


def test_table_names_every_policy(run):
    result = run("policies")
    assert result.exit_code == 0
    assert [name for name in policies.names() if name not in result.stdout] == []


def test_json(run):
    entries = json.loads(run("policies", "--json").stdout)["policies"]
    assert [entry["name"] for entry in entries] == list(policies.names())
    by_name = {entry["name"]: entry for entry in entries}
    assert by_name["pollux"]["batch"] == "adaptive"
    assert by_name["pollux"]["needs"] == ["goodput"]
    assert "fairness" in by_name["pollux"]["options"]
    assert by_name["optimus-oracle"]["needs"] == ["oracle"]
    assert all(entry["summary"] for entry in entries)
