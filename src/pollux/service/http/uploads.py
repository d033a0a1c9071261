"""Working folders that were sent along with jobs: collected piece by piece, unpacked once, kept by their digest."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pollux.core.errors import Conflict, InvalidInput, StoreFailed, TooLarge
from pollux.storage.archive import MAX_PACKED_BYTES, digest_of, unpack

__all__ = ["MAX_PIECE_BYTES", "Packages"]

MAX_PIECE_BYTES = 512 * 1024
"""Of an archive that one request brings."""

_DIGEST = re.compile("[0-9a-f]{64}")
_LEFTOVERS = ("old-", "new-")
_MAX_UNFINISHED = 16
# Jobs may have written results there, which people fetch when they come to it.
_KEPT_SECONDS = 7 * 24 * 3600.0


class Packages:
    """Everything at `home/packages`: a folder for each digest, and pieces that are not whole yet beside them.

    `needed` gives the folders of jobs, and until when each was used, as seconds since 1970. A package that was
    not used for a week is removed when the next one comes.
    """

    def __init__(self, home: Path, needed: Callable[[], Iterable[tuple[str, float]]] = tuple) -> None:
        self._folder = home / "packages"
        self._needed = needed
        self._lock = threading.Lock()

    def add(self, digest: str, size: int, offset: int, piece: bytes) -> tuple[int, str | None]:
        """Add a piece; how much is there by now, and the folder once it is whole and unpacked.

        A piece that does not begin where the last one ended changes nothing: the answer says where to go on.
        """
        if _DIGEST.fullmatch(digest) is None:
            raise InvalidInput(f"digest is '{digest[:80]}'; give SHA-256 as 64 hexadecimal digits")
        if size < 1:
            raise InvalidInput(f"size is {size}; a package has 1 to {MAX_PACKED_BYTES} bytes")
        if size > MAX_PACKED_BYTES:
            raise TooLarge(f"size is {size}; a package has 1 to {MAX_PACKED_BYTES} bytes")
        if len(piece) > MAX_PIECE_BYTES or offset + len(piece) > size:
            raise Conflict(f"a piece of {len(piece)} bytes at {offset} does not fit a package of {size}; send less")
        with self._lock:
            try:
                return self._add(digest, size, offset, piece)
            except OSError as error:
                raise StoreFailed(
                    f"cannot keep the package at {self._folder}: {error.strerror}; free some space"
                ) from error

    def _add(self, digest: str, size: int, offset: int, piece: bytes) -> tuple[int, str | None]:
        whole, part = self._folder / digest, self._folder / f"{digest}.part"
        if whole.is_dir():
            os.utime(whole)
            return size, str(whole)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        have = part.stat().st_size if part.exists() else 0
        if offset != have or not piece:
            return have, None
        if not have:
            self._sweep()
        if not have and len([*self._folder.glob("*.part")]) >= _MAX_UNFINISHED:
            self._forget_oldest()
        with part.open("ab") as file:
            file.write(piece)
        have += len(piece)
        return (have, None) if have < size else (have, self._finish(digest, whole, part))

    def _sweep(self) -> None:
        """Remove packages not used for long, and remains of an earlier removal or unpacking."""
        long_ago = time.time() - _KEPT_SECONDS
        used: dict[Path, float] = {}
        for folder, at in self._needed():
            if at > long_ago:
                path = Path(folder).resolve()
                for each in (path, *path.parents):
                    used[each] = max(at, used.get(each, 0.0))
        for whole in self._folder.resolve().iterdir():
            with contextlib.suppress(OSError):
                if whole.name.startswith(_LEFTOVERS):
                    shutil.rmtree(whole, ignore_errors=True)
                elif _DIGEST.fullmatch(whole.name) and max(whole.stat().st_mtime, used.get(whole, 0.0)) <= long_ago:
                    # Renamed first: half of it must not be taken for the whole.
                    shutil.rmtree(whole.rename(whole.with_name(f"old-{whole.name}")), ignore_errors=True)
                elif whole in used:
                    # A service that starts later may have forgotten some jobs.
                    os.utime(whole, (used[whole], max(whole.stat().st_mtime, used[whole])))

    def _forget_oldest(self) -> None:
        parts = sorted(self._folder.glob("*.part"), key=lambda path: path.stat().st_mtime)
        parts[0].unlink()

    def _finish(self, digest: str, whole: Path, part: Path) -> str:
        archive = part.read_bytes()
        part.unlink()
        if digest_of(archive) != digest:
            raise Conflict(f"the package that came is not {digest[:12]}..., which was announced; send it again")
        beside = Path(tempfile.mkdtemp(dir=self._folder, prefix="new-"))
        try:
            unpack(archive, beside)
            beside.chmod(0o755)
            beside.rename(whole)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        return str(whole)
