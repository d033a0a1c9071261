"""Checks whether nodes share a folder with this machine: writes a file here, and asks the nodes for it."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pollux.backends.dispatch.site import FolderCheck
from pollux.backends.nodes.provider import LentNode
from pollux.backends.transport.query import ask_host
from pollux.core.errors import BackendFailed
from pollux.wire.live.node_messages import SeeRequest

__all__ = ["FolderCheck", "SharedFolders"]

_KNOWN_SECONDS = 600.0
_AT_ONCE = 16
_ATTEMPTS = 3
_PAUSE_SECONDS = 1.0
_HUNG_SECONDS = 60.0
_MOST_THREADS = 16


class SharedFolders:
    """Asks nodes, and remembers for ten minutes which folders they share with this machine.

    A job only reads the first of the folders, and writes into the others.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._known: dict[tuple[str, tuple[str, int]], float] = {}
        self._lock = threading.Lock()
        # The nearest existing folder of each, as it was found, and until when that counts.
        self._nearest: dict[str, tuple[Path, float]] = {}
        # Folders that a thread looks at now, and since when: some file systems never answer.
        self._asking: dict[tuple[str, ...], float] = {}
        self._answers: dict[tuple[object, ...], FolderCheck] = {}

    def refuses(self, folders: Sequence[str], hosts: Iterable[LentNode]) -> str:
        """Why a job with these folders cannot run on these nodes; empty where it can, or no node answers."""
        return self._compare(folders, tuple(hosts)).why

    def check(
        self, folders: Sequence[str], hosts: Iterable[LentNode], changed: Callable[[], None]
    ) -> FolderCheck | None:
        """Like `refuses` without waiting; a node that does not answer counts as not sharing. None: not known yet.

        `changed` is called from another thread once the answer is known. No folder is touched in the caller's thread,
        and one thread at a time looks at the same folders.
        """
        there = tuple(hosts)
        named = tuple(folders)
        key = (named, tuple(host.address for host in there))
        with self._lock:
            if key in self._answers:
                return self._answers.pop(key)
            if not there or all(self._is_known(folder, there) for folder in named):
                return FolderCheck()
            if not self._may_look(named):
                return self._hung(named)
            self._asking[named] = time.monotonic()

        def find_out() -> None:
            found = FolderCheck(f"it could not be checked whether {_names(there)} share the folders of the job")
            try:
                found = self._compare_with_retries(folders, there)
            finally:
                with self._lock:
                    del self._asking[named]
                    if found.why or found.silent:
                        self._answers[key] = found
                changed()

        threading.Thread(target=find_out, name="pollux-shared-folders", daemon=True).start()
        return None

    def _may_look(self, folders: tuple[str, ...]) -> bool:
        return folders not in self._asking and len(self._asking) < _MOST_THREADS

    def _hung(self, folders: tuple[str, ...]) -> FolderCheck | None:
        """That these folders, or as many as threads may look at, have not answered for long; None: they may yet."""
        since = self._asking.get(folders) or max(self._asking.values())
        if time.monotonic() - since <= _HUNG_SECONDS:
            return None
        which = folders if folders in self._asking else next(iter(self._asking))
        return FolderCheck(
            f"the file system of {' or '.join(map(repr, which))} has not answered this machine for {_HUNG_SECONDS:g} "
            "s: mount it again, or name other folders in 'workdir' and 'checkpoint: dir'"
        )

    def _compare_with_retries(self, folders: Sequence[str], hosts: Sequence[LentNode]) -> FolderCheck:
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_SECONDS)
            found = self._compare(folders, hosts)
            if found.why or not found.silent:
                break
        if found.why or not found.silent:
            return found
        why = f"node '{found.silent}' does not say whether it shares folder '{folders[0]}' with this machine"
        return FolderCheck(why, found.silent, True)

    def _compare(self, folders: Sequence[str], hosts: Sequence[LentNode]) -> FolderCheck:
        silent = ""
        for number, folder in enumerate(folders):
            nearest = _nearest(Path(folder))
            self._nearest[folder] = (nearest, time.monotonic() + _KNOWN_SECONDS)
            unknown = self._unknown(nearest, hosts)
            if not unknown:
                continue
            with _marker(nearest) as marker:
                if marker is None and (number or nearest != Path(folder)):
                    return FolderCheck(
                        f"folder '{folder}' cannot be written to here, so whether nodes share it cannot be told: make "
                        "it on a file system that all nodes share, and name it in 'checkpoint: dir'"
                    )
                missing, unheard = self._ask(nearest, marker or str(nearest), unknown)
            silent = silent or unheard
            if missing:
                elsewhere = any(known == str(nearest) for known, _ in [*self._known])
                return FolderCheck(
                    f"folder '{folder}' is not the same on node '{missing}' as here: a file written here is not seen "
                    "there; put it on a file system that all nodes share, and name it in 'workdir' or 'checkpoint: "
                    "dir'",
                    elsewhere=elsewhere,
                )
        return FolderCheck("", silent)

    def _is_known(self, folder: str, hosts: Sequence[LentNode]) -> bool:
        """Whether these nodes share the folder, as far as is remembered."""
        now = time.monotonic()
        self._nearest = {name: found for name, found in self._nearest.items() if found[1] >= now}
        return folder in self._nearest and not self._unknown(self._nearest[folder][0], hosts)

    def _unknown(self, folder: Path, hosts: Sequence[LentNode]) -> list[LentNode]:
        now = time.monotonic()
        return [host for host in hosts if self._known.get((str(folder), host.address), 0.0) < now]

    def _ask(self, folder: Path, path: str, hosts: Sequence[LentNode]) -> tuple[str, str]:
        """A node that does not see the path, and one that does not answer; empty for none."""
        silent = ""
        with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
            answers = pool.map(lambda host: self._sees(host, path), hosts)
            for host, sees in zip(hosts, answers, strict=True):
                if sees:
                    self._known[str(folder), host.address] = time.monotonic() + _KNOWN_SECONDS
                elif sees is False:
                    return host.node.id, silent
                else:
                    silent = silent or host.node.id
        return "", silent

    def _sees(self, host: LentNode, path: str) -> bool | None:
        try:
            return ask_host(host.address, self._secret, SeeRequest((path,), host.node.id)).seen[0]
        except (BackendFailed, IndexError):
            return None


def _names(hosts: Sequence[LentNode]) -> str:
    return ", ".join(f"'{host.node.id}'" for host in hosts[:8])


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest existing one above it."""
    for path in (folder, *folder.parents):
        if path.is_dir():
            return path
    return Path("/")


@contextlib.contextmanager
def _marker(folder: Path) -> Iterator[str | None]:
    """The path of a new file in the folder; None where nothing can be written there."""
    path = folder / f".pollux-shared-{secrets.token_hex(8)}"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        yield None
        return
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)
