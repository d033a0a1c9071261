"""The agent's benchmark as people call it, and the arithmetic behind what it says about quality."""

import argparse
import dataclasses
import importlib
import json
import subprocess
import sys
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


def call(*arguments: str):
    command = [sys.executable, str(FOLDER / "agent.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_one_part_ends_with_one_json_object():
    done = call("--quick", "--only", "noise", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert "== noise" in done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["quick"] is True
    assert result["seed"] == 3
    assert result["noise_coverage"]
    assert result["noise_relative_width"]


def test_an_unknown_part_is_refused():
    done = call("--quick", "--only", "noise,speed")
    assert done.returncode == 2
    assert "no part is called speed" in done.stderr


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
    assert run.batches == [(round(1 / 40, 4), 64)]
    assert len(run.curve) >= quality.POINTS - 1
    assert run.final["loss"] < run.curve[0][1]
