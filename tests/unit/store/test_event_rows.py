"""A saved state as text: the same as that of one piece."""

import json

import pytest

from pollux.core.errors import InvalidInput
from pollux.store._event_rows import state_to_text, to_text


@pytest.mark.parametrize("num_jobs", [0, 1, 31, 32, 33, 100])
def test_pieces_make_the_same_text(num_jobs):
    jobs: list[dict[str, object]] = [{"id": f"job-{index}", "é": [None, 0.1, {}, []]} for index in range(num_jobs)]
    state = {"format": 1, "nodes": [], "jobs": jobs, "bank": {"kind": [1, 2]}, "last": None, 'a "name"': "x"}
    assert state_to_text(state) == to_text(state, "the state")
    assert json.loads(state_to_text(state)) == state


def test_an_empty_state():
    assert state_to_text({}) == "{}"


def test_what_is_not_plain_is_refused():
    with pytest.raises(InvalidInput, match="the controller's state cannot be stored"):
        state_to_text({"jobs": [{"at": float("nan")}]})
