"""What jobs and users put in place of a file or folder neither holds up the service nor leads it elsewhere.

Which routes touch such paths is found out, not listed: an audit hook and patched `os` functions see every access to the
home, the packages and working folders, and each has to be in a thread that requests can give up.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.support.odd_files import KINDS, emptied

from pollux.backends.process.log_file import read_log
from pollux.service import create_app
from pollux.service.http.foreign_reads import ForeignReads
from pollux.service.server.app import operations
from pollux.storage.archive import digest_of, pack
from pollux.testing.servers.service import sample_report
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.codec import encode

SECRET = "nobody outside may read this"


class Watch:
    """Accesses to files below some folders, with the name of the thread; calls may be made to hang."""

    def __init__(self) -> None:
        self.below: tuple[str, ...] = ()
        self.seen: list[tuple[str, str, str]] = []
        self.hangs: str | None = None
        self.goes_on = threading.Event()
        self.hanging = threading.Semaphore(0)

    def note(self, what: str, path: object) -> None:
        if not self.below or not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.path.abspath(os.fsdecode(path))
        if name.startswith(self.below):
            self.seen.append((what, name, threading.current_thread().name))
            if self.hangs is not None and name.startswith(self.hangs):
                self.hanging.release()
                assert self.goes_on.wait(PATIENCE_SECONDS)


_watches: list[Watch] = []


def _heard(event: str, arguments: tuple[object, ...]) -> None:
    if _watches and (event in ("open", "os.listdir", "os.scandir") or event.startswith("os.")) and arguments:
        _watches[-1].note(event, arguments[0])


sys.addaudithook(_heard)


@pytest.fixture
def watch(monkeypatch):
    found = Watch()

    def noting(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(path, *given, **more):
            # A name inside a folder that was opened before, whose own opening was seen.
            if more.get("dir_fd") is None:
                found.note(name, path)
            return real(path, *given, **more)

        return call

    # Not among what the interpreter tells audit hooks.
    for name in ("stat", "lstat", "access", "readlink"):
        monkeypatch.setattr(os, name, noting(f"os.{name}", getattr(os, name)))
    _watches.append(found)
    yield found
    found.goes_on.set()
    _watches.remove(found)


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text("print()\n")
    return folder


@pytest.fixture
def service(make_world, work, tmp_path):
    """A service with two jobs, whose logs and receipts are files; reads are given up soon."""
    world = make_world()
    for name in ("a", "b"):
        world.submit(name, max_gpus=1, workdir=str(work))
        for kind in ("logs", "receipts"):
            (world.home / kind / name).mkdir(parents=True)
        (world.home / "logs" / name / "0.log").write_text("hello\n")
        (world.home / "receipts" / name / "receipt.json").write_text('{"steps": 3}')
    world.backend.logs = lambda job, replica, offset, limit: read_log(
        world.home / "logs" / job / f"{replica}.log", offset, limit
    )
    (tmp_path / "secret").write_text(json.dumps({"secret": SECRET}))
    return world


@pytest.fixture
def client(service):
    app = create_app(service.engine, service.tokens, foreign=ForeignReads(0.3, 0.3, 0.3))
    with TestClient(app, base_url="http://127.0.0.1:7341") as client:
        client.headers["authorization"] = f"Bearer {service.tokens.operator}"
        yield client


def package(folder, content=b"x = 1\n"):
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_bytes(content)
    archive = pack(folder)
    return archive, digest_of(archive)


def sent(archive, digest, **more):
    data = base64.b64encode(archive).decode()
    return {"digest": digest, "size": len(archive), "offset": 0, "data": data, **more}


def job(folder, name="new"):
    return {"name": name, "run": ["python", "train.py"], "gpus": 1, "workdir": str(folder)}


def body_of(name, work, tmp_path):
    archive, digest = package(tmp_path / "package")
    return {
        "submit_job": job(work), "plan_job": job(work, "planned"), "resize_job": {"gpus": 1},
        "set_queue": {"weight": 2}, "send_package": sent(archive, digest), "report": encode(sample_report(1)),
        "begin_replay": {"policies": ["fifo"]}, "shutdown": {"jobs": "keep"},
    }.get(name, {})  # fmt: skip


TOUCHING = {"submit_job", "plan_job", "job_logs", "job_receipt", "send_package"}
"""The operations that touch files or folders which are not the service's own."""


