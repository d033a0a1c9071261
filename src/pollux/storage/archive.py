"""A working folder as one archive, named by its digest: packed by the command line, unpacked by the service.

Archives are not trusted: nothing in them may lie outside the target folder.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import hashlib
import io
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NoReturn, Self

from pollux.core.errors import InvalidInput, TooLarge

__all__ = ["IGNORE_FILE", "MAX_FILES", "MAX_PACKED_BYTES", "MAX_UNPACKED_BYTES", "digest_of", "pack", "unpack"]

IGNORE_FILE = ".polluxignore"
"""The file with names or patterns to leave out, one per line, such as `data` or `*.pt`; `#` begins a comment."""

MAX_PACKED_BYTES = 64 * 2**20
"""The largest archive."""

MAX_UNPACKED_BYTES = 256 * 2**20
"""The largest size of all its files together."""

MAX_FILES = 20_000
"""The most files in one archive."""

MAX_PATH_BYTES = 1024
"""The longest path in an archive; a name in it has at most 255 bytes, the limit of file systems."""

MAX_DEPTH = 64
"""The deepest nesting of folders: enough for every source tree, and far below what a walk can handle."""

_MAX_NAME_BYTES = 255
# The most that may describe a file before its content (long name, times, owners); all of it is read into memory.
_MAX_EXTRA_BYTES = 16 * 1024
_MAX_EXTRAS = 4
_EXTRA_TYPES = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_PIECE_BYTES = 64 * 1024
# What reading an archive raises that is none.
_DAMAGE = (
    tarfile.TarError, EOFError, zlib.error, OSError, ValueError, OverflowError, RecursionError, LookupError,
)  # fmt: skip

_LEFT_OUT = (
    ".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache",
    "*.pyc",
)  # fmt: skip
_REMEDY = f"leave data out with {IGNORE_FILE}, and keep it where all nodes can read it"


def digest_of(archive: bytes) -> str:
    """The archive's name: SHA-256 in hexadecimal."""
    return hashlib.sha256(archive).hexdigest()


def pack(folder: Path) -> bytes:
    """The folder as an archive; the same files always give the same bytes, whatever their times and owners.

    Version control, environments, caches, links to folders and what `.polluxignore` names are left out; links to files
    become files. TooLarge above the limits, InvalidInput for a file that cannot be read.
    """
    ignored = (*_LEFT_OUT, *_ignored(folder))
    content, total, count = io.BytesIO(), 0, 0
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, name in _files(folder, ignored):
            _check_path(PurePosixPath(name))
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


def unpack(archive: Path | bytes, folder: Path) -> None:
    """Put the files of an archive into an empty folder; InvalidInput for anything but plain files inside it.

    It takes about a megabyte of memory, whatever the archive holds.
    """
    total, count, folders = 0, 0, 0
    try:
        with (
            io.BytesIO(archive) if isinstance(archive, bytes) else archive.open("rb") as file,
            tarfile.open(fileobj=_Unzipped(file), mode="r|", tarinfo=_entry_class()) as tar,
        ):
            for entry in tar:
                # The archive would remember every file.
                tar.members = []  # type: ignore[attr-defined]
                total, count = total + entry.size, count + 1
                inside = _inside(entry)
                if total > MAX_UNPACKED_BYTES or count > MAX_FILES or folders > MAX_FILES:
                    raise TooLarge(
                        f"the package has more than {MAX_UNPACKED_BYTES >> 20} MiB or {MAX_FILES} files or folders: "
                        f"{_REMEDY}"
                    )
                folders += _make_folders(folder, inside.parent)
                _write(tar, entry, folder / inside)
    except _DAMAGE as error:
        raise InvalidInput(f"the package cannot be unpacked ({error}): send it again as 'pollux submit' does") from None


