"""The screen of `pollux run`: the job's output, and below it a line with the job's status."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pollux.cli.display.tables import job_line
from pollux.cli.printing.visible import say

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

__all__ = ["Screen"]


class Screen:
    """On a terminal, a live status line stays below the output; elsewhere, a line for each change of state."""

    def __init__(self, to_stderr: bool = False) -> None:
        self._output = sys.stderr if to_stderr else sys.stdout
        self._live: Live | None = None
        self._partial = ""
        self._last_note = ""
        self.may_be_gone = False
        """Whether the terminal may have been closed; then what cannot be written is dropped."""

    def __enter__(self) -> Screen:
        """Start the live line on a terminal."""
        if self._output.isatty():
            from rich.live import Live

            from pollux.cli.printing.console import SafeConsole

            self._live = Live(console=SafeConsole(self._output), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the live line; the output stays."""
        if self._live is not None:
            with self._unless_closed():
                self._print_lines(self._partial)
                self._live.stop()

    @contextmanager
    def _unless_closed(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            if not self.may_be_gone:
                raise

    def log(self, text: str) -> None:
        """Print output of the job."""
        with self._unless_closed():
            if self._live is None:
                self._output.write(text)
                self._output.flush()
                return
            lines, newline, self._partial = (self._partial + text).rpartition("\n")
            self._print_lines(lines + newline)

    def status(self, job: Mapping[str, Any], now: float) -> None:
        """Show the job's status."""
        if self._live is not None:
            from rich.text import Text

            line = Text(f"▸ {job['id']}: {job_line(job, now)}", style="cyan", no_wrap=True, overflow="ellipsis")
            with self._unless_closed():
                self._live.update(line, refresh=True)
            return
        held = f" on {job['gpus']} GPU{'s' * (job['gpus'] != 1)}" if job["gpus"] else ""
        note = f"{job['id']}: {job['state']}{held}"
        if note != self._last_note and job["ended_at"] is None:
            self._last_note = note
            self.note(note)

    def note(self, text: str) -> None:
        """Print a message about the job on standard error."""
        with self._unless_closed():
            if self._live is not None:
                self._live.console.print(text, style="cyan", markup=False)
            else:
                say(text, err=True)

    def _print_lines(self, text: str) -> None:
        from rich.text import Text

        if self._live is not None and text:
            # A progress bar rewrites its line; only its last text is kept.
            shown = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.removesuffix("\n").split("\n"))
            self._live.console.print(_without_links(Text.from_ansi(shown)), soft_wrap=True)


def _without_links(text: Text) -> Text:
    """The text in its colours. A link is written as a control code, whose address may end it and begin another."""
    from rich.text import Span

    for number, span in enumerate(text.spans):
        style = span.style
        if not isinstance(style, str) and style.link is not None:
            text.spans[number] = Span(span.start, span.end, style.update_link(None))
    return text
