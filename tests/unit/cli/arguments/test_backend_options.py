"""`--option NAME=VALUE`: read as the backend declares them; what it does not have is refused."""

from pathlib import Path

import pytest

from pollux.cli.arguments.backend_options import option_words, preview, read_options
from pollux.core.errors import InvalidInput


def test_values_have_the_type_that_the_backend_declares():
    given = read_options("local", ["warm=no", "log-cap-bytes=1000", "hang_seconds=1.5"])
    assert given == {"warm": False, "log_cap_bytes": 1000, "hang_seconds": 1.5}


def test_the_words_give_the_same_options_again():
    given = {"warm": False, "hang_seconds": 1.5, "slots": 3}
    assert read_options("local", option_words(given)[1::2]) == {"warm": False, "hang_seconds": 1.5}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("warm", "give NAME=VALUE"),
        ("warn=yes", "did you mean 'warm'?"),
        ("warm=perhaps", "give yes or no"),
        ("log_cap_bytes=much", "give a whole number"),
        ("hang_seconds=long", "give a number"),
        ("slots=3", "give --slots 3"),
        ("home=/tmp", "give --home /tmp"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(word, said):
    with pytest.raises(InvalidInput) as refused:
        read_options("local", [word])
    assert said in str(refused.value)


def test_a_backend_without_an_engine_asks_for_nothing():
    assert preview("inline", Path("/nowhere"), {}) == "backend 'inline' asks no engine for anything\n"
