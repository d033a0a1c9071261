"""`pollux logs`: all of it, its end, and what comes while the job runs."""

import json

import pytest

from pollux.cli import logs as module

LINES = [f"line {number}\n" for number in range(40_000)]
LOG = "".join(LINES)


@pytest.fixture
def log(fake):
    """A log of several pieces; `growth` are the lines that come with each further look at the job."""
    fake.written = LOG
    fake.growth = []

    def piece(query, body):
        offset, limit = int(query["offset"]), int(query["limit"])
        start = max(0, len(fake.written) + offset) if offset < 0 else offset
        text = fake.written[start : start + limit]
        end = start + len(text)
        return {"text": text, "offset": end, "at_end": end == len(fake.written)}

    def state(query, body):
        if fake.growth:
            fake.written += fake.growth.pop(0)
            return {"job": fake.job("resnet")}
        return {"job": fake.job("resnet", state="succeeded")}

    fake.answers["GET", "/v1/jobs/resnet/logs"] = piece
    fake.answers["GET", "/v1/jobs/resnet"] = state
    return fake


def test_everything(run, log):
    assert run("logs", "resnet").stdout == LOG
    assert log.asked[0][2]["replica"] == "0"


@pytest.mark.parametrize("lines", [0, 1, 100, 30_000, 50_000])
def test_tail(run, log, lines):
    assert run("logs", "--tail", lines, "resnet").stdout == "".join(LINES[len(LINES) - min(lines, len(LINES)) :])


def test_tail_of_a_short_log(run, log):
    log.written = "only\nthis"
    assert run("logs", "-n", 1, "resnet").stdout == "this"
    assert len(log.asked) == 1


def test_control_codes_are_shown_on_a_terminal_only(run, log, monkeypatch):
    log.written = "a\x1b[2J\tb\rc\n\x9b31m\x07\n"
    assert run("logs", "resnet").stdout == log.written
    written: list[str] = []

    class Terminal:
        def isatty(self):
            return True

        def flush(self):
            pass

        write = staticmethod(written.append)

    monkeypatch.setattr(module.sys, "stdout", Terminal())
    module.write_log(log.written)
    module.write_log(log.written, raw=True)
    assert written == ["a^[[2J\tb\rc\n\\x9b31m^G\n", log.written]


def test_json(run, log):
    log.written = "a\nb\n"
    document = json.loads(run("logs", "--json", "--replica", 3, "--tail", 1, "resnet").stdout)
    assert document == {"job_id": "resnet", "replica": 3, "text": "b\n", "offset": 4}
    assert log.asked[0][2]["replica"] == "3"


def test_follow_until_the_job_has_ended(run, log, monkeypatch):
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.0)
    log.written, log.growth = "old\nnew\n", ["more\n", "", "last\n"]
    assert run("logs", "-f", "--tail", 1, "resnet").stdout == "new\nmore\nlast\n"


def test_follow_waits_for_a_service_that_comes_back(run, log, monkeypatch):
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.0)
    log.written, log.growth = "first\n", ["second\n"]
    working = log.answers["GET", "/v1/jobs/resnet/logs"]
    answers = iter([working, (503, log.error("Unreachable", "restarting")), working])
    log.answers["GET", "/v1/jobs/resnet/logs"] = lambda query, body: (
        answer(query, body) if callable(answer := next(answers, working)) else answer
    )
    assert run("logs", "-f", "resnet").stdout == "first\nsecond\n"


def test_follow_and_json_exclude_each_other(run, log):
    result = run("logs", "-f", "--json", "resnet")
    assert result.exit_code == 2
    assert "--follow" in result.stderr
