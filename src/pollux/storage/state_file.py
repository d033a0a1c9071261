"""Our own small files: read without waiting, replaced whole, whatever a job has put in their place.

A job runs as the user of the service, so a link, a pipe, a folder or an endless file may lie where a record was. That
is logged, and the file counts as missing; writing removes what is in the way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pollux.core.errors import Conflict, PolluxError
from pollux.storage.foreign_file import number_inside, open_inside, read_inside

__all__ = [
    "MAX_STATE_BYTES",
    "create_state",
    "folder_fault",
    "keep_end",
    "move_state",
    "open_log",
    "open_plain",
    "read_json",
    "read_state",
    "remove_state",
    "write_state",
]

MAX_STATE_BYTES = 1 << 20
"""The most that is read of a file of state, and kept of a log such as a shim's."""

_log = logging.getLogger("pollux.backends")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def read_state(path: Path) -> bytes | None:
    """All of a plain file of at most 1 MiB; None where nothing is there, or something else, which is logged."""
    try:
        return read_inside(path.parent, path.name, most_bytes=MAX_STATE_BYTES)
    except FileNotFoundError:
        return None
    except PolluxError as error:
        _say(str(error))
        return None


def read_json(path: Path) -> Any:
    """The JSON value in a file, read as `read_state` does; None also where it holds no JSON."""
    content = read_state(path)
    if content is None:
        return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        _say(f"{path} holds no JSON ({type(error).__name__}: {error})")
        return None


@functools.lru_cache(maxsize=256)
def _say(fault: str) -> None:
    """Log a fault; once, since the same file is read again and again."""
    _log.warning("%.1000s; it counts as missing", fault)


def write_state(path: Path, content: bytes, durable: bool = True, mode: int = 0o600) -> None:
    """Write a file so that a crash leaves the new one or the old one.

    `durable`: also a crash of the machine. `mode`: as for `os.open`. OSError where there is no room or right.
    """
    with _written_beside(path, content, durable, mode) as beside:
        move_state(beside, path)
    if durable:
        _flush(path.parent)


def move_state(source: Path, target: Path) -> None:
    """Give a file another name, whatever has it now."""
    try:
        os.replace(source, target)
    except IsADirectoryError:
        remove_state(target)
        os.replace(source, target)


def create_state(path: Path, content: bytes) -> None:
    """Write a file that nobody has written yet, whole or not at all; FileExistsError where something is there."""
    with _written_beside(path, content) as beside:
        try:
            os.link(beside, path)
        except FileExistsError:
            raise
        except OSError:
            # Not every file system has links.
            os.close(os.open(path, _NEW, 0o600))
            os.replace(beside, path)
    _flush(path.parent)


@contextlib.contextmanager
def _written_beside(path: Path, content: bytes, durable: bool = True, mode: int = 0o600) -> Iterator[Path]:
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    remove_state(beside)
    try:
        with os.fdopen(os.open(beside, _NEW, mode), "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        yield beside
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def _flush(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def folder_fault(folder: Path) -> str:
    """Who else may read or replace files in this folder; empty where that is nobody. OSError where it is not there."""
    found = folder.stat()
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, not to user {os.geteuid()}"
    mode = stat.S_IMODE(found.st_mode)
    return f"it has mode {mode:o}, so others can use it" if mode & 0o077 else ""


def remove_state(path: Path) -> None:
    """Remove what has this name; a folder, which may hold files of somebody, is renamed instead."""
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.aside")
        path.rename(aside)
        _log.warning("%s was a folder, where a file of ours belongs; it is now %s", path, aside)


def open_plain(path: Path, flags: int = os.O_RDWR) -> int:
    """The number of a plain file, made if it is missing, as a lock is; what else is there is removed. Or OSError."""
    for attempt in range(2):
        try:
            return number_inside(path.parent, path.name, flags=flags | os.O_CREAT)
        except Conflict as error:
            if attempt:
                raise OSError(errno.EEXIST, str(error)) from error
            remove_state(path)
        except PolluxError as error:
            raise OSError(errno.EIO, str(error)) from error
    raise AssertionError


def open_log(path: Path, most_bytes: int = MAX_STATE_BYTES) -> int:
    """The number of a log, for appending; one that is too long begins anew, see `keep_end`."""
    number = open_plain(path, os.O_WRONLY | os.O_APPEND)
    keep_end(path, number, most_bytes)
    return number


def keep_end(path: Path, number: int, most_bytes: int = MAX_STATE_BYTES) -> bool:
    """If a log has grown too long, keep its end as `.1` and empty it; returns whether that was done. Never raises.

    `number`: the log as its writers have it. They append, so that they go on at its new end.
    """
    with contextlib.suppress(OSError, PolluxError):
        size, appends = os.fstat(number).st_size, fcntl.fcntl(number, fcntl.F_GETFL) & os.O_APPEND
        if size <= most_bytes or not appends:
            return False
        with open_inside(path.parent, path.name) as source:
            if not os.path.samestat(os.fstat(source.fileno()), os.fstat(number)):
                return False
            source.seek(size - most_bytes)
            write_state(path.with_name(f"{path.name}.1"), source.read(most_bytes), durable=False)
        os.ftruncate(number, 0)
        return True
    return False