def test_every_operation_leaves_foreign_paths_to_threads_that_can_be_given_up(service, client, work, tmp_path, watch):
    kept = (service.home / "logs", service.home / "receipts", service.home / "packages", service.home / "checkpoints")
    touching = set()
    for operation in operations():
        path = operation.path.replace("{job_id}", "a").replace("{queue}", "q").replace("{replay_id}", "1")
        path += "?follow=false" if operation.name == "events" else ""
        body = body_of(operation.name, work, tmp_path) if operation.takes is not None else None
        watch.seen.clear()
        watch.below = (str(work), *map(str, kept))
        answer = client.request(operation.method, path, json=body)
        watch.below = ()
        assert answer.status_code < 500, (operation.name, answer.text)
        # The engine looks whether a name was used, in the home, which it has to write to anyway.
        others = [
            seen for seen in watch.seen if seen[2] != "pollux-foreign-read" and not seen[2].startswith("pollux-engine")
        ]
        assert not others, operation.name
        if any(seen[2] == "pollux-foreign-read" for seen in watch.seen):
            touching.add(operation.name)
    assert touching == TOUCHING


def is_told_in_one_line(answer):
    """Refused by what is meant for it, or read where that is harmless; and nothing of elsewhere is in it."""
    assert SECRET not in answer.text
    if answer.status_code == 200:
        return
    assert answer.status_code in (409, 413, 422, 503), answer.text
    message = answer.json()["error"]["message"]
    assert "\n" not in message
    assert "failed inside" not in message


def test_a_receipt_that_is_no_file(service, client):
    place = service.home / "receipts" / "a" / "receipt.json"
    for put in KINDS:
        put(emptied(place))
        answer = client.get("/v1/jobs/a/receipt")
        is_told_in_one_line(answer)
        assert str(place) in answer.text or answer.json() == {"receipt": {}}, put


@pytest.mark.parametrize("name", ["0.log", "0.log.1", "0.log.head", "0.log.parts"])
def test_a_log_that_is_no_file(service, client, name):
    folder = service.home / "logs" / "a"
    (folder / "0.log.parts").write_text('{"head": 10, "before": 10, "now": 20}')
    for put in KINDS:
        put(emptied(folder / name))
        for query in ("", "?offset=-10", "?offset=0&limit=1048576", "?offset=99999999"):
            is_told_in_one_line(client.get(f"/v1/jobs/a/logs{query}"))


def test_what_lies_beside_a_log_may_say_anything(service, client):
    for text in (
        '{"head": -1, "before": 0, "now": 0}',
        '{"head": 0, "before": 9, "now": 3}',
        '{"head": 1e400, "before": 0, "now": 0}',
        '{"head": 0, "before": 0, "now": 1' + "0" * 400 + "}",
        '{"head": 0, "before": -5, "now": 9223372036854775807}',
        '{"head": {}, "before": [], "now": null}',
        "[" * 3000,
        "3",
        "",
        "\udcff",
    ):
        (service.home / "logs" / "a" / "0.log.parts").write_bytes(text.encode("utf-8", "surrogateescape"))
        answer = client.get("/v1/jobs/a/logs")
        assert (answer.status_code, answer.json()["text"]) == (200, "hello\n"), text


def test_a_log_whose_files_move_for_ever_is_answered(service, client):
    """Each look beside it gives something else: it is read a few times, not until Python gives up."""
    import pollux.backends.process.log_file as module

    numbers = iter(range(10**6))
    real = module._read_beside
    try:
        module._read_beside = lambda path, ending: json.dumps({"head": next(numbers), "before": 0, "now": 0}).encode()
        assert client.get("/v1/jobs/a/logs").status_code == 200
    finally:
        module._read_beside = real
    assert next(numbers) < 100


@pytest.mark.parametrize("kind", ["logs", "receipts"])
def test_a_folder_that_is_a_link_is_not_followed(service, client, tmp_path, kind):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "0.log").write_text(SECRET)
    (elsewhere / "receipt.json").write_text(json.dumps({"secret": SECRET}))
    folder = service.home / kind / "a"
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    folder.symlink_to(elsewhere)
    answer = client.get("/v1/jobs/a/logs" if kind == "logs" else "/v1/jobs/a/receipt")
    is_told_in_one_line(answer)
    assert answer.status_code == 409


