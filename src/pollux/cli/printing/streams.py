"""Standard streams that exist and accept every text, whatever the encoding of the terminal, pipe or file."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["replace_unencodable", "whole_output"]

_ERRORS = "pollux-plain"
# One character for one, so that columns stay aligned.
_PLAIN = str.maketrans("–—−×→←·•…✓✗█░─│━╸╺≤≥“”‘’", "---x><.*~+x#.-|---<>\"\"''")


def replace_unencodable() -> None:
    """Replace characters that the encoding lacks (LC_ALL=C, Latin-1) by plain ones, or by escapes such as `\\xfc`.

    File names that are no valid text are written as their bytes. Streams that were closed before this process started
    are empty, and what is written to them is lost.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    codecs.register_error(_ERRORS, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


@contextmanager
def whole_output() -> Iterator[None]:
    """End with one line and exit code 1 if standard output cannot be written, as on a full disk."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        raise SystemExit(1) from None
    except OSError as error:
        if not _is_lost():
            raise
        _drop_output()
        said = error.strerror or str(error)
        print(f"error: cannot write to standard output: {said}; the output is not complete", file=sys.stderr)
        raise SystemExit(1) from None


def _is_lost() -> bool:
    """Whether standard output can no longer be written; without a buffer, only a write shows that."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """Discard what the interpreter would write at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    sign, after = error.object[error.start], error.start + 1
    # `os.fsdecode` makes these of bytes that are no text.
    if "\udc80" <= sign <= "\udcff":
        return bytes([ord(sign) & 0xFF]), after
    plain = sign.translate(_PLAIN)
    return plain if plain.isascii() else sign.encode("ascii", "backslashreplace").decode("ascii"), after
