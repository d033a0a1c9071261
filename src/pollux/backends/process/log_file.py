"""One replica's log on disk: bounded in size, appended over generations, read by an offset that only grows."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from pollux.backends.protocol import LogChunk
from pollux.core.errors import PolluxError, TooLarge
from pollux.storage.foreign_file import open_inside, read_inside
from pollux.storage.state_file import move_state, open_plain, write_state

__all__ = ["DEFAULT_CAP_BYTES", "LogWriter", "read_log", "whole_characters"]

DEFAULT_CAP_BYTES = 32 << 20
_HEAD_BYTES = 1 << 20
_TAIL_BYTES = 8 << 10
_LEAST_CAP_BYTES = 4 << 10
_PARTS_BYTES = 4 << 10
_LARGEST_OFFSET = 2**53
_MOST_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class _Parts:
    """Offsets in all output so far: the head file has [0, head), `.1` begins at `before`, the log itself at `now`."""

    head: int = 0
    before: int = 0
    now: int = 0


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _read_parts(path: Path) -> _Parts:
    """The offsets in the file beside the log; a job may have written it, so none may lead out of the log."""
    try:
        value = json.loads(_read_beside(path, ".parts"))
        parts = _Parts(int(value["head"]), int(value["before"]), int(value["now"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, TooLarge):
        return _Parts()
    return parts if parts.head >= 0 and 0 <= parts.before <= parts.now <= _LARGEST_OFFSET else _Parts()


def _read_beside(path: Path, ending: str) -> bytes:
    folder = path.parent
    return read_inside(folder.parent, folder.name, path.name + ending, most_bytes=_PARTS_BYTES)


class LogWriter:
    """Appends to `path`; keeps at most about `cap_bytes`: the first MiB, and the newest output.

    A full disk raises no exception: `lost_bytes` counts the output that could not be written, and a line in the log
    says so once there is room. `tail` is the end of the output, written or not.
    """

    def __init__(self, path: Path, cap_bytes: int = DEFAULT_CAP_BYTES) -> None:
        cap = max(cap_bytes, _LEAST_CAP_BYTES)
        self.path = path
        self.lost_bytes = 0
        self.tail = b""
        self._head_bytes = min(_HEAD_BYTES, cap // 4)
        self._file_bytes = (cap - self._head_bytes) // 2
        self._parts = _Parts()
        with contextlib.suppress(PolluxError):
            self._parts = _read_parts(path)
        self._fd = -1
        self._size = 0
        self._open()

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = open_plain(self.path, os.O_WRONLY | os.O_APPEND)
            self._size = os.fstat(self._fd).st_size
        except OSError:
            self._shut()

    def _shut(self) -> None:
        """Close the file; the next `write` tries to open it again."""
        if self._fd >= 0:
            # Some file systems report only now that they are full.
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd, self._size = -1, 0

    def write(self, piece: bytes) -> None:
        """Append, making room where needed."""
        self.tail = (self.tail + piece)[-_TAIL_BYTES:]
        if self._fd < 0:
            self._open()
        if self.lost_bytes:
            note = f"\n[pollux: {self.lost_bytes} bytes of log were lost here: the disk took no more]\n".encode()
            if self._append(note) == len(note):
                self.lost_bytes = 0
        while piece:
            if self._size >= self._file_bytes:
                self._rotate()
            part = piece[: max(1, self._file_bytes - self._size)]
            self.lost_bytes += len(part) - self._append(part)
            piece = piece[len(part) :]

    def _append(self, piece: bytes) -> int:
        try:
            written = os.write(self._fd, piece) if self._fd >= 0 else 0
        except OSError:
            written = 0
        self._size += written
        return written

    def _rotate(self) -> None:
        parts = self._parts
        moved = False
        try:
            head = parts.head
            if head == 0:
                with open_inside(self.path.parent, self.path.name) as whole:
                    first = whole.read(self._head_bytes)
                write_state(_beside(self.path, ".head"), first, durable=False)
                head = len(first)
            self._parts = _Parts(head, parts.now, parts.now + self._size)
            # Write what needs room first: once the file has its new name, nothing may fail any more.
            new = _beside(self.path, ".parts.new")
            write_state(new, json.dumps(asdict(self._parts)).encode(), durable=False)
            move_state(self.path, _beside(self.path, ".1"))
            moved = True
            move_state(new, _beside(self.path, ".parts"))
        except (OSError, PolluxError):
            if not moved:
                # There is no room even for this: empty the file, which needs none.
                try:
                    os.ftruncate(self._fd, 0)
                except OSError:
                    self._parts = parts
                    self._shut()
                    return
                self._parts = _Parts(parts.head, parts.before, parts.now + self._size)
                self._size = 0
                return
        self._shut()
        self._open()
        gap = self._parts.before - self._parts.head
        if gap > 0:
            self._append(f"[pollux: {gap} bytes of log before {self.path.name}.1 were dropped]\n".encode())

    def close(self) -> None:
        """Close the file."""
        self._shut()


def _segments(path: Path) -> list[tuple[int, int, Path]]:
    """Start, end and file of every part on disk, in order, without overlap."""
    parts = _read_parts(path)
    found: list[tuple[int, int, Path]] = []
    reached = 0
    files = ((0, _beside(path, ".head"), parts.head), (parts.before, _beside(path, ".1"), parts.now - parts.before))
    for start, file, length in (*files, (parts.now, path, -1)):
        try:
            status = file.lstat()
        except OSError:
            continue
        if not stat.S_ISREG(status.st_mode):
            # Raises, with the kind of the file.
            open_inside(path.parent.parent, path.parent.name, file.name).close()
        size = status.st_size
        end = start + (size if length < 0 else min(size, length))
        # The head repeats the beginning of the first file, as long as that file exists.
        if found and found[-1][1] > start:
            found[-1] = (found[-1][0], start, found[-1][2])
        if end > max(start, reached):
            found.append((start, end, file))
            reached = end
    return [segment for segment in found if segment[1] > segment[0]]


def _piece(path: Path, offset: int, limit: int) -> tuple[bytes, int, int, int]:
    """Bytes from `offset` on, how many are missing before them, where they begin, and where the log ends."""
    segments = _segments(path)
    end = segments[-1][1] if segments else 0
    if offset < 0:
        offset = max(0, end + offset)
    for start, stop, file in segments:
        if offset >= stop:
            continue
        begin = max(start, offset)
        with open_inside(path.parent.parent, path.parent.name, file.name) as source:
            source.seek(begin - start)
            return source.read(min(limit, stop - begin)), begin - offset, begin, end
    return b"", 0, min(offset, end), end


def whole_characters(piece: bytes) -> bytes:
    """The piece without an incomplete UTF-8 character at its end."""
    for back in range(1, min(4, len(piece)) + 1):
        lead = piece[-back]
        if lead & 0xC0 == 0x80:
            continue
        length = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1
        return piece[:-back] if length > back else piece
    return piece


def read_log(path: Path, offset: int = 0, limit: int = 65536) -> LogChunk:
    """A piece of the log; where bytes were dropped, a line says how many, and the offset skips them.

    Conflict where a file of another kind is in its place; that is not read.
    """
    for _ in range(_MOST_ATTEMPTS):
        before = _read_parts(path)
        try:
            piece, missing, begin, end = _piece(path, offset, max(4, limit))
        except OSError:
            piece, missing, begin, end = b"", 0, max(offset, 0), max(offset, 0) + 1
        # If the log was rotated meanwhile, the piece may be from another offset.
        if _read_parts(path) == before:
            break
    if begin + len(piece) < end:
        piece = whole_characters(piece) or piece
    note = f"[pollux: {missing} bytes of log were dropped here]\n" if missing else ""
    return LogChunk(note + piece.decode(errors="replace"), begin + len(piece), begin + len(piece) >= end)
