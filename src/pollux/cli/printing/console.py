"""Consoles for tables and live screens, which filter control characters from the text that they print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pollux.wire.visible_text import one_sign_each

__all__ = ["SafeConsole"]


class SafeConsole(Console):
    """A console that prints its own control codes, and no others."""

    def __init__(self, file: IO[str] | None = None, **options: Any) -> None:
        super().__init__(file=file, highlight=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of text without control characters, and the console's own control segments."""
        for segment in super().render(renderable, options):
            text = segment.text
            yield segment if segment.control or text.isprintable() else _printable(segment)


def _printable(segment: Segment) -> Segment:
    return Segment(one_sign_each(segment.text), segment.style)
