"""What people read of the errors that Ray raises."""

from pollux.backends.ray.driver.ray_errors import connection_error, one_line


def test_long_errors_are_told_by_their_last_line():
    assert one_line(RuntimeError("Traceback\n  somewhere\nValueError: no\n\n")) == "ValueError: no"
    assert one_line(RuntimeError()) == "RuntimeError"
    assert one_line(RuntimeError("Traceback\npollux.core.errors.BackendFailed: it is away")) == "it is away"


MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.60.0
    Python: 3.11.7
This process on node 10.0.0.1:7 was started with:
    Ray: 2.51.0
    Python: 3.11.9
"""


def test_another_version_is_told_whole_and_with_a_remedy():
    told = connection_error(RuntimeError(MISMATCH))
    assert all(word in told for word in ("Version mismatch", "Ray: 2.60.0", "Ray: 2.51.0", "3.11.7", "3.11.9"))
    assert told.endswith("install the same Ray and the same Python on every node")
    assert "\n" not in told
    assert connection_error(ConnectionRefusedError("refused")) == "refused"


class AuthenticationError(Exception):
    """As Ray's."""


def test_of_a_token_that_was_not_found_the_first_sentence_is_told():
    told = connection_error(
        AuthenticationError("but no authentication token was found. Ensure that https://x.y. And so on")
    )
    assert told == "but no authentication token was found"
