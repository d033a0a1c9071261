"""The client: where the service is, what is sent, and errors as the classes they were raised as."""

import json
import os
import socket

import pytest

from pollux.cli.client.client import Client, connect, find_service, job_path, read_token
from pollux.core import errors
from pollux.core.errors import Conflict, InvalidInput, PolluxError, Unauthorised, UnknownName, Unreachable
from pollux.wire import socket_owners


def test_finds_address_and_token_in_the_home(fake):
    fake.answers["GET", "/v1/status"] = {"version": "1"}
    assert connect().get("/v1/status") == {"version": "1"}
    assert fake.asked[0][4]["Authorization"] == "Bearer the-token"


def test_the_environment_wins(fake, tmp_path):
    environ = {"POLLUX_SERVER": "http://example.org:1", "POLLUX_TOKEN": " other ", "POLLUX_HOME": str(fake.home)}
    assert find_service(environ, fake.home) == "http://example.org:1"
    assert read_token(environ, fake.home) == "other"
    assert read_token({}, tmp_path / "nowhere") is None


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '"url"'])
def test_a_broken_service_file_is_one_clear_error(fake, content):
    (fake.home / "service.json").write_text(content)
    with pytest.raises(Unreachable, match="pollux up") as told:
        find_service({}, fake.home)
    assert str(fake.home / "service.json") in str(told.value)
    assert "Error" not in str(told.value)


def test_a_token_that_is_no_text_is_one_clear_error(fake):
    (fake.home / "token").write_bytes(b"\xff\xfe")
    with pytest.raises(Unauthorised, match="POLLUX_TOKEN"):
        read_token({}, fake.home)


def test_nothing_running(tmp_path):
    with pytest.raises(Unreachable, match="start one with 'pollux up'"):
        find_service({}, tmp_path)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(Unreachable, match=f"no service at {url}: start one with 'pollux up'"):
            Client(url).get("/v1/status")


@pytest.mark.parametrize("url", ["", "localhost:7341", "ftp://x", "http://", "http://x:port", "http://x:99999"])
def test_an_address_that_is_none(url):
    with pytest.raises(InvalidInput, match="POLLUX_SERVER"):
        Client(url)


def test_a_token_with_a_line_break():
    with pytest.raises(InvalidInput, match="POLLUX_TOKEN"):
        Client("http://127.0.0.1:1", "two\nlines")


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name not in ("PolluxError", "choices")])
def test_every_error_comes_back_as_itself(fake, name):
    kind = getattr(errors, name)
    fake.answers["GET", "/v1/jobs/x"] = (kind.http_status, fake.error(name, "the message"))
    with pytest.raises(kind, match=r"^the message$") as caught:
        connect().get(job_path("x"))
    assert type(caught.value) is kind
    assert caught.value.exit_code == kind.exit_code


@pytest.fixture
def stranger(monkeypatch):
    """Every server of this machine now belongs to another user than the commands."""
    monkeypatch.setattr(socket_owners, "_ROOT", -1)
    monkeypatch.setattr(socket_owners.os, "geteuid", lambda: 4321)


@pytest.mark.parametrize("ask", ["get", "post", "events", "lines"])
def test_no_token_goes_to_another_users_server(fake, stranger, ask):
    client = connect({"POLLUX_HOME": str(fake.home), "POLLUX_TOKEN": "the-token"})
    with pytest.raises(Unreachable, match=rf"user {os.getuid()} of this machine listens at 127.0.0.1:"):
        list(getattr(client, ask)(*([] if ask == "events" else ["/v1/status"])))
    assert fake.asked == []


@pytest.mark.parametrize("trusted", ["who wrote the token", "who is named"])
def test_a_user_who_may_have_the_token_may_be_sent_it(fake, stranger, trusted):
    fake.answers["GET", "/v1/status"] = {"version": "1"}
    named = {"POLLUX_TOKEN": "the-token", "POLLUX_SERVER_UID": str(os.getuid())} if trusted == "who is named" else {}
    assert connect({"POLLUX_HOME": str(fake.home), **named}).get("/v1/status") == {"version": "1"}


def test_a_trusted_user_is_a_number(fake, stranger):
    with pytest.raises(InvalidInput, match="POLLUX_SERVER_UID is 'alice'"):
        connect({"POLLUX_HOME": str(fake.home), "POLLUX_SERVER_UID": "alice"}).get("/v1/status")


