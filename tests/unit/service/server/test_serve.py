from __future__ import annotations

import errno
import json
import os
import socket
import stat

import pytest
from tests.support.network import has_ipv6

from pollux.backends.process.network import is_loopback
from pollux.core.errors import Conflict, InvalidInput, Unauthorised, UnknownName
from pollux.service import ServiceSettings, Tokens
from pollux.service.server.serve import announce, listen, operator_token, prepare_home, retract, url_of


def test_the_token_is_made_once_and_for_its_owner_only(tmp_path):
    path = tmp_path / "token"
    token = operator_token(path)
    assert len(token) >= 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert operator_token(path) == token


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o666])
def test_a_token_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "token"
    operator_token(path)
    path.chmod(mode)
    with pytest.raises(InvalidInput, match="others"):
        operator_token(path)


@pytest.mark.parametrize("content", [b"short\n", b"\xff" * 40])
def test_a_damaged_token_is_refused(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(InvalidInput, match="remove it"):
        operator_token(path)


def test_an_empty_token_is_replaced_with_a_word(tmp_path, caplog):
    """A version before left one where it was killed between making and writing it."""
    path = tmp_path / "token"
    path.touch(0o600)
    token = operator_token(path)
    assert len(token) >= 40
    assert [record.getMessage() for record in caplog.records] == [
        f"token file {path} was empty, as after a full disk; a new token is made"
    ]
    assert operator_token(path) == token
    assert len(caplog.records) == 1


@pytest.mark.parametrize("at", ["fdopen", "fsync", "link"])
def test_a_start_that_is_killed_before_the_token_is_there_leaves_the_next_one_free(tmp_path, monkeypatch, at):
    path = tmp_path / "token"

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, at, killed)
        with pytest.raises(KeyboardInterrupt):
            operator_token(path)
    assert not path.exists()
    token = operator_token(path)
    assert path.read_text() == token + "\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_token_is_made_where_there_are_no_links(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    path = tmp_path / "token"
    assert operator_token(path) == path.read_text().strip()
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_of_others_keeps_its_mode(tmp_path):
    home = tmp_path / "shared"
    home.mkdir()
    (home / "thesis.tex").touch()
    home.chmod(0o755)
    with pytest.raises(InvalidInput, match=r"mode 755.*not Pollux's.*POLLUX_HOME"):
        prepare_home(home)
    assert stat.S_IMODE(home.stat().st_mode) == 0o755
    home.chmod(0o700)
    prepare_home(home)


@pytest.mark.parametrize("name", ["service.log", "store.sqlite", "service.json", "viewer-token"])
def test_a_folder_of_a_service_is_closed_again(tmp_path, name):
    home = tmp_path / "home"
    home.mkdir()
    (home / name).touch()
    home.chmod(0o755)
    prepare_home(home)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_home_is_for_its_owner_only(tmp_path):
    home = tmp_path / "a" / "b"
    prepare_home(home)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    home.chmod(0o755)
    prepare_home(home)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="POLLUX_HOME"):
        prepare_home(tmp_path / "file" / "home")


def test_a_port_in_use_is_one_clear_error():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(Conflict, match=f"port {port}.*--port"):
            listen("127.0.0.1", port)
    with pytest.raises(InvalidInput, match="address"):
        listen("no-such-host.invalid", 1)


@pytest.fixture
def no_ipv6(monkeypatch):
    """A kernel without it, and a name that has an address of each kind."""
    make, look = socket.socket, socket.getaddrinfo

    def without(family=-1, *more, **named):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return make(family, *more, **named)

    def both(host, port, **named):
        return [
            row for each in (("::1", "127.0.0.1") if host == "both" else (host,)) for row in look(each, port, **named)
        ]

    monkeypatch.setattr(socket, "socket", without)
    monkeypatch.setattr(socket, "getaddrinfo", both)


def test_an_address_of_a_kind_that_this_machine_lacks_is_passed_over_or_one_clear_error(no_ipv6):
    with listen("both", 0) as first:
        assert first.getsockname()[0] == "127.0.0.1"
        with pytest.raises(Conflict, match="in use"):
            listen("both", first.getsockname()[1])
    with pytest.raises(InvalidInput, match=r"cannot listen on ::1: Address family not supported .*--host"):
        listen("::1", 0)


def test_the_url_is_one_that_works_from_here(tmp_path):
    settings = ServiceSettings(home=tmp_path)
    with listen("127.0.0.1", 0) as found:
        assert url_of(settings, found) == f"http://127.0.0.1:{found.getsockname()[1]}"
    with listen("0.0.0.0", 0) as found:
        assert url_of(settings, found).startswith("http://127.0.0.1:")
    if has_ipv6():
        with listen("::1", 0) as found:
            assert url_of(settings, found).startswith("http://[::1]:")


def test_addresses_that_others_reach_need_tls_or_a_word(tmp_path):
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        ServiceSettings(home=tmp_path, host=host).check_bind()
    for host in ("0.0.0.0", "10.1.2.3", "::", "box.example"):
        with pytest.raises(InvalidInput, match="--insecure-bind"):
            ServiceSettings(home=tmp_path, host=host).check_bind()
        ServiceSettings(home=tmp_path, host=host, insecure_bind=True).check_bind()
        ServiceSettings(home=tmp_path, host=host, tls_cert=tmp_path, tls_key=tmp_path).check_bind()
    with pytest.raises(InvalidInput, match="both"):
        ServiceSettings(home=tmp_path, tls_cert=tmp_path)
    assert not is_loopback("localhost.evil.example")


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1},
        {"port": 65536},
        {"interval_seconds": 0},
        {"min_gap_seconds": float("nan")},
        {"report_every_seconds": -1},
    ],
)
def test_settings_out_of_range(tmp_path, wrong):
    with pytest.raises(InvalidInput):
        ServiceSettings(home=tmp_path, **wrong)


@pytest.mark.parametrize("wrong", [{"trigger": "evnts"}, {"store": "disk"}, {"at_stop": "kill"}])
def test_words_that_are_not_known(tmp_path, wrong):
    with pytest.raises(UnknownName):
        ServiceSettings(home=tmp_path, **wrong)


def test_where_the_service_is_gets_told_and_taken_back(tmp_path):
    place = tmp_path / "service.json"
    announce(place, "http://127.0.0.1:1")
    assert json.loads(place.read_text())["pid"] == os.getpid()
    retract(place)
    assert not place.exists()
    place.write_text('{"pid": 1}')
    retract(place)
    assert place.exists()


def test_job_tokens_are_made_of_the_secret():
    tokens, others = Tokens("operator" * 4, "a"), Tokens("operator" * 4, "b")
    assert tokens.caller(f"Bearer {tokens.for_job('j')}").job_id == "j"
    assert tokens.caller(f"bearer {tokens.operator}").job_id is None
    for wrong in (None, "", "Bearer", "Bearer ", "Bearer pollux-job.j.", f"Bearer {others.for_job('j')}", "Bearer é"):
        with pytest.raises(Unauthorised):
            tokens.caller(wrong)
