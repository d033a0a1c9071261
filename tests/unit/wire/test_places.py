"""Where the service keeps what."""

from pathlib import Path

import pytest

from pollux.core.errors import InvalidInput
from pollux.wire import places


def test_the_home_is_the_one_that_is_named():
    assert places.home({"POLLUX_HOME": "/var/pollux"}) == Path("/var/pollux")
    assert places.home({"POLLUX_HOME": "here"}) == Path.cwd() / "here"
    assert places.home({"POLLUX_HOME": "~/p"}) == Path.home() / "p"


@pytest.mark.parametrize("environ", [{}, {"POLLUX_HOME": ""}])
def test_the_home_where_none_is_named(environ):
    assert places.home(environ) == Path.home() / ".local/state/pollux"


def test_a_home_that_cannot_be_is_refused():
    with pytest.raises(InvalidInput, match="POLLUX_HOME is '~nobody-of-that-name/x'"):
        places.home({"POLLUX_HOME": "~nobody-of-that-name/x"})


def test_what_lies_in_the_home():
    home = Path("/h")
    assert [
        str(path)
        for path in (
            places.service_file(home),
            places.token_file(home),
            places.store_file(home),
            places.telemetry_file(home),
            places.run_folder(home, "a"),
            places.log_folder(home, "a"),
            places.log_file(home, "a", 3),
            places.checkpoint_folder(home, "a"),
            places.receipt_folder(home, "a"),
        )
    ] == [
        "/h/service.json",
        "/h/token",
        "/h/store.sqlite",
        "/h/telemetry.sqlite",
        "/h/run/a",
        "/h/logs/a",
        "/h/logs/a/3.log",
        "/h/checkpoints/a",
        "/h/receipts/a",
    ]


@pytest.mark.parametrize("job_id", ["", ".", "..", "../x", "a/b", "/etc", ".hidden", "a\0b"])
def test_an_id_never_leads_out_of_the_home(job_id):
    for folder in (places.run_folder, places.log_folder, places.checkpoint_folder, places.receipt_folder):
        with pytest.raises(InvalidInput, match="cannot name a folder"):
            folder(Path("/h"), job_id)
