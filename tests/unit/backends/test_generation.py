"""How a generation ends whose replicas ended with 0 and may not have been done; real processes are tried elsewhere."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pollux.backends._generation import Generation, Member


@pytest.fixture
def generation():
    order: Any = SimpleNamespace(job_id="job", generation=2, memory_bytes=0.0, grace_seconds=5.0, argv=("python",))
    hands: Any = SimpleNamespace(is_clear=lambda kill: True, lacks_memory=False, sweep_seconds=0.1)
    made = Generation(order, Path("nowhere"), hands, False, lambda: None)
    for number in (0, 1):
        body: Any = SimpleNamespace(output=-1)
        log: Any = SimpleNamespace(tail=b"", close=lambda: None)
        made.members.append(Member(number, number, str(number), body, log, code=0))
    return made


def test_all_that_ended_well_were_done(generation):
    generation.look()
    assert generation.ended.outcome == "succeeded"


@pytest.mark.parametrize("given_up", [False, True])
def test_one_that_left_with_what_nobody_else_has_was_not_done(generation, given_up):
    generation.doubt(1, "replica 1 ended without handing over what it holds")
    if given_up:
        generation.give_up("replica 1 ended without handing over what it holds")
    generation.look()
    assert generation.ended.outcome == "lost"
    assert generation.ended.detail == "replica 1 ended without handing over what it holds"


def test_one_that_said_that_it_was_through_is_believed(generation):
    generation.doubt(1, "replica 1 ended without handing over what it holds")
    generation.believe()
    generation.look()
    assert generation.ended.outcome == "succeeded"


def test_one_in_doubt_that_was_told_to_stop_is_stopped(generation):
    generation.doubt(1, "replica 1 ended without handing over what it holds")
    generation.stop(0.0)
    generation._kill_at = None
    generation.look()
    assert generation.ended.outcome == "stopped"
