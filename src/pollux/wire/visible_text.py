"""Writes control characters out, so that text of others does not control the terminal that shows it.

The name of a job, its output, a folder or an error that quotes them may hold codes that move the cursor, set the
window's title, type into the shell, or reverse the direction of writing.
"""

from __future__ import annotations

import re

__all__ = ["one_sign_each", "visible", "visible_log"]

# Control characters; marks that reverse the direction of writing; separators that some terminals take for line ends.
_UNSAFE = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
# Bytes of a file's name that are no text are printed unchanged; some terminals take these bytes for controls.
_UNSAFE += "\udc80-\udc9f"
_BYTES = re.compile("[\udc80-\udcff]+")
_IN_LOGS = re.compile(f"[{_UNSAFE}]")
_ANYWHERE = re.compile(f"[\r{_UNSAFE}]")


def visible(text: str) -> str:
    """Text whose unsafe characters, but for tab and line feed, are written out, such as `^[[2J` and `\\u202e`.

    A JSON document stays the same document: in it such a character is written as JSON's own escape.
    """
    return _ANYWHERE.sub(_written_out, _as_text(text))


def visible_log(text: str) -> str:
    """Like `visible`, for a job's output, in which a progress bar may return to the beginning of its line."""
    return _IN_LOGS.sub(_written_out, _as_text(text))


def one_sign_each(text: str) -> str:
    """Like `visible`, for columns: each unsafe character becomes one replacement character."""
    return _ANYWHERE.sub("\ufffd", _as_text(text))


def _as_text(text: str) -> str:
    """The text with valid bytes decoded: a terminal would show them as a character that must be filtered."""

    def read(found: re.Match[str]) -> str:
        return found.group().encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")

    return _BYTES.sub(read, text)


def _written_out(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"^{chr(code ^ 0x40)}" if code < 0x20 else f"\\u{code:04x}"
