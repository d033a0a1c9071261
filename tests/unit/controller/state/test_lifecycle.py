import itertools

import pytest

from pollux.controller.state.lifecycle import ENDED, HOLDING, TRANSITIONS, JobState, step
from pollux.core import IllegalTransition

LEGAL = {
    "queued": "starting paused succeeded failed cancelled",
    "starting": "running resizing queued paused succeeded failed cancelled",
    "running": "resizing queued paused succeeded failed cancelled",
    "resizing": "running resizing queued paused succeeded failed cancelled",
    "paused": "queued succeeded failed cancelled",
    "succeeded": "",
    "failed": "",
    "cancelled": "",
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(JobState, JobState)))
def test_the_whole_table(before, after):
    if after in LEGAL[before].split():
        assert step("j", before, after) is after
    else:
        with pytest.raises(IllegalTransition) as error:
            step("j", before, after)
        assert f"job 'j' is {before} and cannot become {after}" in str(error.value)
        assert all(word in str(error.value) for word in LEGAL[before].split())


def test_every_state_has_a_row():
    assert set(TRANSITIONS) == set(JobState)


def test_nothing_leaves_an_end():
    assert {state for state in JobState if not TRANSITIONS[state]} == ENDED


def test_who_holds_gpus_can_be_preempted_and_paused():
    for state in HOLDING:
        assert {JobState.QUEUED, JobState.PAUSED} <= TRANSITIONS[state]


def test_a_refusal_tells_the_story_so_far():
    with pytest.raises(IllegalTransition, match=r"job 'j' is failed \(exit 1\) and cannot become paused"):
        step("j", JobState.FAILED, JobState.PAUSED, "exit 1")
