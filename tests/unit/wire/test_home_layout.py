"""Where the service keeps what."""

from pathlib import Path

import pytest

from pollux.core.errors import InvalidInput
from pollux.wire import home_layout


def test_the_home_is_the_one_that_is_named():
    assert home_layout.home({"POLLUX_HOME": "/var/pollux"}) == Path("/var/pollux")
    assert home_layout.home({"POLLUX_HOME": "here"}) == Path.cwd() / "here"
    assert home_layout.home({"POLLUX_HOME": "~/p"}) == Path.home() / "p"


@pytest.mark.parametrize("environ", [{}, {"POLLUX_HOME": ""}])
def test_the_home_where_none_is_named(environ):
    assert home_layout.home(environ) == Path.home() / ".local/state/pollux"


def test_a_home_that_cannot_be_is_refused():
    with pytest.raises(InvalidInput, match="POLLUX_HOME is '~nobody-of-that-name/x'"):
        home_layout.home({"POLLUX_HOME": "~nobody-of-that-name/x"})


def test_what_lies_in_the_home():
    home = Path("/h")
    assert [
        str(path)
        for path in (
            home_layout.service_file(home),
            home_layout.token_file(home),
            home_layout.store_file(home),
            home_layout.telemetry_file(home),
            home_layout.checkpoint_folder(home, "a"),
            home_layout.receipt_folder(home, "a"),
        )
    ] == [
        "/h/service.json",
        "/h/token",
        "/h/store.sqlite",
        "/h/telemetry.sqlite",
        "/h/checkpoints/a",
        "/h/receipts/a",
    ]


@pytest.mark.parametrize("job_id", ["", ".", "..", "../x", "a/b", "/etc", ".hidden", "a\0b"])
def test_an_id_never_leads_out_of_the_home(job_id):
    for folder in (home_layout.checkpoint_folder, home_layout.receipt_folder):
        with pytest.raises(InvalidInput, match="cannot name a folder"):
            folder(Path("/h"), job_id)
