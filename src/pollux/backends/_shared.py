"""Whether a folder is the same here and on nodes: a file written here is looked for there."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pollux.backends._asking import ask_host
from pollux.backends.lender import HostedNode
from pollux.core.errors import BackendFailed

__all__ = ["SharedFolders"]

_KNOWN_SECONDS = 600.0
_AT_ONCE = 16


class SharedFolders:
    """Asks hosts, and remembers for ten minutes which folders they share with this machine."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._known: dict[tuple[str, tuple[str, int]], float] = {}

    def refuses(self, folders: Sequence[str], hosts: Iterable[HostedNode]) -> str:
        """Why a job with these folders cannot run on these nodes; empty where it can, or nobody answers."""
        there = tuple(hosts)
        for folder in folders:
            nearest = _nearest(Path(folder))
            now = time.monotonic()
            unknown = [host for host in there if self._known.get((str(nearest), host.address), 0.0) < now]
            missing = self._missing(nearest, unknown) if unknown else None
            if missing is not None:
                return (
                    f"folder '{folder}' is not the same on node '{missing}' as here: a file written here is not seen "
                    "there; put it on a file system that all nodes share, and name it in 'workdir' or 'checkpoint: dir'"
                )
        return ""

    def _missing(self, folder: Path, hosts: Sequence[HostedNode]) -> str | None:
        with _marker(folder) as marker, ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
            answers = pool.map(lambda host: self._sees(host, marker), hosts)
            for host, sees in zip(hosts, answers, strict=True):
                if sees:
                    self._known[str(folder), host.address] = time.monotonic() + _KNOWN_SECONDS
                elif sees is False:
                    return host.node.id
        return None

    def _sees(self, host: HostedNode, path: str) -> bool | None:
        try:
            return bool(ask_host(host.address, self._secret, {"see": [path]})["seen"][0])
        except (BackendFailed, KeyError, IndexError):
            # A node that does not answer is another matter.
            return None


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    for path in (folder, *folder.parents):
        if path.is_dir():
            return path
    return Path("/")


@contextlib.contextmanager
def _marker(folder: Path) -> Iterator[str]:
    """A file of a new name there; the folder itself where nothing can be written."""
    path = folder / f".pollux-shared-{secrets.token_hex(8)}"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        yield str(folder)
        return
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)
