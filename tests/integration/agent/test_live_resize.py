import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.live_supervisor import LiveSupervisor

from pollux.testing.jobs.replica_server import load_module
from pollux.testing.waiting import PATIENCE_SECONDS

SCRIPT = str(Path(__file__).with_name("live_script.py"))
LIVE = load_module(SCRIPT)
SIZE, check_exact, finish = LIVE.SIZE, LIVE.check_exact, LIVE.finish


@pytest.fixture
def supervise(replica_server, tmp_path):
    """Makes a supervisor of replicas that run `train` with these arguments; ends them with the test."""
    made = []

    def start(num_replicas: int, function: str = "train", **arguments: Any) -> LiveSupervisor:
        supervisor = LiveSupervisor(replica_server, f"{SCRIPT}:{function}", {"folder": str(tmp_path), **arguments})
        made.append(supervisor)
        supervisor.start(num_replicas)
        supervisor._until(lambda: True if supervisor.step() >= 3 else None, "training goes on")
        return supervisor

    yield start
    for supervisor in made:
        supervisor.close()


def test_two_to_four_to_three_to_one_to_four_is_the_run_without_changes(supervise, tmp_path):
    supervisor = supervise(2)
    for num_replicas in (4, 3, 1, 4):
        assert supervisor.resize(num_replicas) == "done"
    values = finish(supervisor, tmp_path)
    assert len(values) == 4
    check_exact(values)
    assert values[0]["events"].count("resized") == 4
    assert values[3]["began"] > 0
    assert [pause["kind"] for pause in supervisor.pauses] == ["grow", "shrink", "shrink", "grow"]
    assert all(set(pause["parts"]) == {"regroup", "transfer", "wrap", "first_step"} for pause in supervisor.pauses)
    assert set(supervisor.close()) <= {0}


def test_replicas_move_at_the_same_size_and_replica_0_may_leave(supervise, tmp_path):
    supervisor = supervise(2, checkpoint_every=0.05, kept=True)
    assert supervisor.resize(2, keep=[0]) == "done"
    assert supervisor.resize(2, keep=[1]) == "done"
    assert supervisor.resize(1, keep=[1]) == "done"
    values = finish(supervisor, tmp_path)
    check_exact(values)
    assert [pause["kind"] for pause in supervisor.pauses] == ["move", "move", "shrink"]
    assert values[0]["events"].count("checkpointed") >= 3
    # What only replica 0 knew is known to the one that took its place.
    assert values[0]["logged"] == list(range(LIVE.EPOCHS))
    assert set(supervisor.close()) <= {0}


@pytest.mark.parametrize(("first", "sizes"), [(2, (1, 2, 3, 1, 2)), (1, (2, 1, 3))])
def test_a_model_that_the_script_kept_is_followed_through_all_sizes(supervise, tmp_path, first, sizes):
    supervisor = supervise(first, kept=True)
    for num_replicas in sizes:
        assert supervisor.resize(num_replicas) == "done", supervisor.outputs()
    values = finish(supervisor, tmp_path)
    check_exact(values)
    assert values[0]["events"].count("resized") == len(sizes)


@pytest.mark.parametrize("batchnorm", [False, True])
def test_buffers_that_no_checkpoint_has_reach_who_joins(supervise, tmp_path, batchnorm):
    supervisor = supervise(2, projects=True, batchnorm=batchnorm, optimizer="sgd")
    for num_replicas, keep in ((3, None), (2, [2])):
        assert supervisor.resize(num_replicas, keep) == "done", supervisor.outputs()
    values = finish(supervisor, tmp_path)
    check_exact(values, batchnorm=batchnorm, optimizer="sgd")
    assert values[0]["projected"][1] == [7.0] * 4
    assert values[0]["projected"] == values[1]["projected"]


def test_generations_in_quick_succession_and_during_the_first_step(supervise, tmp_path):
    supervisor = supervise(2)
    for num_replicas in (3, 2, 4, 1):
        replicas = supervisor.prepare(num_replicas)
        assert supervisor.await_ready(replicas)
        # Not waiting for the first step of the one before.
        supervisor.commit(replicas)
    assert supervisor.await_change() == "done"
    check_exact(finish(supervisor, tmp_path))


def test_a_newer_generation_takes_the_place_of_one_that_nobody_went_to(supervise, tmp_path):
    supervisor = supervise(2)
    replicas = supervisor.prepare(3)
    assert supervisor.await_ready(replicas)
    supervisor.withdraw(replicas, "something better came up")
    assert supervisor.everybody[-1].run.wait(PATIENCE_SECONDS)[0].exit_code == 0
    assert supervisor.resize(1) == "done"
    check_exact(finish(supervisor, tmp_path))


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_change_at_the_end_of_a_pass(supervise, tmp_path, num_replicas):
    supervisor = supervise(2, hold=2, pace=0.002)
    supervisor._until(lambda: (tmp_path / "held").exists() or None, "the pass ends")
    replicas = supervisor.prepare(num_replicas)
    assert supervisor.await_ready(replicas)
    supervisor.commit(replicas)
    time.sleep(0.3)
    (tmp_path / "go").touch()
    assert supervisor.await_change() == "done"
    check_exact(finish(supervisor, tmp_path))


