"""Checkpoints in a store of objects, such as S3: the same names and rules as in a folder, and copies on each machine.

A checkpoint's files are put there first and its manifest last, so that no half of one is ever found; one that is to go
loses its manifest first. What is read is first brought to a folder of this machine and verified there, so that files
are written and read in one way, wherever they are kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

from pollux.agent.folder import CheckpointFolder, flush, place_of, require_step, seal, step_name
from pollux.agent.lease import BEAT_SECONDS, Holder, Lease, place_of_lock
from pollux.agent.manifest import MANIFEST_NAME, Manifest, created_at, decode, verify_files
from pollux.core.errors import CheckpointDamaged, CheckpointMismatch, PolluxError
from pollux.wire.objects import ObjectStore

__all__ = ["StoredFolder", "fetch", "last_stored", "put"]

_DAMAGED_NAME = "damaged.json"
_ATTEMPTS = 2
_logger = logging.getLogger("pollux")


def put(store: ObjectStore, beside: Path, names: Iterable[str], target: str, proceed: Callable[[], None]) -> None:
    """Files of a folder as parts of the checkpoint `target`; `proceed` raises where that is to end."""
    for name in sorted(names):
        proceed()
        store.upload(beside / name, f"{target}/{name}")


def fetch(store: ObjectStore, name: str, content: bytes) -> Path:
    """The folder of this machine with that checkpoint, whose manifest is `content`; every file there is verified.

    A copy from before is used where it is the same. Others of this machine may ask for it at the same time.
    """
    manifest = decode(content)
    path = store.cache / name
    with _one_at_a_time(store.cache):
        if _is_copy(path, content, manifest):
            return path
        for stale in store.cache.glob(".fetch-*"):
            if stale.is_dir():
                shutil.rmtree(stale, ignore_errors=True)
        beside = store.cache / f".fetch-{secrets.token_hex(4)}"
        beside.mkdir()
        try:
            _download(store, name, manifest, beside)
            (beside / MANIFEST_NAME).write_bytes(content)
            if path.exists():
                # A copy of another one, which had this name before.
                os.rename(path, store.cache / f".fetch-old-{secrets.token_hex(4)}")
            os.rename(beside, path)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        for other in store.cache.iterdir():
            if other != path and (place_of(other) is not None or other.name.startswith(".fetch-old-")):
                shutil.rmtree(other, ignore_errors=True)
    return path


def last_stored(store: ObjectStore) -> float | None:
    """When the newest checkpoint in a store was made, in seconds since 1970; None where nobody can tell."""
    try:
        newest = next(iter(_published(store.sizes())), None)
        return None if newest is None else created_at(decode(store.read(f"{newest}/{MANIFEST_NAME}")).created)
    except (OSError, PolluxError) as error:
        _logger.debug("no age of the last checkpoint: %s", error)
        return None


class StoredFolder(CheckpointFolder):
    """The checkpoints under one address, held by a lease, with copies of the newest in a folder of this machine.

    Paths are those that copies have or would have; whether a checkpoint is there is known from the store alone.
    """

    def __init__(self, store: ObjectStore, holder: Holder, beat_seconds: float = BEAT_SECONDS) -> None:
        super().__init__(store.cache)
        self._store = store
        assert self._lock is not None
        try:
            self._lease = Lease(store, holder, place_of_lock(self._lock) if self._exclusive else "", beat_seconds)
            if not self._lease.handed_over:
                self._sweep()
        except BaseException:
            self._unlock()
            raise

    def release(self) -> None:
        """Let others write there."""
        self._lease.release()
        self._unlock()

    def published(self) -> dict[tuple[int, int], Path]:
        """By (step, number), the newest first; whole or not."""
        return self._paths(_published(self._store.sizes()))

    def begin(self, step: int) -> tuple[str, str]:
        """Make a folder of this machine to write to, and choose the name to put its files under; both are returned."""
        beside, _ = super().begin(step)
        self._lease.require()
        there = self._paths({name.split("/")[0] for name in self._store.sizes()})
        taken = [number for at, number in there if at == step]
        return beside, step_name(step, max(taken, default=-1) + 1)

    def publish(self, beside: Path, manifest: Manifest, target: str = "") -> str:
        """Put the manifest there, once all files are; what was written here stays as a copy where it is all there is.

        Other replicas may have put their parts from other machines.
        """
        seal(beside, manifest)
        self._lease.require()
        self._store.write(f"{target}/{MANIFEST_NAME}", (beside / MANIFEST_NAME).read_bytes())
        if all((beside / name).exists() for name in manifest.files):
            path = self.path / target
            shutil.rmtree(path, ignore_errors=True)
            os.rename(beside, path)
            flush(self.path)
        return target

    def discard(self, path: Path) -> None:
        """Remove a checkpoint, its manifest first."""
        names = sorted(self._objects(path.name), key=lambda name: not name.endswith(f"/{MANIFEST_NAME}"))
        try:
            self._store.remove(names)
        except PolluxError as error:
            _logger.warning("the old checkpoint %s cannot be removed: %s", path.name, error)
        if path.exists():
            super().discard(path)
        self._damaged.discard(path)
        self._spared.discard(path)

    def withdraw(self, target: str) -> None:
        """Remove what was put there of one that was not published."""
        names = self._objects(target)
        if f"{target}/{MANIFEST_NAME}" not in names:
            self._store.remove(names)

    def _read_whole(self, path: Path) -> str:
        content, _ = self._manifest(path)
        fetch(self._store, path.name, content)
        return content.decode()

    def _is_whole(self, path: Path) -> bool:
        """By its manifest and the sizes of its files: stores keep content, and a look at it costs a transfer."""
        try:
            _, manifest = self._manifest(path)
        except (CheckpointDamaged, CheckpointMismatch):
            return False
        sizes = self._store.sizes()
        return all(sizes.get(f"{path.name}/{name}") == digest.size for name, digest in manifest.files.items())

    def _set_aside(self, path: Path) -> None:
        name = f"{path.name}/{MANIFEST_NAME}"
        with contextlib.suppress(FileNotFoundError):
            self._store.write(f"{path.name}/{_DAMAGED_NAME}", self._store.read(name))
        self._store.remove([name])
        self._damaged.discard(path)
        self._spared.discard(path)
        _logger.warning("the damaged checkpoint %s/%s is not used any more", self._store.address, path.name)

    def _manifest(self, path: Path) -> tuple[bytes, Manifest]:
        where = f"{self._store.address}/{path.name}"
        try:
            content = self._store.read(f"{path.name}/{MANIFEST_NAME}")
            manifest = decode(content)
        except FileNotFoundError as error:
            raise CheckpointDamaged(f"{where}: its manifest is gone") from error
        except CheckpointDamaged as error:
            raise CheckpointDamaged(f"{where}: {error}") from error
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"{where}: {error}") from error
        require_step(path, manifest)
        return content, manifest

    def _objects(self, name: str) -> list[str]:
        return [each for each in self._store.sizes() if each.startswith(f"{name}/")]

    def _paths(self, names: Iterable[str]) -> dict[tuple[int, int], Path]:
        found = ((place_of(PurePosixPath(name)), self.path / name) for name in names)
        return dict(sorted(((place, path) for place, path in found if place is not None), reverse=True))

    def _sweep(self) -> None:
        """Remove what dead writers left: files of checkpoints that were never published."""
        names = list(self._store.sizes())
        whole = {name.split("/")[0] for name in names if name.endswith((f"/{MANIFEST_NAME}", f"/{_DAMAGED_NAME}"))}
        folders = {name: name.split("/")[0] for name in names if "/" in name}
        halves = [
            name
            for name, folder in folders.items()
            if folder not in whole and place_of(PurePosixPath(folder)) is not None
        ]
        self._store.remove(halves)


def _published(sizes: Iterable[str]) -> list[str]:
    """Names of checkpoints that have a manifest, the newest first."""
    names = [name.split("/")[0] for name in sizes if name.count("/") == 1 and name.endswith(f"/{MANIFEST_NAME}")]
    places = {place_of(PurePosixPath(name)): name for name in names}
    return [places[place] for place in sorted((place for place in places if place is not None), reverse=True)]


def _is_copy(path: Path, content: bytes, manifest: Manifest) -> bool:
    try:
        if (path / MANIFEST_NAME).read_bytes() != content:
            return False
        verify_files(path, manifest.files)
    except (OSError, CheckpointDamaged):
        return False
    return True


def _download(store: ObjectStore, name: str, manifest: Manifest, beside: Path) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            for file in sorted(manifest.files):
                store.download(f"{name}/{file}", beside / file)
            verify_files(beside, manifest.files)
            return
        except FileNotFoundError as error:
            raise CheckpointDamaged(f"{store.address}/{name}: a file of it is gone ({error})") from error
        except CheckpointDamaged as error:
            # It may have been damaged on its way.
            if attempt + 1 == _ATTEMPTS:
                raise CheckpointDamaged(f"{store.address}/{name}: {error}") from error


@contextlib.contextmanager
def _one_at_a_time(cache: Path) -> Iterator[None]:
    """Only one process of this machine, where its file system knows locks, brings a copy."""
    lock = os.open(cache / ".fetch-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
