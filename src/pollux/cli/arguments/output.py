"""Files and folders that appear under their name only when they are complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from pollux.core import InvalidInput

__all__ = ["staged_file", "staged_folder"]


@contextmanager
def staged_file(option: str, target: Path, private: bool = False) -> Iterator[TextIO]:
    """A text file to write to; when the block ends without an error it replaces `target`, else it is removed.

    Pipes and devices are written to directly. `option` is the option that named the path. `private`: only its
    owner may read it, whatever the mode of an older file.
    """
    with _named_errors(option, target):
        if target.is_dir():
            raise InvalidInput(f"{option}: '{target}' is a folder; give a file in it")
        if target.exists() and not target.is_file():
            with target.open("w", encoding="utf-8") as file:
                yield file
            return
        target = target.resolve()
        temporary = _beside(target)
        try:
            mode = 0o600 if private else 0o666
            with open(temporary, "x", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, mode)) as file:
                yield file
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def staged_folder(option: str, target: Path) -> Iterator[Path]:
    """An empty folder to fill; when the block ends well, what is in it moves to `target`.

    If `target` exists, its other files stay.
    """
    with _named_errors(option, target):
        if target.exists() and not target.is_dir():
            raise InvalidInput(f"{option}: '{target}' is a file; give a folder")
        target = target.resolve()
        temporary = _beside(target)
        temporary.mkdir()
        try:
            yield temporary
            target.mkdir(parents=True, exist_ok=True)
            for file in sorted(temporary.iterdir()):
                file.replace(target / file.name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _beside(target: Path) -> Path:
    """A free hidden name on the same file system: in the target, or in the nearest folder that exists."""
    folder = target if target.is_dir() else next(parent for parent in target.parents if parent.exists())
    return folder / f".{target.name}.{os.getpid()}.tmp"


@contextmanager
def _named_errors(option: str, target: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InvalidInput(
            f"{option}: '{target}' cannot be written ({error.strerror or error}); choose another place"
        ) from None