@pytest.mark.parametrize("ending", ["", ".part"])
def test_a_package_in_whose_place_lies_something_else(service, client, tmp_path, ending):
    (service.home / "packages").mkdir()
    for put in KINDS:
        archive, digest = package(tmp_path / "package", put.__name__.encode())
        put(service.home / "packages" / f"{digest}{ending}")
        answer = client.post("/v1/packages", json=sent(archive, digest))
        is_told_in_one_line(answer)
        assert (tmp_path / "secret").read_text() == json.dumps({"secret": SECRET})
        if answer.status_code == 200 and answer.json()["folder"] is not None:
            assert Path(answer.json()["folder"]).is_dir(), put


@pytest.mark.parametrize("place", ["workdir", "script", "workdir/below"])
def test_a_working_folder_that_is_none(service, client, tmp_path, place):
    for number, put in enumerate(KINDS):
        folder = tmp_path / "jobs" / f"new-{number}"
        folder.mkdir(parents=True)
        if place == "script":
            put(folder / "train.py")
        else:
            folder.rmdir()
            put(folder)
        asked = job(folder / "below" if place == "workdir/below" else folder, folder.name)
        for path in ("/v1/plan", "/v1/jobs"):
            answer = client.post(path, json=asked)
            assert answer.status_code in (201, 200, 422), (put, answer.text)
            assert SECRET not in answer.text


def test_a_working_folder_of_no_possible_name(client):
    for name in ("/" + "x" * 300, "/" + "x/" * 3000, "/proc/self/fd/999999"):
        assert client.post("/v1/plan", json=job(name)).status_code == 422


HANGING = {
    "job_logs": ("GET", "/v1/jobs/a/logs", "logs/a"),
    "job_receipt": ("GET", "/v1/jobs/a/receipt", "receipts"),
    "send_package": ("POST", "/v1/packages", "packages"),
    "submit_job": ("POST", "/v1/jobs", "hung"),
    "plan_job": ("POST", "/v1/plan", "hung"),
}


def test_every_operation_that_touches_foreign_paths_is_tried_with_one_that_hangs():
    assert HANGING.keys() == TOUCHING


@pytest.mark.parametrize("name", HANGING)
def test_a_file_system_that_hangs_holds_up_nobody_else(service, client, work, tmp_path, watch, name):
    """As many requests as there are threads, and more: each is told, and everything else goes on."""
    method, path, hangs = HANGING[name]
    archive, digest = package(tmp_path / "package")
    hung = tmp_path / hangs
    hung.mkdir(exist_ok=True)
    if method == "POST" and name != "send_package":
        (hung / "train.py").touch()
    body = {"send_package": sent(archive, digest)}.get(name, job(hung) if method == "POST" else None)
    watch.below = watch.hangs = str(hung)
    with ThreadPoolExecutor(40) as callers:
        asked = [callers.submit(client.request, method, path, json=body) for _ in range(40)]
        assert watch.hanging.acquire(timeout=PATIENCE_SECONDS)
        others = ["/healthz", "/readyz", "/v1/jobs", "/v1/status", "/v1/summary", "/metrics", "/v1/jobs/b/logs"]
        others += ["/v1/jobs/b/receipt"] * (name != "job_receipt")
        for other in others:
            assert client.get(other).status_code == 200, other
        if name in ("submit_job", "plan_job"):
            assert client.post("/v1/plan", json=job(work)).status_code == 200
        for each in asked:
            answer = each.result(PATIENCE_SECONDS)
            assert answer.status_code == 503
            assert "within 0.3 s" in answer.json()["error"]["message"]
            assert answer.json()["error"]["retryable"] is True
    threads = [thread for thread in threading.enumerate() if thread.name == "pollux-foreign-read"]
    assert 0 < len(threads) <= 4
    assert all(thread.daemon for thread in threads), "a process that ends does not wait for them"
    watch.goes_on.set()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    watch.hangs = None
    assert client.request(method, path, json=body).status_code in (200, 201), "it is asked again once it answers"
