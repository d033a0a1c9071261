"""`pollux logs`: all of it, its end, and what comes while the job runs."""

import json

import pytest

from pollux.cli.commands.jobs import logs as module

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
    assert len(log.asked) == 2


def test_an_empty_log(run, log):
    log.written = ""
    assert run("logs", "resnet").stdout == ""
    assert json.loads(run("logs", "--json", "--tail", 5, "resnet").stdout)["offset"] == 0


@pytest.mark.parametrize("options", [(), ("--tail", 5), ("--json",)])
def test_one_that_cannot_be_read_is_not_waited_for_without_end(run, log, monkeypatch, options):
    monkeypatch.setattr(module, "_LONGEST_ABSENCE_SECONDS", 0.2)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.05)
    log.answers["GET", "/v1/jobs/resnet/logs"] = {"text": "", "offset": 0, "at_end": False}
    result = run("logs", *options, "resnet")
    assert result.exit_code == 1
    assert "the log of replica 0 of job 'resnet' cannot be read" in result.stderr


def test_lines_of_a_tail_end_with_line_feeds_only(run, log):
    bar = "\r".join(f"{percent} %" for percent in range(101))
    log.written = f"one\n{bar}\ntwo\x0b\x0c\u2028\x85and\nthree"
    assert run("logs", "--tail", 3, "resnet").stdout == log.written.removeprefix("one\n")


@pytest.fixture
def flood(log):
    """More is written with every look at the log than is read: whoever waits for its end gets an error."""
    piece = log.answers["GET", "/v1/jobs/resnet/logs"]
    log.seen = []

    def grown(query, body):
        found = piece(query, body)
        log.seen.append(found)
        log.written += "x" * 99_999 + "\n"
        return found if len(log.seen) < 60 else (500, log.error("PolluxError", "the end never comes"))

    log.answers["GET", "/v1/jobs/resnet/logs"] = grown
    return log


@pytest.mark.parametrize(("options", "lines"), [((), LINES), (("--tail", 30_000), LINES[-30_000:])])
def test_what_comes_after_the_start_of_the_command_is_not_waited_for(run, flood, options, lines):
    result = run("logs", *options, "resnet")
    assert (result.exit_code, result.stdout) == (0, "".join(lines))


def test_all_of_a_flood_as_json_is_all_up_to_the_start(run, flood):
    document = json.loads(run("logs", "--json", "resnet").stdout)
    assert (document["text"], document["offset"]) == (LOG, len(LOG))


def test_pieces_are_written_as_they_come(run, log, monkeypatch):
    written: list[str] = []
    at_requests: list[int] = []
    piece = log.answers["GET", "/v1/jobs/resnet/logs"]

    def noted(query, body):
        at_requests.append(len("".join(written)))
        return piece(query, body)

    log.answers["GET", "/v1/jobs/resnet/logs"] = noted
    monkeypatch.setattr(module, "write_log", lambda text, raw: written.append(text))
    assert run("logs", "resnet").exit_code == 0
    assert "".join(written) == LOG
    assert at_requests[:4] == [0, 0, 65536, 2 * 65536]


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
    assert written == ["a^[[2J\tb\rc\n\\u009b31m^G\n", log.written]


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
    answers = iter([working, working, (503, log.error("Unreachable", "restarting")), working])
    log.answers["GET", "/v1/jobs/resnet/logs"] = lambda query, body: (
        answer(query, body) if callable(answer := next(answers, working)) else answer
    )
    assert run("logs", "-f", "resnet").stdout == "first\nsecond\n"


def test_follow_and_json_exclude_each_other(run, log):
    result = run("logs", "-f", "--json", "resnet")
    assert result.exit_code == 2
    assert "--follow" in result.stderr
