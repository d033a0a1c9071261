"""What `pollux run` shows: output passed on as it is in a pipe, whole lines above a live line on a terminal."""

import io
import sys

import pytest

from pollux.cli.display.run_screen import Screen
from pollux.cli.display.tables import job_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_in_a_pipe_output_is_untouched_and_changes_are_told_once(capsys, fake):
    with Screen() as screen:
        screen.status(fake.job("train", state="queued", gpus=0), 0.0)
        screen.log("half")
        screen.log(" a line\r50%\r100%\n[red]")
        for _ in range(3):
            screen.status(fake.job("train"), 0.0)
        screen.status(fake.job("train", state="succeeded", ended_at=1.0), 0.0)
    assert capsys.readouterr() == ("half a line\r50%\r100%\n[red]", "train: queued\ntrain: running on 4 GPUs\n")


def test_with_json_the_output_goes_to_standard_error(capsys, fake):
    with Screen(to_stderr=True) as screen:
        screen.log("text\n")
    assert capsys.readouterr() == ("", "text\n")


@pytest.mark.parametrize("address", ["https://example.org", "x\a\x1b[2J", "x\x9b2J", "x\x9d0;title\x9c", "x\u202ey"])
@pytest.mark.parametrize("ending", ["\x1b\\", "\a"])
def test_a_link_in_the_output_is_text_only(fake, monkeypatch, address, ending):
    """Its address would be written into a control code as it is."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with Screen() as screen:
        screen.status(fake.job("train"), 0.0)
        screen.log(f"\x1b[31mred\x1b]8;id=1;{address}{ending}a link\x1b]8;;{ending} after\n")
    shown = terminal.getvalue()
    assert "a link" in shown
    assert "after" in shown
    assert "\x1b]" not in shown
    assert "\x1b[2J" not in shown
    assert not set(shown) & set("\a\x9b\x9c\x9d\u202e")


def test_on_a_terminal_the_line_stays_below_the_output(fake, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with Screen() as screen:
        screen.status(fake.job("train"), 0.0)
        screen.log("epoch 1\r 50%\r100%\nhal")
        screen.log("f [bold]\nrest")
        screen.note("stopping")
    shown = terminal.getvalue()
    assert "▸ train: running on 4 of up to 8 GPUs" in shown
    for line in ("100%\n", "half [bold]\n", "rest\n", "stopping"):
        assert line in shown
    assert "50%" not in shown
    assert shown.index("half") < shown.index("stopping") < shown.index("rest")


def test_the_line(fake):
    now = fake.job("x")["submitted_at"] + 600
    assert job_line(fake.job("x"), now) == (
        "running on 4 of up to 8 GPUs, batch 1,024, goodput 1,620/s, efficiency 81%, 42% done, ends in 11min–22min"
    )
    waiting = fake.job("x", state="queued", gpus=0, batch_size=None, goodput=None, progress=None, eta=None)
    assert job_line(waiting, now) == "queued"


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text):
        raise OSError(5, "Input/output error")


def test_a_terminal_that_is_gone_matters_only_before_the_job_is_told_to_stop(fake, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(sys, "stderr", Gone())
    with Screen() as screen:
        with pytest.raises(OSError, match="Input/output"):
            screen.log("text\n")
        screen.may_be_gone = True
        screen.log("text\n")
        screen.note("stopping")
        screen.status(fake.job("train"), 0.0)
