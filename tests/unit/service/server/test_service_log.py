import logging
import os

import pytest

from pollux.service.server.service_log import LogFile, RepeatFilter, bounded_log


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def heard():
    logger, handler = logging.getLogger("pollux.service"), Heard()
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


def test_what_repeats_is_counted(heard):
    now = [0.0]
    repeat = RepeatFilter(lambda: now[0])
    logger = logging.getLogger("pollux.service")
    logger.addFilter(repeat)
    try:
        for number in range(1000):
            logger.warning("a peer %s: too slow", number)
        assert len(heard) == 20
        logger.warning("something else")
        assert heard[-1] == "something else"
        now[0] = 10.0
        logger.warning("a peer %s: too slow", "last")
        logger.warning("a peer %s: too slow", "never")
        assert heard[-1] == "a peer last: too slow (980 more like this were not written)"
        now[0] = 3600.0
        for _ in range(50):
            logger.warning("a peer %s: too slow", "later")
        assert len(heard) == 22 + 20
    finally:
        logger.removeFilter(repeat)


def test_many_different_messages_take_bounded_memory():
    repeat = RepeatFilter(lambda: 0.0)
    for number in range(10_000):
        repeat.filter(logging.LogRecord("x", 30, "", 0, f"message {number}", (), None))
    assert len(repeat._known) <= 512


@pytest.mark.parametrize(
    "name", ["pollux.service", "pollux.backends", "pollux.store.sqlite", "pollux.later", "asyncio"]
)
def test_the_repeats_of_every_logger_are_counted_as_long_as_the_service_runs(name):
    handler = Heard()
    logging.getLogger().addHandler(handler)
    try:
        with bounded_log():
            for _ in range(100):
                logging.getLogger(name).warning("again")
        assert handler.lines.count("again") == 20
        assert not any(isinstance(each, RepeatFilter) for each in handler.filters)
    finally:
        logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("name", ["pollux.service", "pollux.backends", "pollux.later"])
def test_foreign_text_in_the_log_does_not_control_a_terminal(name, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with bounded_log():
        logging.getLogger(name).warning("sbatch said: %s", "\x1b[2J\x1b]0;x\a\x9b1m\u202eabc\ttab\nnext \udc9b")
        try:
            raise ValueError("\x1b[31m")
        except ValueError:
            logging.getLogger(name).exception("folder \x07")
    told = capsys.readouterr().err
    assert "sbatch said: ^[[2J^[]0;x^G" in told
    assert "\ttab\nnext" in told
    assert [each for each in told if not each.isprintable() and each not in "\t\n"] == []


@pytest.fixture
def appended(tmp_path):
    path = tmp_path / "service.log"
    number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    yield path, number
    os.close(number)


def test_a_long_log_begins_anew_and_its_end_is_kept(appended):
    path, number = appended
    log = LogFile(path, 100, number)
    os.write(number, b"1" * 100)
    assert not log.shorten()
    os.write(number, b"23")
    assert log.shorten()
    assert path.with_name("service.log.1").read_bytes() == b"1" * 98 + b"23"
    os.write(number, b"new\n")
    assert path.read_bytes() == b"new\n", "what is appended begins at the new end"
    assert path.with_name("service.log.1").stat().st_mode & 0o777 == 0o600
    for round_number in range(50):
        os.write(number, b"%04d" % round_number * 30)
        log.shorten()
    assert sum(each.stat().st_size for each in path.parent.iterdir()) <= 300


def test_nothing_but_the_log_of_this_home_is_touched(tmp_path, appended):
    path, number = appended
    os.write(number, b"1" * 200)
    elsewhere = tmp_path / "mine.txt"
    elsewhere.write_bytes(b"2" * 200)
    with elsewhere.open("ab") as mine:
        assert not LogFile(path, 100, mine.fileno()).shorten(), "standard error goes to a file of the user"
    assert not LogFile(tmp_path / "nothing.log", 100, number).shorten()
    with path.open("r+b") as writer:
        assert not LogFile(path, 100, writer.fileno()).shorten(), "who does not append would leave a hole"
    link = tmp_path / "link.log"
    link.symlink_to(path)
    assert not LogFile(link, 100, number).shorten()
    assert path.read_bytes() == b"1" * 200
    assert elsewhere.read_bytes() == b"2" * 200


def test_a_disk_that_is_full_ends_nothing(appended, monkeypatch):
    path, number = appended
    os.write(number, b"1" * 200)

    def full(*given):
        raise OSError(28, "No space left on device")

    log = LogFile(path, 100, number)
    monkeypatch.setattr(os, "replace", full)
    assert not log.shorten()
    assert path.stat().st_size == 200
