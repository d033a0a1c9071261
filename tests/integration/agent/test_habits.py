"""Habits of plain PyTorch scripts: equal to plain PyTorch at any number of replicas and through resizes, or refused."""

from pathlib import Path

import pytest
from tests.support.live_supervisor import LiveSupervisor

from pollux.testing.jobs.replica_server import load_module

SCRIPT = str(Path(__file__).with_name("habits_script.py"))
HABITS = load_module(SCRIPT)
ALL = ["by step", "by epoch", "by metric", "in sequence", "freeze", "unfreeze", "add a group"]


def check(values, habit):
    wanted = HABITS.plain(habit)
    for value in values:
        assert value["exact"]
        assert value["parameters"] == pytest.approx(wanted["parameters"], rel=1e-9, abs=1e-12)
        assert value["rates"] == pytest.approx(wanted["rates"][-len(value["rates"]) :])
    assert all(value["parameters"] == values[0]["parameters"] for value in values)


@pytest.mark.parametrize("habit", ALL)
@pytest.mark.parametrize(("num_replicas", "max_local_batch"), [(1, None), (1, 5), (2, 3), (3, None)])
def test_any_number_of_replicas_and_micro_batches(replica_server, tmp_path, habit, num_replicas, max_local_batch):
    (tmp_path / "fast").touch()
    arguments = {"folder": str(tmp_path), "habit": habit, "max_local_batch": max_local_batch}
    check(replica_server.run(f"{SCRIPT}:train", num_replicas, arguments), habit)


@pytest.mark.parametrize("habit", ALL)
def test_resizes_while_it_runs(replica_server, tmp_path, habit):
    supervisor = LiveSupervisor(replica_server, f"{SCRIPT}:train", {"folder": str(tmp_path), "habit": habit})
    try:
        supervisor.start(1)
        supervisor._until(lambda: (tmp_path / f"epoch-{HABITS.HABITUAL - 1}").exists() or None, "what is done once")
        for num_replicas in (3, 2):
            assert supervisor.resize(num_replicas) == "done", supervisor.outputs()
        (tmp_path / "fast").touch()
        results = supervisor.wait()
        assert {each.exit_code for each in results} == {0}, supervisor.outputs()
        check([each.value for each in results], habit)
    finally:
        supervisor.close()


def test_a_rate_that_the_script_counts_by_hand_is_refused_where_a_replica_joined(replica_server, tmp_path):
    arguments = {"folder": str(tmp_path), "habit": "none", "by_hand": True}
    supervisor = LiveSupervisor(replica_server, f"{SCRIPT}:train", arguments)
    try:
        supervisor.start(1)
        supervisor._until(lambda: (tmp_path / "epoch-4").exists() or None, "an epoch")
        supervisor.resize(2)
        (tmp_path / "fast").touch()
        supervisor.wait()
        assert {supervisor._error(each) for each in supervisor.everybody} == {"InvalidInput"}
        assert "replicas have different learning rates" in supervisor.outputs()
    finally:
        supervisor.close()


def test_a_resume_takes_over_what_changed_on_the_way_and_not_what_the_script_says_at_its_start(
    replica_server, tmp_path
):
    replica_server.run(f"{SCRIPT}:freezes", 1, {"folder": str(tmp_path)})
    (trained,) = replica_server.run(f"{SCRIPT}:resumed", 1, {"folder": str(tmp_path)})
    # Weight and bias of three layers: the first was frozen on the way, the last one by the script that resumes.
    assert trained == [False, False, True, True, False, False]