def _make_folders(folder: Path, inside: PurePosixPath) -> int:
    """Make a folder and its missing parents; returns how many were made."""
    if (folder / inside).is_dir():
        return 0
    made = 0
    for depth in range(1, len(inside.parts) + 1):
        with contextlib.suppress(FileExistsError):
            folder.joinpath(*inside.parts[:depth]).mkdir()
            made += 1
    return made


def _write(tar: tarfile.TarFile, entry: tarfile.TarInfo, target: Path) -> None:
    source = tar.extractfile(entry)
    assert source is not None
    with target.open("xb") as file:
        shutil.copyfileobj(source, file, _PIECE_BYTES)
    target.chmod(0o755 if entry.mode & stat.S_IXUSR else 0o644)


class _Unzipped(io.RawIOBase):
    """The archive's content; unpacks no more than is allowed, whatever size the archive claims.

    Reads one gzip member, as `pack` writes it: millions of empty members would be small and take long.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._unzip = zlib.decompressobj(wbits=31)
        self._packed = b""
        # Each file needs a header and padding, and long names need more.
        self._left = MAX_UNPACKED_BYTES + 4096 * MAX_FILES

    def readable(self) -> bool:
        """Always true."""
        return True

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes; TooLarge after the limit for the whole archive."""
        wanted = _PIECE_BYTES if size < 0 else size
        data = b""
        while wanted and not data and not self._unzip.eof:
            self._packed = self._packed or self._file.read(_PIECE_BYTES)
            if not self._packed:
                raise EOFError("it ends too early")
            data = self._unzip.decompress(self._packed, wanted)
            self._packed = self._unzip.unconsumed_tail
        self._left -= len(data)
        if self._left < 0:
            raise TooLarge(f"the package has more than {MAX_UNPACKED_BYTES >> 20} MiB: {_REMEDY}")
        return data


def _entry_class() -> type[tarfile.TarInfo]:
    """A class for the headers of one archive. It refuses long descriptions of a file before they are read."""
    extras = 0

    class PackageEntry(tarfile.TarInfo):
        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
            nonlocal extras
            found = super().frombuf(buf, encoding, errors)
            extras = extras + 1 if found.type in _EXTRA_TYPES else 0
            if found.type == tarfile.GNUTYPE_SPARSE:
                found._refuse_holes()
            too_long = extras and found.size > _MAX_EXTRA_BYTES
            if too_long or extras > _MAX_EXTRAS or found.size < 0 or found.type == tarfile.XGLTYPE:
                raise InvalidInput(f"the package describes {found.name[:120]!r} at too great a length: not unpacked")
            return found

        def _refuse_holes(self, *_: object) -> NoReturn:
            raise InvalidInput(f"the package holds {self.name[:120]!r}, which is a file with holes: not unpacked")

        # `tarfile` reads the list of holes, in each of its three formats, to its end, however long it is.
        _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_holes

    return PackageEntry


def _inside(entry: tarfile.TarInfo) -> PurePosixPath:
    path = PurePosixPath(entry.name)
    plain = entry.isreg() and not entry.issparse() and entry.size >= 0
    if not plain or path.is_absolute() or not path.parts or ".." in path.parts or "\0" in entry.name:
        raise InvalidInput(f"the package holds {entry.name[:120]!r}, which is not a plain file inside it: not unpacked")
    _check_path(path)
    return path


def _check_path(path: PurePosixPath) -> None:
    """TooLarge for a file's path in an archive that is too long or too deep to be unpacked."""
    longest = max(len(os.fsencode(part)) for part in path.parts)
    if len(os.fsencode(path)) > MAX_PATH_BYTES or len(path.parts) > MAX_DEPTH or longest > _MAX_NAME_BYTES:
        raise TooLarge(
            f"the path '{str(path)[:60]}...' has {len(path.parts)} parts and {len(os.fsencode(path))} bytes; a package "
            f"takes {MAX_DEPTH} parts, {MAX_PATH_BYTES} bytes, and {_MAX_NAME_BYTES} bytes in a part: {_REMEDY}"
        )


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