@pytest.mark.parametrize(
    "options", [{"batchnorm": True, "optimizer": "sgd"}, {"scaled": True, "optimizer": "sgd", "accumulation": 1}]
)
def test_layers_that_synchronise_scalers_and_accumulation_go_along(supervise, tmp_path, options):
    supervisor = supervise(1, **options)
    for num_replicas in (3, 2):
        assert supervisor.resize(num_replicas) == "done", supervisor.outputs()
    values = finish(supervisor, tmp_path)
    check_exact(values, batchnorm=options.get("batchnorm", False), optimizer=options.get("optimizer", "adamw"))


def test_a_job_in_mixed_precision_goes_along(supervise, tmp_path):
    supervisor = supervise(2, halves=True, optimizer="sgd")
    for num_replicas in (3, 1, 2):
        assert supervisor.resize(num_replicas) == "done", supervisor.outputs()
    values = finish(supervisor, tmp_path)
    # Gradients of parts of a batch round on their own. An epoch less or more would be five times as far away.
    wanted = LIVE.plain(LIVE.EPOCHS, optimizer="sgd", halves=True)
    assert LIVE.distance(values[0]["parameters"], wanted) < 0.03
    assert values[0]["parameters"] == values[1]["parameters"]
    assert all(value["exact"] and value["seen"] > 0 for value in values)
    assert all(value["passes"] == [[number, SIZE] for number in range(LIVE.EPOCHS)] for value in values)


def test_an_adaptive_job_goes_along(supervise, tmp_path):
    supervisor = supervise(2, max_batch_size=60, epochs=60)
    for num_replicas in (3, 1, 2):
        assert supervisor.resize(num_replicas) == "done"
    values = finish(supervisor, tmp_path)
    assert len({(value["steps"], value["batch"], value["parameters"][0]) for value in values}) == 1
    assert values[0]["events"].count("resized") == 3
    assert all(samples == SIZE for _, samples in values[0]["passes"])


def test_state_that_cannot_travel_means_a_restart_before_anybody_paused(supervise, tmp_path):
    supervisor = supervise(2, function="train_unsendable")
    outcome = supervisor.resize(3)
    assert "object.counter['kept'] is a PosixPath" in outcome
    # Nobody went anywhere: the two replicas go on.
    supervisor.members = supervisor.members[:2]
    supervisor.running -= 1
    supervisor.withdraw(supervisor.everybody, "refused")
    check_exact(finish(supervisor, tmp_path))


@pytest.mark.parametrize("meets", ["barrier", "broadcast"])
def test_a_collective_of_the_scripts_own_before_its_loop_means_a_restart_that_loses_nothing(supervise, tmp_path, meets):
    supervisor = supervise(2, meets=meets)
    supervisor._recovers = False
    outcome = supervisor.resize(3)
    assert f"the script calls torch.distributed.{meets} between pollux.init and its first batch" in outcome
    assert [replica.run.wait(PATIENCE_SECONDS)[0].exit_code for replica in supervisor.everybody] == [75, 75, 75]
    supervisor.start(3)
    supervisor._recovers = True
    values = finish(supervisor, tmp_path)
    assert values[0]["began"] > 0
    check_exact(values)


@pytest.mark.parametrize("when", ["proposed", "committed"])
def test_a_request_to_stop_saves_while_a_change_is_under_way(supervise, tmp_path, when):
    supervisor = supervise(2)
    replicas = supervisor.prepare(3)
    assert supervisor.await_ready(replicas)
    if when == "committed":
        supervisor.commit(replicas)
    for replica in supervisor.everybody:
        os.kill(replica.process, signal.SIGTERM)
    supervisor._recovers = False
    codes = sorted(replica.run.wait(PATIENCE_SECONDS)[0].exit_code for replica in supervisor.everybody)
    assert codes in ([0, 143, 143], [143, 143, 143])
    supervisor.start(2)
    supervisor._recovers = True
    values = finish(supervisor, tmp_path)
    assert values[0]["began"] > 0
    assert "resumed" in values[0]["events"]
    check_exact(values)


def test_ordinary_steps_have_no_collective_for_being_resizable(replica_server, tmp_path):
    supervisor = LiveSupervisor(replica_server, f"{SCRIPT}:profiled", {"folder": str(tmp_path)})
    supervisor.start(2)
    with_store = [result.value for result in supervisor.wait()]
    supervisor.close()
    without = replica_server.run(f"{SCRIPT}:profiled", 2, {"folder": str(tmp_path)})
    assert with_store == without
    assert sum(without[0].values()) > 0


def test_ordinary_steps_ask_the_jobs_store_nothing(replica_server, tmp_path):
    supervisor = LiveSupervisor(replica_server, f"{SCRIPT}:asking", {"folder": str(tmp_path)})
    supervisor.start(2)
    assert [result.value for result in supervisor.wait()] == [0, 0]
    supervisor.close()
