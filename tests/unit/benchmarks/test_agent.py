"""The agent's benchmark as people call it, and the arithmetic behind what it says about quality."""

import argparse
import dataclasses
import importlib
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Imports a module of the benchmarks, which lie outside of any package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def call(load, monkeypatch, tmp_path, capsys):
    """Runs the script with parts that say at once what they were asked; gives the lines it printed."""
    monkeypatch.setattr(load("measure"), "RESULTS", tmp_path)
    agent = load("agent")
    for part in (*agent.PARTS, "gpu"):
        fake = types.SimpleNamespace(measure=lambda quick, seed, part=part: {f"{part}_asked": [quick, seed]})
        monkeypatch.setitem(sys.modules, f"agent_{part}", fake)

    def run(*arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["agent.py", *arguments])
        agent.main()
        printed: str = capsys.readouterr().out
        return printed.splitlines()

    return run


@pytest.mark.parametrize("only", [(), ("--only", "noise,exact,checkpoint,faults,quality")])
def test_it_ends_with_one_json_object_of_all_parts(call, load, tmp_path, only):
    lines = call("--quick", "--seed", "3", *only)
    result = json.loads(lines[-1])
    agent = load("agent")
    assert {key: value for key, value in result.items() if key.endswith("_asked")} == {
        f"{part}_asked": [True, 3] for part in (agent.PARTS if only else agent.QUICK)
    }
    assert result["quick"] is True
    assert result["seed"] == 3
    assert lines[0] == "== noise"
    assert not list(tmp_path.iterdir()), "a quick run is not kept"


def test_full_runs_are_kept_and_one_of_some_parts_does_not_replace_one_of_all(call, tmp_path):
    call()
    call("--only", "quality,noise")
    call("--gpu")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "agent.json",
        "agent_gpu.json",
        "agent_noise_quality.json",
    ]
    assert "exact_asked" not in json.loads((tmp_path / "agent_noise_quality.json").read_text())
    assert json.loads((tmp_path / "agent_gpu.json").read_text())["gpu_asked"] == [False, 0]


def test_an_unknown_part_is_refused(call, capsys):
    with pytest.raises(SystemExit, match="2"):
        call("--quick", "--only", "noise,speed")
    assert "no part is called speed" in capsys.readouterr().err


def test_parts_are_taken_in_order_and_kept_apart(load):
    agent = load("agent")
    assert agent.chosen_parts("quality, noise") == ("noise", "quality")
    assert agent.result_name(agent.PARTS) == "agent"
    assert agent.result_name(("quality",)) == "agent_quality"
    with pytest.raises(argparse.ArgumentTypeError):
        agent.chosen_parts("")


def test_every_part_has_a_module(load):
    agent = load("agent")
    for part in (*agent.PARTS, "gpu"):
        assert (FOLDER / f"agent_{part}.py").is_file()


def test_the_basic_figures_come_first(load):
    agent = load("agent")
    flat = agent.gathered({"noise": {"more": 1, "noise_coverage": {}, "seed": 0}, "faults": {"samples_lost": 0}})
    assert list(flat) == ["noise_coverage", "samples_lost", "more"]


def test_equal_groups_differ_by_nothing_and_the_interval_is_students(load):
    quality = load("agent_quality")
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    same = quality.difference(values, values)
    assert same["difference_in_sd"] == 0.0
    assert same["high"] == pytest.approx(2.306 * (2 / 5) ** 0.5, rel=1e-3)
    assert same["low"] == -same["high"]
    worse = quality.difference(values, [value + 2.0 for value in values])
    assert worse["difference_in_sd"] == pytest.approx(2.0 / 2.5**0.5)


def test_samples_for_a_loss_are_read_off_the_curve(load):
    quality = load("agent_quality")
    base = {part: np.full(3, 2.0 - 0.4 * np.log(part)) for part in quality.SPANS}
    assert quality._samples_for(base, np.array([2.0 - 0.4 * np.log(0.8)])) == pytest.approx(0.8)


def test_text_comes_from_the_standard_library_and_is_split_without_overlap(load):
    tasks = load("quality_tasks")
    text = tasks.stdlib_text(20_000)
    assert len(text) == 20_000
    windows, symbols = tasks._windows(text)
    assert windows.shape[1] == tasks.CONTEXT + 1
    assert 20 < symbols < 60
    assert torch.equal(windows[1, :-1], windows[0, 1:])


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_run_tells_what_it_took(load, adaptive):
    quality, tasks = load("agent_quality"), load("quality_tasks")
    torch.set_num_threads(1)
    task = tasks.digits_task(quick=True)
    small = dataclasses.replace(task, size=64 * 40)
    run = quality.train(small, 0, adaptive)
    assert run.mode == ("adaptive" if adaptive else "exact")
    assert run.samples >= 64 * 40
    assert run.steps == 40
    assert run.share_at_4x == 0.0
    assert [batch for _, batch in run.batches] == [64]
    assert len(run.curve) >= quality.POINTS - 1
    assert run.final["loss"] < run.curve[0][1]
