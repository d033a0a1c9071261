"""What real clusters said, played for 200 nodes: each adapter offers what the real service had, and asks little."""

import importlib
import logging
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def rounds(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    # Hundreds of nodes are left at once, each with a line.
    monkeypatch.setattr(logging.root.manager, "disable", logging.WARNING)
    return importlib.import_module("engines_rounds")


def test_slurm_is_asked_twice_a_round_whatever_happened(rounds):
    found = rounds.measured("slurm", 200, 2)
    assert found["slurm_nodes"] >= 200
    assert found["slurm_pilots_commands_per_round"] == found["slurm_jobs_commands_per_round"] == 2


def test_ray_is_asked_for_its_nodes_and_at_most_once_for_all_groups(rounds):
    found = rounds.measured("ray", 200, 2)
    assert found["ray_nodes"] >= 200
    assert (found["ray_calls_per_look"], found["ray_slots_calls_per_look"]) == (1, 2)
    assert found["ray_orders_per_round"] == 0


def test_an_adapter_that_loses_nodes_is_found_out(rounds, monkeypatch):
    monkeypatch.setattr(rounds.SlurmPilotProvider, "hosts", lambda self: ())
    with pytest.raises(AssertionError, match="two jobs run"):
        rounds.measured("slurm", 200, 1)
