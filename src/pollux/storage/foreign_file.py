"""Opens files that others wrote; only a plain file inside a given folder is ever read.

A job, or another user of its folders, may have put a link, a pipe, a device or an endless file in their place. A file
system may hang; a caller that cannot wait reads in a thread that it can abandon.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

from pollux.core.errors import Conflict, TooLarge, Unreachable

__all__ = ["append_inside", "number_inside", "open_inside", "read_inside"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# A pipe without a writer opens at once, and a terminal does not become our controlling terminal.
_CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISSOCK, "a socket"),
    (lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode), "a device"),
)
_REMEDY = "it is left alone; remove it, or put a plain file there"


def open_inside(root: Path, *parts: str) -> io.BufferedReader:
    """The plain file at `parts` below `root`, for reading.

    No link below `root` is followed. FileNotFoundError where nothing is there, Conflict for anything but a plain file
    and where permission is missing, Unreachable where the file system fails.
    """
    return os.fdopen(number_inside(root, *parts, flags=os.O_RDONLY), "rb")


def append_inside(root: Path, *parts: str) -> io.BufferedWriter:
    """The plain file at `parts` below `root`, for writing at its end; made if missing. Errors as in `open_inside`."""
    return os.fdopen(number_inside(root, *parts, flags=os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def number_inside(root: Path, *parts: str, flags: int) -> int:
    """The number of the plain file at `parts` below `root`, opened with these flags. Errors as in `open_inside`."""
    place = root.joinpath(*parts)
    folder = -1
    try:
        folder = os.open(root, _FOLDER)
        for part in parts[:-1]:
            above, folder = folder, os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(above)
        number = os.open(parts[-1], _CAREFULLY | flags, 0o600, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _refusal(place, error) from None
    finally:
        if folder >= 0:
            os.close(folder)
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        what = next((name for is_one, name in _KINDS if is_one(mode)), "no file")
        raise Conflict(f"{place} is {what}, not a plain file: {_REMEDY}")
    os.set_blocking(number, True)
    return number


def read_inside(root: Path, *parts: str, most_bytes: int) -> bytes:
    """All of a plain file below `root`, as `open_inside` opens it; TooLarge where it has more than `most_bytes`."""
    with open_inside(root, *parts) as file:
        try:
            found = file.read(most_bytes + 1)
        except OSError as error:
            raise _refusal(root.joinpath(*parts), error) from None
    if len(found) > most_bytes:
        raise TooLarge(f"{root.joinpath(*parts)} has more than {most_bytes} bytes: it is not read; open it itself")
    return found


def _refusal(place: Path, error: OSError) -> Conflict | Unreachable:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return Conflict(f"{place} is, or lies behind, a link or something else that is no folder: {_REMEDY}")
    if error.errno == errno.ENXIO:
        return Conflict(f"{place} is a socket or a pipe, not a plain file: {_REMEDY}")
    if isinstance(error, IsADirectoryError):
        return Conflict(f"{place} is a folder, not a plain file: {_REMEDY}")
    if isinstance(error, PermissionError):
        return Conflict(f"{place} may not be opened: {error.strerror}; check its owner and mode")
    return Unreachable(f"{place} cannot be read: {error.strerror or error}; check its file system")
