"""`pollux run` beside a job that writes faster than its output can be shown: signals and the status line still work."""

import os
import signal
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from pollux.backends.protocol import LogChunk
from pollux.cli.commands.jobs import run as module

REQUEST: Any = SimpleNamespace(name="flood", min_gpus=1)


@dataclass
class Status:
    state: str = "running"
    ended_at: float | None = None
    generation: int = 1


def answered(value):
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Flood:
    """An engine whose job's log has no end until the job has one; `at` is what happens at which piece of it."""

    def __init__(self, left: int, at: dict[int, Any]):
        self.now, self.pieces, self.left, self.at = Status(), 0, left, at
        self.done: list[str] = []
        self.backend = SimpleNamespace(logs=self.logs, running=tuple, stop=lambda *asked: self.end("killed"))

    def status(self):
        return answered(SimpleNamespace(nodes=[SimpleNamespace(gpus=1)]))

    def submit(self, request):
        return answered([SimpleNamespace(id=request.name)])

    def job(self, job):
        return self.now

    def cancel(self, job):
        self.done.append("cancelled")
        return answered(None)

    def end(self, how):
        self.done.append(how)
        self.now = Status("cancelled", 1.0)

    def logs(self, job, replica, offset, limit=65536):
        if offset < 0:
            return LogChunk("", 0, True)
        self.pieces += 1
        assert self.pieces < 2000, "nobody looks at signals"
        self.at.get(self.pieces, lambda: None)()
        if self.now.ended_at is not None:
            self.left -= 1
        return LogChunk(f"{self.pieces}\n", offset + 65536, self.left == 0)


class Screen:
    def __init__(self):
        self.shown, self.lines, self.notes, self.may_be_gone = "", 0, [], False

    def log(self, text):
        self.shown += text

    def status(self, job, now):
        self.lines += 1

    def note(self, text):
        self.notes.append(text)


@pytest.fixture
def screen(monkeypatch):
    def sleep(seconds):
        raise AssertionError("it sleeps while there is more to be shown")

    monkeypatch.setattr(module.time, "sleep", sleep)
    return Screen()


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_a_flood_holds_up_neither_signals_nor_the_status_line(screen):
    engine: Any = Flood(100, {40: interrupt, 200: interrupt})
    status, number = module._follow(engine, REQUEST, screen)
    assert (status["state"], number) == ("cancelled", signal.SIGINT)
    assert engine.done == ["cancelled", "killed"]
    assert "Ctrl-C again kills it" in screen.notes[0]
    # All that was left when the job ended was shown.
    assert screen.shown == "".join(f"{piece}\n" for piece in range(1, engine.pieces + 1))
    assert 300 <= engine.pieces < 350
    assert screen.lines >= engine.pieces // 16


def test_a_signal_after_the_end_leaves_out_what_is_left(screen):
    engine: Any = Flood(1000, {40: interrupt, 200: interrupt, 300: interrupt})
    assert module._follow(engine, REQUEST, screen)[1] == signal.SIGINT
    assert engine.pieces < 350


def test_a_log_that_cannot_be_read_is_not_waited_for():
    engine: Any = SimpleNamespace(logs=lambda job, replica, offset: LogChunk("", offset, False))
    shown: Any = Screen()
    assert module._show_log(engine, "job", 7, shown) == (7, False)
