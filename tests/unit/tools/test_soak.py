"""`make soak`: which turns are run with which seeds, what is kept, and where the next call goes on."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[3] / "tools" / "soak.py"


@pytest.fixture
def soak(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("soak", PATH)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    monkeypatch.setattr(found, "STATE", tmp_path / "soak" / "state.json")
    found.asked = []
    found.codes = {}

    def run(events, seed, paths):
        found.asked.append((events, seed, len(paths)))
        return found.codes.get(len(found.asked), 0)

    monkeypatch.setattr(found, "run", run)
    return found


def call(soak, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["soak", *words])
    return soak.main()


def test_turns_go_on_with_seeds_that_count_up_until_all_notices_are_given(soak, monkeypatch, capsys):
    assert call(soak, monkeypatch, "--events", "100", "--seed", "7") == 0
    assert soak.asked == [(50, 7, 1), (10, 8, 3), (40, 9, 1), (50, 10, 1)]
    assert "soak: all 100 notices in 4 turns" in capsys.readouterr().out
    assert not soak.STATE.exists()


def test_one_that_was_stopped_goes_on_where_it_was(soak, monkeypatch, capsys):
    soak.codes[2] = 1
    assert call(soak, monkeypatch, "--events", "100", "--seed", "7") == 1
    assert "failed with seed 8" in capsys.readouterr().out
    assert json.loads(soak.STATE.read_text()) == {"seed": 7, "turns": 1, "notices": 50}
    assert call(soak, monkeypatch, "--events", "100") == 0
    assert soak.asked[2:] == [(10, 8, 3), (40, 9, 1), (50, 10, 1)]


def test_minutes_end_it_between_turns(soak, monkeypatch, capsys):
    assert call(soak, monkeypatch, "--minutes", "0") == 0
    assert soak.asked == []
    assert "0 minutes are over at turn 0" in capsys.readouterr().out


def test_another_seed_begins_anew(soak, monkeypatch):
    soak.save({"seed": 7, "turns": 9, "notices": 250})
    assert soak.load(8) == {"seed": 8, "turns": 0, "notices": 0}
    assert soak.load(7)["turns"] == soak.load(None)["turns"] == 9
