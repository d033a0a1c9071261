"""Checkpoints in a store of objects, such as S3: the same names and rules as in a folder, and copies on each machine.

The manifest of a checkpoint is uploaded last and removed first, so that no process finds a partial one. Every attempt
has a name of its own, `step-0000001234~000003-5f2c81aa`, with the generation that wrote it: a process that does not
know that it was replaced touches no other attempt. To read a checkpoint, a machine first copies it to a folder of its
own and verifies it there, so that files are written and read in one way, wherever they are kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pollux.agent.checkpoint.folder import CheckpointFolder, flush, place_of, require_step, seal, step_name
from pollux.agent.checkpoint.lease import BEAT_SECONDS, Holder, Lease, place_of_lock
from pollux.agent.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    created_at,
    decode,
    digest_file,
    located,
    verify_files,
)
from pollux.core.errors import CheckpointDamaged, CheckpointMismatch, PolluxError
from pollux.storage.object_store import ObjectStore

__all__ = ["ObjectStoreFolder", "fetch", "last_stored", "put"]

_DAMAGED_NAME = "damaged.json"
_ENTRY = re.compile(r"(step-\d{10,}(?:-[1-9]\d*)?)~(\d{6,})-([0-9a-f]{8})")
_ATTEMPTS = 2
_logger = logging.getLogger("pollux")


class _Entry(NamedTuple):
    """One attempt at a checkpoint; the greatest counts, by step, number, generation and a random token."""

    place: tuple[int, int]
    generation: int
    token: str
    key: str
    sizes: dict[str, int]

    @property
    def name(self) -> str:
        """The name of the checkpoint and of its copy."""
        return step_name(*self.place)

    @property
    def is_published(self) -> bool:
        """Whether it has its manifest."""
        return MANIFEST_NAME in self.sizes


def put(store: ObjectStore, beside: Path, names: Iterable[str], key: str, proceed: Callable[[], None]) -> None:
    """Upload files of a folder as parts of the checkpoint `key`; `proceed` raises when the upload must stop."""
    for name in sorted(names):
        proceed()
        store.upload(beside / name, f"{key}/{name}", proceed)


def fetch(store: ObjectStore, name: str, key: str, content: bytes, launch: str = "") -> Path:
    """Copy the checkpoint `key` to this machine, verify every file, and return its folder; `content` is its manifest.

    An equal copy on this machine is reused, and so are files of an interrupted fetch. Later calls of the same
    `launch` on this machine rely on the check made here.
    """
    manifest = decode(content)
    path = store.cache / name
    seen = store.cache / f".verified-{name}"
    word = f"{launch} {hashlib.sha256(content).hexdigest()}"
    with _one_at_a_time(store.cache) as alone:
        if alone:
            _clear(store.cache, path, store.cache / f".fetch-{name}", seen)
        if launch and _text(seen) == word and _has(path, content, manifest):
            return path
        if not _is_copy(path, content, manifest):
            beside = store.cache / (f".fetch-{name}" if alone else f".fetch-{name}-{secrets.token_hex(4)}")
            beside.mkdir(exist_ok=True)
            _download(store, key, manifest, beside)
            (beside / MANIFEST_NAME).write_bytes(content)
            if path.exists():
                # A copy of another checkpoint that had this name.
                shutil.rmtree(path, ignore_errors=True)
            os.rename(beside, path)
        seen.write_text(word)
    return path


def last_stored(store: ObjectStore) -> float | None:
    """When the newest checkpoint in a store was made, in seconds since 1970; None where that is not known."""
    try:
        entries = [entry for entry in _entries(store.sizes()) if entry.is_published]
        return None if not entries else created_at(decode(store.read(f"{entries[0].key}/{MANIFEST_NAME}")).created)
    except (OSError, PolluxError) as error:
        _logger.debug("no age of the last checkpoint: %s", error)
        return None


class ObjectStoreFolder(CheckpointFolder):
    """The checkpoints under one address, held by a lease, with copies of the newest in a folder of this machine.

    Paths are those of copies, which may not exist; the store alone says which checkpoints there are.
    """

    def __init__(self, store: ObjectStore, holder: Holder, beat_seconds: float = BEAT_SECONDS) -> None:
        super().__init__(store.cache, insists=False)
        self._store = store
        self._holder = holder
        self._keys: dict[Path, str] = {}
        self._halves: set[str] = set()
        assert self._lock is not None
        try:
            self._lease = Lease(store, holder, place_of_lock(self._lock) if self._exclusive else "", beat_seconds)
            if not self._lease.handed_over:
                self._store.remove(self._objects(entry for entry in self._all() if _is_half(entry)))
        except BaseException:
            self._unlock()
            raise

    def release(self) -> None:
        """Release the lease and the folder of the copies."""
        self._lease.release()
        self._unlock()

    def published(self) -> dict[tuple[int, int], Path]:
        """As in a folder; of several attempts at one checkpoint, that of the last start counts."""
        found: dict[tuple[int, int], Path] = {}
        for entry in self._all():
            if entry.is_published and entry.place not in found:
                found[entry.place] = self.path / entry.name
                self._keys[found[entry.place]] = entry.key
        return found

    def key_of(self, name: str) -> str:
        """The key in the store of a checkpoint that was found."""
        return self._keys[self.path / name]

    def begin(self, step: int) -> tuple[str, str]:
        """Make a local folder to write to, and choose the key under which to upload its files; returns both."""
        beside, _ = super().begin(step)
        self._lease.require()
        number = max((entry.place[1] for entry in self._all() if entry.place[0] == step), default=-1) + 1
        return beside, f"{step_name(step, number)}~{self._holder.generation:06d}-{secrets.token_hex(4)}"

    def publish(self, beside: Path, manifest: Manifest, target: str = "") -> str:
        """Upload the manifest once all files are there; the folder stays as a copy if it has all files.

        With shards other machines have the files of other replicas.
        """
        seal(beside, manifest)
        entry = next((entry for entry in self._all() if entry.key == target), None)
        for name, digest in manifest.files.items():
            if entry is None or entry.sizes.get(name) != digest.size:
                raise CheckpointDamaged(f"{self._store.address}/{target}/{name} is not there as it was uploaded")
        assert entry is not None
        self._lease.require()
        self._store.write(f"{target}/{MANIFEST_NAME}", (beside / MANIFEST_NAME).read_bytes())
        try:
            self._lease.require()
        except PolluxError:
            # Another process has taken the lease at that moment.
            self._store.remove([f"{target}/{MANIFEST_NAME}"])
            raise
        path = self.path / entry.name
        self._keys[path] = target
        if all((beside / name).exists() for name in manifest.files):
            shutil.rmtree(path, ignore_errors=True)
            os.rename(beside, path)
            flush(self.path)
        return entry.name

    def retain(self, name: str, keep: int) -> None:
        """As in a folder, but newer checkpoints are never removed; where the store fails, the next save tries again."""
        try:
            super().retain(name, keep)
            self._clear_halves()
            names = {path.name for path in self.published().values()}
            for copy in self.path.iterdir():
                if place_of(copy) is not None and copy.name not in names:
                    shutil.rmtree(copy, ignore_errors=True)
        except PolluxError as error:
            _logger.warning("older checkpoints in %s could not be cleared: %s", self._store.address, error)

    def drop_after(self, step: int) -> None:
        """As in a folder; where the store fails, the checkpoints stay, with an error in the log."""
        try:
            super().drop_after(step)
        except PolluxError as error:
            _logger.error("checkpoints after step %d in %s could not be removed: %s", step, self._store.address, error)

    def discard(self, path: Path) -> None:
        """Remove a checkpoint, its manifest first."""
        entries = [entry for entry in self._all() if entry.name == path.name and not _is_half(entry)]
        try:
            self._store.remove(self._objects(entries))
        except PolluxError as error:
            _logger.warning("the old checkpoint %s cannot be removed: %s", path.name, error)
        if path.exists():
            super().discard(path)
        self._damaged.discard(path)
        self._spared.discard(path)

    def withdraw(self, target: str) -> None:
        """Remove the uploaded files of a checkpoint that was not published."""
        self._store.remove(self._objects(entry for entry in self._all() if entry.key == target and _is_half(entry)))

    def _stays(self, place: tuple[int, int], newest: tuple[int, int] | None) -> bool:
        # Another process that trains with this one may have published it while this one was uploading.
        return newest is not None and place > newest

    def _clear_halves(self) -> None:
        """Remove unpublished attempts that were there at the last save already: their writers are gone."""
        halves = [entry for entry in self._all() if _is_half(entry)]
        self._store.remove(self._objects(entry for entry in halves if entry.key in self._halves))
        self._halves = {entry.key for entry in halves}

    def _read_whole(self, path: Path) -> str:
        content, _ = self._manifest(path)
        fetch(self._store, path.name, self._keys[path], content, self._holder.launch)
        return content.decode()

    def _is_whole(self, path: Path) -> bool:
        """Judge by the manifest and the sizes of the files: to read the content would cost a transfer."""
        try:
            _, manifest = self._manifest(path)
        except (CheckpointDamaged, CheckpointMismatch):
            return False
        sizes = next((entry.sizes for entry in self._all() if entry.key == self._keys[path]), {})
        return all(sizes.get(name) == digest.size for name, digest in manifest.files.items())

    def _set_aside(self, path: Path) -> None:
        name = f"{self._keys[path]}/{MANIFEST_NAME}"
        with contextlib.suppress(FileNotFoundError):
            self._store.write(f"{self._keys[path]}/{_DAMAGED_NAME}", self._store.read(name))
        self._store.remove([name])
        self._damaged.discard(path)
        self._spared.discard(path)
        _logger.warning("the damaged checkpoint %s/%s is not used any more", self._store.address, self._keys[path])

    def _manifest(self, path: Path) -> tuple[bytes, Manifest]:
        where = f"{self._store.address}/{self._keys[path]}"
        try:
            content = self._store.read(f"{self._keys[path]}/{MANIFEST_NAME}")
        except FileNotFoundError as error:
            raise CheckpointDamaged(f"{where}: its manifest is gone") from error
        with located(where):
            manifest = decode(content)
        require_step(path, manifest)
        return content, manifest

    def _all(self) -> list[_Entry]:
        return _entries(self._store.sizes())

    def _objects(self, entries: Iterable[_Entry]) -> list[str]:
        """The names of the objects of these attempts, manifests first."""
        names = [f"{entry.key}/{name}" for entry in entries for name in entry.sizes]
        return sorted(names, key=lambda name: not name.endswith(f"/{MANIFEST_NAME}"))


def _entries(sizes: Mapping[str, int]) -> list[_Entry]:
    """All attempts at checkpoints, published or not, the newest first."""
    found: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        key, slash, file = name.partition("/")
        if slash:
            found.setdefault(key, {})[file] = size
    entries = []
    for key, files in found.items():
        match = _ENTRY.fullmatch(key)
        place = None if match is None else place_of(PurePosixPath(match[1]))
        if match is not None and place is not None:
            entries.append(_Entry(place, int(match[2]), match[3], key, files))
    return sorted(entries, reverse=True)


def _is_half(entry: _Entry) -> bool:
    return not entry.is_published and _DAMAGED_NAME not in entry.sizes


def _clear(cache: Path, *kept: Path) -> None:
    """Remove copies of other checkpoints, whole or partial, and what killed writers left."""
    for other in cache.iterdir():
        if other in kept or not (place_of(other) or other.name.startswith((".fetch-step", ".verified-"))):
            continue
        if other.is_dir():
            shutil.rmtree(other, ignore_errors=True)
        else:
            other.unlink(missing_ok=True)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _has(path: Path, content: bytes, manifest: Manifest) -> bool:
    try:
        sizes = {name: (path / name).stat().st_size for name in manifest.files}
        same = (path / MANIFEST_NAME).read_bytes() == content
    except OSError:
        return False
    return same and all(sizes[name] == digest.size for name, digest in manifest.files.items())


def _is_copy(path: Path, content: bytes, manifest: Manifest) -> bool:
    try:
        if not _has(path, content, manifest):
            return False
        verify_files(path, manifest.files)
    except CheckpointDamaged:
        return False
    return True


def _download(store: ObjectStore, key: str, manifest: Manifest, beside: Path) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            for name, digest in sorted(manifest.files.items()):
                # A file that an interrupted fetch has copied whole is not fetched again.
                if not ((beside / name).exists() and digest_file(beside / name) == digest):
                    store.download(f"{key}/{name}", beside / name)
            verify_files(beside, manifest.files)
            return
        except FileNotFoundError as error:
            raise CheckpointDamaged(f"{store.address}/{key}: a file of it is gone ({error})") from error
        except CheckpointDamaged as error:
            # The transfer may have damaged it.
            if attempt + 1 == _ATTEMPTS:
                raise CheckpointDamaged(f"{store.address}/{key}: {error}") from error


@contextlib.contextmanager
def _one_at_a_time(cache: Path) -> Iterator[bool]:
    """Let one process of this machine fetch at a time; false where the file system knows no locks."""
    lock = os.open(cache / ".fetch-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            alone = True
        except OSError:
            alone = False
        yield alone
    finally:
        os.close(lock)