def test_a_service_that_has_moved_from_a_port_that_a_stranger_took_is_found(fake, monkeypatch):
    fake.answers["GET", "/v1/status"] = {"version": "1"}
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        real = socket_owners.tcp_sockets
        theirs = {True: 4321}
        monkeypatch.setattr(
            socket_owners, "tcp_sockets",
            lambda ports: (each._replace(user=theirs.get(port in ports, each.user)) for each in real(ports)),
        )  # fmt: skip
        client = Client(f"http://127.0.0.1:{port}", "the-token", find=lambda: fake.url)
        assert client.get("/v1/status") == {"version": "1"}


@pytest.mark.parametrize(
    ("status", "kind"), [(401, Unauthorised), (404, InvalidInput), (418, InvalidInput), (500, PolluxError)]
)
def test_an_error_of_another_version_goes_by_its_status(fake, status, kind):
    fake.answers["GET", "/v1/status"] = (status, fake.error("choices", "said so"))
    with pytest.raises(kind, match="said so") as caught:
        connect().get("/v1/status")
    assert type(caught.value) is kind


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"null", (502, "gateway"), (500, {"error": "text"})])
def test_what_is_no_answer_of_the_service(fake, answer):
    fake.answers["GET", "/v1/status"] = answer
    with pytest.raises(Unreachable, match=r"check the address"):
        connect().get("/v1/status")


def test_a_job_id_stays_one_part_of_the_path(fake):
    assert job_path("a/../b?c", "logs") == "/v1/jobs/a%2F..%2Fb%3Fc/logs"
    with pytest.raises(UnknownName):
        connect().get(job_path("a/b"))


def test_a_submit_whose_answer_is_lost_is_sent_again_under_the_same_key(fake):
    answers = iter([b"", {"job": {"id": "train"}, "plan": {}}])

    def answer(query, body):
        return next(answers)

    fake.answers["POST", "/v1/jobs"] = answer
    assert connect().submit({"run": "true"})["job"]["id"] == "train"
    keys = [headers["Idempotency-Key"] for _, _, _, _, headers in fake.asked]
    assert len(keys) == 2
    assert keys[0] == keys[1]


def test_a_refused_submit_is_sent_once(fake):
    fake.answers["POST", "/v1/jobs"] = (409, fake.error("Conflict", "name in use"))
    with pytest.raises(Conflict):
        connect().submit({})
    assert len(fake.asked) == 1


def test_events(fake):
    stream = (
        ": keep-alive\n\n"
        'id: 7\nevent: decision\ndata: {"at": 1,\ndata: "kind": "decision"}\n\n'
        "data: broken\r\n\r\nid: 8\n\n"
    )
    fake.answers["GET", "/v1/events"] = stream.encode()
    events = list(connect().events("6"))
    assert [(event.id, event.kind, event.data) for event in events] == [
        ("7", "decision", {"at": 1, "kind": "decision"}),
        ("", "message", None),
    ]
    assert fake.asked[0][4]["Last-Event-ID"] == "6"


def test_lines(fake):
    fake.answers["GET", "/v1/history"] = b'{"format": "pollux-history"}\n{"type": "x"}\n'
    assert [json.loads(line) for line in connect().lines("/v1/history")] == [
        {"format": "pollux-history"},
        {"type": "x"},
    ]


def test_query_values_that_are_none_are_left_out(fake):
    fake.answers["GET", "/v1/jobs"] = {"jobs": []}
    connect().get("/v1/jobs", active=True, state=None, limit=3)
    assert fake.asked[0][2] == {"active": "true", "limit": "3"}


def test_a_service_that_moved_is_found_again(fake):
    client = connect()
    fake.answers["GET", "/v1/status"] = {"version": "1"}
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        (fake.home / "service.json").write_text(json.dumps({"url": f"http://127.0.0.1:{unused.getsockname()[1]}"}))
        moved = connect()
        with pytest.raises(Unreachable, match="no service at"):
            moved.get("/v1/status")
        (fake.home / "service.json").write_text(json.dumps({"url": fake.url}))
        assert moved.get("/v1/status") == client.get("/v1/status")
        assert moved.url == fake.url
