from __future__ import annotations

from pollux.service.engine.launch import run_id
from pollux.testing.servers.service import result_of


def test_a_run_keeps_its_id_through_all_generations(world):
    world.submit("a", max_gpus=1)
    first = world.backend.launches[-1].env
    assert first["POLLUX_RUN_ID"].startswith("a-")
    assert first["WANDB_RUN_ID"] == first["POLLUX_RUN_ID"]
    assert first["WANDB_RESUME"] == "allow"
    result_of(world.engine.pause("a"))
    world.backend.ended("a", "stopped")
    world.engine.loop.wait_until_idle()
    result_of(world.engine.resume("a"))
    world.after(3.0)
    again = world.backend.launches[-1]
    assert again.generation > 1
    assert again.env["POLLUX_RUN_ID"] == first["POLLUX_RUN_ID"]


def test_another_job_of_the_name_is_another_run(world):
    world.submit("a", max_gpus=1)
    first = world.backend.launches[-1].env["POLLUX_RUN_ID"]
    result_of(world.engine.cancel("a"))
    second = world.submit("a", max_gpus=1)
    assert second == "a-2"
    ids = {first, world.backend.launches[-1].env["POLLUX_RUN_ID"]}
    assert len(ids) == 2


def test_what_the_user_says_to_a_tracker_wins(world):
    world.submit("a", max_gpus=1, env={"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"})
    env = world.backend.launches[-1].env
    assert (env["WANDB_RUN_ID"], env["WANDB_RESUME"]) == ("mine", "must")


def test_ids_are_short_enough_for_trackers(world):
    world.submit("x" * 63, max_gpus=1)
    assert len(run_id(world.engine.views.board.get("x" * 63).record)) == 64


def test_jobs_are_told_how_much_notice_nodes_give_where_that_is_known(world):
    world.submit("a", max_gpus=1)
    assert "POLLUX_NOTICE_SECONDS" not in world.backend.launches[-1].env
    world.backend.taken_back_seconds = 33.0
    world.submit("b", max_gpus=1)
    assert world.backend.launches[-1].env["POLLUX_NOTICE_SECONDS"] == "33.0"
