"""A working folder as one archive, named by its digest: packed where the user is, unpacked where the service is.

How it is sent is not known here. Archives are not trusted: nothing in them may lie outside the target folder.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from pollux.core.errors import InvalidInput, TooLarge

__all__ = ["IGNORE_FILE", "MAX_FILES", "MAX_PACKED_BYTES", "MAX_UNPACKED_BYTES", "digest_of", "pack", "unpack"]

IGNORE_FILE = ".polluxignore"
"""Names or patterns to leave out, one a line, as in `data` or `*.pt`; `#` begins a comment."""

MAX_PACKED_BYTES = 64 * 2**20
"""Of an archive."""

MAX_UNPACKED_BYTES = 256 * 2**20
"""Of all its files together."""

MAX_FILES = 20_000
"""In one archive."""

_LEFT_OUT = (
    ".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache",
    "*.pyc",
)  # fmt: skip
_REMEDY = f"leave data out with {IGNORE_FILE}, and keep it where all nodes can read it"


def digest_of(archive: bytes) -> str:
    """The archive's name: SHA-256 in hexadecimal."""
    return hashlib.sha256(archive).hexdigest()


def pack(folder: Path) -> bytes:
    """The folder as an archive; the same files give the same bytes, whenever and by whomever they were written.

    Version control, environments, caches and what `.polluxignore` names stay out; links to files become files, links to
    folders stay out. TooLarge above the limits, InvalidInput where something cannot be read.
    """
    ignored = (*_LEFT_OUT, *_ignored(folder))
    content, total, count = io.BytesIO(), 0, 0
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, name in _files(folder, ignored):
            data, mode = _read(path)
            total, count = total + len(data), count + 1
            if total > MAX_UNPACKED_BYTES or count > MAX_FILES:
                raise TooLarge(
                    f"{folder} has more than {MAX_UNPACKED_BYTES >> 20} MiB or {MAX_FILES} files to ship: {_REMEDY}"
                )
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755 if mode & stat.S_IXUSR else 0o644
            tar.addfile(entry, io.BytesIO(data))
    archive = gzip.compress(content.getvalue(), compresslevel=6, mtime=0)
    if len(archive) > MAX_PACKED_BYTES:
        raise TooLarge(f"{folder} packed has more than {MAX_PACKED_BYTES >> 20} MiB: {_REMEDY}")
    return archive


def unpack(archive: bytes, folder: Path) -> None:
    """Put the files of an archive into an empty folder; InvalidInput for anything but plain files inside it."""
    total, count = 0, 0
    try:
        with tarfile.open(fileobj=_Bounded(archive), mode="r|") as tar:
            for entry in tar:
                total, count = total + entry.size, count + 1
                if total > MAX_UNPACKED_BYTES or count > MAX_FILES:
                    raise TooLarge(
                        f"the package has more than {MAX_UNPACKED_BYTES >> 20} MiB or {MAX_FILES} files: {_REMEDY}"
                    )
                target = folder / _inside(entry)
                source = tar.extractfile(entry)
                assert source is not None
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as file:
                    file.write(source.read())
                target.chmod(0o755 if entry.mode & stat.S_IXUSR else 0o644)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, OSError, ValueError, OverflowError) as error:
        raise InvalidInput(f"the package cannot be unpacked ({error}): send it again as 'pollux submit' does") from None


class _Bounded(io.RawIOBase):
    """The archive's content, of which never more is unpacked than is allowed, whatever size it claims."""

    def __init__(self, archive: bytes) -> None:
        self._file = gzip.GzipFile(fileobj=io.BytesIO(archive), mode="rb")
        # Each file takes a header and is filled up; long names take some more.
        self._left = MAX_UNPACKED_BYTES + 4096 * MAX_FILES

    def readable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int = -1) -> bytes:
        """At most this many bytes; TooLarge once the limit for all is passed."""
        data = self._file.read(size if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise TooLarge(f"the package has more than {MAX_UNPACKED_BYTES >> 20} MiB: {_REMEDY}")
        return data


def _inside(entry: tarfile.TarInfo) -> PurePosixPath:
    path = PurePosixPath(entry.name)
    if not entry.isreg() or path.is_absolute() or not path.parts or ".." in path.parts or "\0" in entry.name:
        raise InvalidInput(f"the package holds {entry.name[:120]!r}, which is no plain file inside it: not unpacked")
    return path


def _ignored(folder: Path) -> list[str]:
    try:
        lines = (folder / IGNORE_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{folder / IGNORE_FILE} cannot be read ({error}): repair or remove it") from None
    return [line.strip().strip("/") for line in lines if line.strip() and not line.strip().startswith("#")]


def _files(folder: Path, ignored: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """Files to ship with their names in the archive, in order."""

    def is_left_out(name: str, inside: str) -> bool:
        return any(fnmatch.fnmatchcase(name, each) or fnmatch.fnmatchcase(inside, each) for each in ignored)

    for place, folders, names in os.walk(folder):
        below = os.path.relpath(place, folder)
        prefix = "" if below == "." else f"{below}/"
        folders[:] = sorted(name for name in folders if not is_left_out(name, prefix + name))
        for name in sorted(names):
            path = Path(place, name)
            if not is_left_out(name, prefix + name) and path.is_file():
                yield path, prefix + name


def _read(path: Path) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            return file.read(MAX_UNPACKED_BYTES + 1), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be read ({error.strerror}): make it readable, or add it to {IGNORE_FILE}"
        ) from None
