"""Working folders that were sent along with jobs: collected piece by piece, unpacked once, kept by their digest."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath

from pollux.core.errors import Conflict, InvalidInput, StoreFailed, TooLarge
from pollux.storage.archive import MAX_PACKED_BYTES, unpack
from pollux.storage.foreign_file import append_inside, open_inside

__all__ = ["MAX_PIECE_BYTES", "Packages"]

MAX_PIECE_BYTES = 512 * 1024
"""The most bytes of an archive in one request."""

_DIGEST = re.compile("[0-9a-f]{64}")
_LEFTOVERS = ("old-", "new-")
_MAX_UNFINISHED = 16
# Jobs may have written results there, which people fetch days later.
_KEPT_SECONDS = 7 * 24 * 3600.0


class Packages:
    """Everything at `home/packages`: a folder for each digest, and incomplete archives beside them.

    `needed` gives the folders of jobs, and until when each was used, as seconds since 1970. A package that was
    not used for a week by the clock `now` is removed when the next one comes.
    """

    def __init__(
        self,
        home: Path,
        needed: Callable[[], Iterable[tuple[str, float]]] = tuple,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folder = home / "packages"
        self._needed = needed
        self._now = now
        self._lock = threading.Lock()

    def add(self, digest: str, size: int, offset: int, piece: bytes) -> tuple[int, str | None]:
        """Add a piece; returns how much has come, and the folder once it is complete and unpacked.

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
        if os.path.lexists(whole):
            _note_use(whole)
            return size, str(whole)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        have = part.lstat().st_size if os.path.lexists(part) else 0
        if have > size and part.is_file():
            part.unlink()
            have = 0
        if offset != have or not piece:
            return have, None
        if not have:
            self._sweep()
        if not have and len([*self._folder.glob("*.part")]) >= _MAX_UNFINISHED:
            self._forget_oldest()
        with append_inside(self._folder, part.name) as file:
            file.write(piece)
        have += len(piece)
        return (have, None) if have < size else (have, self._finish(digest, whole, part))

    def _sweep(self) -> None:
        """Remove packages not used for long, and remains of an earlier removal or unpacking.

        A job uses a package if the path of its folder has the package's name. The folders of jobs themselves are not
        looked at: they may lie on file systems that hang.
        """
        long_ago = self._now() - _KEPT_SECONDS
        used: dict[str, float] = {}
        for folder, at in self._needed():
            if at > long_ago:
                for part in PurePath(folder).parts:
                    if _DIGEST.fullmatch(part):
                        used[part] = max(at, used.get(part, 0.0))
        for whole in self._folder.iterdir():
            with contextlib.suppress(OSError):
                last = max(whole.lstat().st_mtime, used.get(whole.name, 0.0))
                if whole.name.startswith(_LEFTOVERS):
                    shutil.rmtree(whole, ignore_errors=True)
                elif _DIGEST.fullmatch(whole.name) and last <= long_ago:
                    # Renamed first: half of it must not be taken for the whole.
                    shutil.rmtree(whole.rename(whole.with_name(f"old-{whole.name}")), ignore_errors=True)
                elif whole.name in used:
                    # A service that starts later may have forgotten some jobs.
                    os.utime(whole, (used[whole.name], last), follow_symlinks=False)

    def _forget_oldest(self) -> None:
        parts = sorted(self._folder.glob("*.part"), key=lambda path: path.lstat().st_mtime)
        parts[0].unlink()

    def _finish(self, digest: str, whole: Path, part: Path) -> str:
        with open_inside(self._folder, part.name) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digest:
            part.unlink()
            raise Conflict(f"the package that came is not {digest[:12]}..., which was announced; send it again")
        beside = Path(tempfile.mkdtemp(dir=self._folder, prefix="new-"))
        try:
            unpack(part, beside)
            beside.chmod(0o755)
            beside.rename(whole)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        finally:
            part.unlink(missing_ok=True)
        return str(whole)


def _note_use(whole: Path) -> None:
    """Note that a package was asked for now, so that it is kept."""
    if not stat.S_ISDIR(whole.lstat().st_mode):
        raise Conflict(f"{whole} is in the way of a package and no folder: remove it, and send the package again")
    os.utime(whole)
