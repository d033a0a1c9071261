import pytest

from pollux.core import BrokenDecision, IllegalTransition, InvalidInput, PolluxError, UnknownName
from pollux.core.errors import StoreFailed


@pytest.mark.parametrize(
    ("error", "exit_code", "http_status"),
    [
        (PolluxError, 1, 500),
        (InvalidInput, 2, 422),
        (UnknownName, 2, 404),
        (IllegalTransition, 70, 409),
        (BrokenDecision, 70, 500),
    ],
)
def test_classes_carry_their_codes(error, exit_code, http_status):
    assert issubclass(error, PolluxError)
    assert (error.exit_code, error.http_status, error.retryable) == (exit_code, http_status, False)


def test_a_store_that_fails_may_be_asked_again():
    assert (StoreFailed.exit_code, StoreFailed.http_status, StoreFailed.retryable) == (74, 507, True)


def test_users_can_fix_invalid_input_and_unknown_names_only():
    assert issubclass(UnknownName, InvalidInput)
    assert not issubclass(IllegalTransition, InvalidInput)
    assert not issubclass(BrokenDecision, InvalidInput)


def test_a_close_name_is_suggested():
    error = UnknownName("policy", "tiresas", ["tiresias", "fifo"])
    assert str(error) == "unknown policy 'tiresas': did you mean 'tiresias'? known: fifo, tiresias"


def test_a_name_far_from_all_is_only_told_what_there_is():
    error = UnknownName("policy", "xyzzy", ["tiresias", "fifo"])
    assert str(error) == "unknown policy 'xyzzy': known: fifo, tiresias"


def test_where_nothing_is_known_no_empty_list_is_shown():
    assert str(UnknownName("job to run after", "nope", [])) == "unknown job to run after 'nope': there is none yet"
