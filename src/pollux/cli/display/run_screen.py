"""What `pollux run` shows: the job's output, and below it one line on how the job stands."""

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

__all__ = ["Screen"]


class Screen:
    """On a terminal a live line stays below the output; elsewhere output is passed on, with a line per change."""

    def __init__(self, to_stderr: bool = False) -> None:
        self._output = sys.stderr if to_stderr else sys.stdout
        self._live: Live | None = None
        self._partial = ""
        self._told = ""
        self.may_be_gone = False
        """Set where the terminal may have been closed: then what cannot be written is dropped."""

    def __enter__(self) -> Screen:
        """Begin."""
        if self._output.isatty():
            from rich.live import Live

            from pollux.cli.printing.console import SafeConsole

            self._live = Live(console=SafeConsole(self._output), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave nothing but the output behind."""
        if self._live is not None:
            with self._forgiving():
                self._print_lines(self._partial)
                self._live.stop()

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            if not self.may_be_gone:
                raise

    def log(self, text: str) -> None:
        """Show output of the job."""
        with self._forgiving():
            if self._live is None:
                self._output.write(text)
                self._output.flush()
                return
            lines, newline, self._partial = (self._partial + text).rpartition("\n")
            self._print_lines(lines + newline)

    def status(self, job: Mapping[str, Any], now: float) -> None:
        """Show how the job stands."""
        if self._live is not None:
            from rich.text import Text

            line = Text(f"▸ {job['id']}: {job_line(job, now)}", style="cyan", no_wrap=True, overflow="ellipsis")
            with self._forgiving():
                self._live.update(line, refresh=True)
            return
        held = f" on {job['gpus']} GPU{'s' * (job['gpus'] != 1)}" if job["gpus"] else ""
        told = f"{job['id']}: {job['state']}{held}"
        if told != self._told and job["ended_at"] is None:
            self._told = told
            self.note(told)

    def note(self, text: str) -> None:
        """Say something about the job on standard error."""
        with self._forgiving():
            if self._live is not None:
                self._live.console.print(text, style="cyan", markup=False)
            else:
                say(text, err=True)

    def _print_lines(self, text: str) -> None:
        from rich.text import Text

        if self._live is not None and text:
            # A progress bar rewrites its line: what is left of it at the end of the line is what counts.
            shown = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.removesuffix("\n").split("\n"))
            self._live.console.print(Text.from_ansi(shown), soft_wrap=True)
