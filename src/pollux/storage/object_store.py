"""An object store behind an address such as `s3://bucket/path`, and the folder on this machine that mirrors it.

`ObjectStore` reads and writes files and small texts below one address, with fsspec; its errors are one sentence each.
`python -m pollux.storage.object_store ADDRESS` tries to write there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pollux.core.errors import InvalidInput, PolluxError, Unreachable
from pollux.storage.address import PACKAGES, scheme_of, store_address

__all__ = ["ObjectStore", "cache_folder", "main"]

_logger = logging.getLogger("pollux")
_T = TypeVar("_T")
_PAUSES = (0.5, 2.0, 5.0)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_OPTIONS = {
    "s3fs": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 1}}},
}  # fmt: skip


class _Ended(Exception):
    """`proceed` has ended an upload; `args[0]` is the error that it raised."""


def cache_folder(address: str, variables: Mapping[str, str] | None = None) -> Path:
    """The folder for this machine's copies: below `XDG_CACHE_HOME`, by default `~/.cache`."""
    variables = os.environ if variables is None else variables
    named = variables.get("XDG_CACHE_HOME")
    base = Path(named) if named else Path("~/.cache").expanduser()
    return base / "pollux" / "checkpoints" / hashlib.sha256(address.encode()).hexdigest()[:24]


class ObjectStore:
    """Objects below one address, which is opened on first use. Names are relative, with slashes.

    A missing object is a `FileNotFoundError`, wrong settings are `InvalidInput`, and other failures, after some
    attempts, `Unreachable`.
    """

    def __init__(self, address: str, cache: Path | None = None) -> None:
        self.address = store_address(address)
        self.cache = cache or cache_folder(self.address)
        self._opened: tuple[Any, str] | None = None

    def make_cache(self) -> None:
        """Make the folder for this machine's copies, for its owner only."""
        try:
            self.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(
                f"the copies of {self.address} cannot be kept in {self.cache} ({error.strerror}): name a folder that "
                "can be written to, on a disk with room, in XDG_CACHE_HOME"
            ) from error

    def sizes(self) -> dict[str, int]:
        """All objects, with their sizes in bytes."""

        def list_sizes() -> dict[str, int]:
            system, root = self._open()
            found = system.find(root, detail=True)
            return {name[len(root) + 1 :]: int(entry["size"] or 0) for name, entry in found.items() if name != root}

        return self._with_retries("listed", list_sizes, absent={})

    def read(self, name: str) -> bytes:
        """The content of a small object."""
        return self._with_retries(f"read '{name}'", lambda: bytes(self._at(name, "cat_file")))

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, as a whole or not at all."""
        self._with_retries(f"written '{name}'", lambda: self._at(name, "pipe_file", content))

    def upload(self, path: Path, name: str, proceed: Callable[[], None] | None = None) -> None:
        """Write a file as an object; `proceed` is called now and then, and ends the upload by an exception."""

        def go_on() -> None:
            try:
                if proceed is not None:
                    proceed()
            except Exception as error:
                raise _Ended(error) from error

        try:
            self._with_retries(f"written '{name}'", lambda: self._put(path, name, go_on))
        except _Ended as ended:
            raise ended.args[0] from None

    def download(self, name: str, path: Path) -> None:
        """Write an object to a file."""
        self._with_retries(f"read '{name}'", lambda: self._get(name, path))

    def remove(self, names: Iterable[str]) -> None:
        """Remove these objects; missing ones are no error."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._with_retries(f"removed '{name}'", lambda name=name: self._at(name, "rm_file"))  # type: ignore[misc]

    def probe(self) -> None:
        """Write, read and remove a small object of a new name."""
        name, content = f".probe-{secrets.token_hex(8)}", secrets.token_bytes(16)
        try:
            self.write(name, content)
            if self.read(name) != content:
                raise Unreachable(f"{self.address}: an object that was just written was read back differently")
        except FileNotFoundError as error:
            raise InvalidInput(f"{self.address}: its bucket does not exist ({error}): create it first") from error
        finally:
            with contextlib.suppress(PolluxError):
                self.remove([name])

    def _at(self, name: str, method: str, *more: Any) -> Any:
        system, root = self._open()
        return getattr(system, method)(f"{root}/{name}", *more)

    def _put(self, path: Path, name: str, proceed: Callable[[], None]) -> None:
        from fsspec.callbacks import Callback

        class Proceeding(Callback):  # type: ignore[misc]
            def relative_update(self, inc: int = 1) -> None:
                proceed()

        # Before every attempt, since a small file is sent in one piece.
        proceed()
        system, root = self._open()
        system.put_file(str(path), f"{root}/{name}", callback=Proceeding())

    def _get(self, name: str, path: Path) -> None:
        system, root = self._open()
        system.get_file(f"{root}/{name}", str(path))

    def _open(self) -> tuple[Any, str]:
        if self._opened is None:
            package = PACKAGES[scheme_of(self.address)]
            try:
                from fsspec.core import url_to_fs

                # Listings are not cached, since others write there, too.
                options = {"use_listings_cache": False, "skip_instance_cache": True, **_OPTIONS.get(package, {})}
                system, root = url_to_fs(self.address, **options)
            except ImportError as error:
                extra = " (or 'pollux-scheduler[s3]')" if package == "s3fs" else ""
                raise InvalidInput(
                    f"{self.address} needs the package {package}, which is not installed where the job runs ({error}): "
                    f"pip install {package}{extra}"
                ) from error
            except Exception as error:
                raise InvalidInput(f"{self.address} cannot be opened: {_text(error)}") from error
            if package == "s3fs":
                # Failures are tried again here, so s3fs need not do so.
                system.retries = 1
            self._opened = (system, str(root).rstrip("/"))
        return self._opened

    def _with_retries(self, what: str, action: Callable[[], _T], absent: _T | None = None) -> _T:
        for pause in (*_PAUSES, None):
            try:
                return action()
            except FileNotFoundError:
                if absent is not None:
                    return absent
                raise
            except PermissionError as error:
                raise InvalidInput(
                    f"{self.address}: it could not be {what}, since its key forbids that ({_text(error)}): give the "
                    "job a key that may read, write, list and remove there"
                ) from error
            except (PolluxError, _Ended):
                raise
            except Exception as error:
                if getattr(error, "errno", None) in _FULL:
                    raise InvalidInput(
                        f"the copies of {self.address} have no room in {self.cache} ({_text(error)}): free some, or "
                        "name another folder in XDG_CACHE_HOME"
                    ) from error
                # Every kind of store has its own classes of errors.
                if pause is None or "credential" in _text(error).lower():
                    raise Unreachable(
                        f"{self.address}: it could not be {what} ({_text(error)}): check its address, the job's key "
                        "and the network"
                    ) from error
                _logger.debug("%s: it could not be %s (%s), and is tried again", self.address, what, _text(error))
                time.sleep(pause)
        raise AssertionError("not reached")


def _text(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def main(arguments: list[str]) -> int:
    """Try to write to an address. The last line says what is wrong; the exit code is 2 if the user can correct it."""
    try:
        ObjectStore(arguments[0]).probe()
    except InvalidInput as error:
        print(error)
        return 2
    except PolluxError as error:
        print(error)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
