"""The machine's own benchmark goes on where it stopped, also after a line that was not written whole."""

import importlib
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize("torn", ["", '{"policy": "castor", "se', '{"policy": "castor", "seed": 1}', '"'])
def test_a_torn_last_line_is_left_out_and_its_run_made_again(monkeypatch, tmp_path, torn):
    monkeypatch.syspath_prepend(str(FOLDER))
    local = importlib.import_module("local")
    path = tmp_path / "runs.jsonl"
    runs = [{"policy": policy, "seed": 0} for policy in ("castor", "fifo")]
    path.write_text("".join(json.dumps(run) + "\n" for run in runs) + torn)
    assert sorted(local.known(path)) == [("castor", 0), ("fifo", 0)]
    with path.open("a") as file:
        file.write(json.dumps({"policy": "pollux", "seed": 0}) + "\n")
    assert sorted(local.known(path)) == [("castor", 0), ("fifo", 0), ("pollux", 0)]
    assert local.known(tmp_path / "absent.jsonl") == {}
