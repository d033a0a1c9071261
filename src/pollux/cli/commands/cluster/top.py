"""`pollux top`: the cluster live on a full screen, which `top_view` draws."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from pollux.cli.arguments.options import Json, print_json
from pollux.core.errors import PolluxError, Unreachable

if TYPE_CHECKING:
    from pollux.cli.client.client import Client
    from pollux.cli.display.top_view import EventLine, Frame
    from pollux.cli.printing.console import SafeConsole

__all__ = ["Listener", "refreshed", "top"]

_REFRESH_SECONDS = 1.0
_LEAST_SECONDS = 0.2
_KEPT = 50


def top(
    once: Annotated[bool, typer.Option("--once", help="Print the screen once and end.")] = False,
    as_json: Json = False,
) -> None:
    """Watch nodes, jobs and decisions live; q or Ctrl-C ends it.

    Example: pollux top
    """
    from pollux.cli.client.client import connect
    from pollux.cli.display.top_view import draw, fetch

    client = connect()
    if as_json:
        print_json(fetch(client, 1000).to_json())
        return
    from pollux.cli.display.render import standard_output

    console = standard_output()
    frame = fetch(client, 200)
    if once or not (console.is_terminal and sys.stdin.isatty()):
        console.print(draw(frame, (), console.width))
        return
    from pollux.cli.printing.console import SafeConsole

    _live(client, SafeConsole(), frame)  # a console that follows the size of its window


class Listener:
    """Receives the service's events in a thread; keeps the last ones as lines; new ones make `wakeup` readable."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lines: deque[EventLine] = deque(maxlen=_KEPT)
        self._ended = threading.Event()
        self.wakeup, self._alarm = os.pipe()
        os.set_blocking(self._alarm, False)
        os.set_blocking(self.wakeup, False)
        self._thread = threading.Thread(target=self._listen, daemon=True, name="pollux-top-events")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; the thread ends with the next event, or with the program."""
        self._ended.set()

    def last_lines(self) -> tuple[EventLine, ...]:
        """The last lines, oldest first."""
        return tuple(self._lines)

    def clear_wakeup(self) -> None:
        """Make `wakeup` unreadable until the next event."""
        with suppress(BlockingIOError):
            os.read(self.wakeup, 4096)

    def _listen(self) -> None:
        last: str | None = None
        while not self._ended.is_set():
            try:
                for event in self._client.events(last):
                    last = event.id or last
                    self._keep_lines(event.data)
                    if self._ended.is_set():
                        return
            except PolluxError:
                pass  # the screen says that the service does not answer
            self._ended.wait(_REFRESH_SECONDS)

    def _keep_lines(self, data: object) -> None:
        from pollux.cli.display.top_view import EventLine

        if not isinstance(data, dict):
            return
        for line in data.get("lines", ()):
            if line.get("job_id") and line.get("kind") not in ("reported", "running"):
                self._lines.append(EventLine(float(data["at"]), str(line["job_id"]), str(line["text"])))
        with suppress(BlockingIOError):  # the pipe is full, so the reader wakes up anyway
            os.write(self._alarm, b"!")


def refreshed(client: Client, before: Frame, rows: int) -> Frame:
    """A new frame, or the last one with a note that the service does not answer."""
    from pollux.cli.display.top_view import fetch

    try:
        return fetch(client, rows)
    except Unreachable as error:
        if before.lost:
            return before
        return replace(before, lost=f"{time.strftime('%H:%M:%S')}: {error}; trying again, the last state is below")


def _live(client: Client, console: SafeConsole, frame: Frame) -> None:
    from rich.live import Live

    from pollux.cli.display.top_view import draw

    listener = Listener(client)
    listener.start()
    try:
        with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(draw(frame, listener.last_lines(), console.width, console.height), refresh=True)
                if _quit_pressed(listener):
                    return
                frame = refreshed(client, frame, console.height)
    except KeyboardInterrupt:
        return
    finally:
        listener.stop()


def _quit_pressed(listener: Listener) -> bool:
    """Wait for a key, for a new event, or for a second; whether the key was q."""
    time.sleep(_LEAST_SECONDS)
    ready, _, _ = select.select([sys.stdin, listener.wakeup], [], [], _REFRESH_SECONDS - _LEAST_SECONDS)
    if listener.wakeup in ready:
        listener.clear_wakeup()
    return sys.stdin in ready and os.read(sys.stdin.fileno(), 16)[:1] in (b"q", b"Q", b"")


@contextmanager
def _single_keys() -> Iterator[None]:
    """Read keys as they are pressed, without showing them."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
