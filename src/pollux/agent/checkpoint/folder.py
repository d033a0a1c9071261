"""The folder of a job's checkpoints: its lock, the names in it, and when checkpoints are removed.

A step's checkpoint is `step-0000001234`; one that replaces it is `step-0000001234-1`, then `-2`: the highest number
counts. Whenever a writer dies, only whole checkpoints have such a name.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path, PurePath

from pollux.agent.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    created_at,
    decode,
    encode,
    read_manifest,
    verify_files,
)
from pollux.core.errors import CheckpointDamaged, CheckpointMismatch, InvalidInput, MisusedJob, PolluxError

__all__ = ["CheckpointFolder", "flush", "is_misuse", "last_created", "place_of", "require_step", "seal", "step_name"]

_logger = logging.getLogger("pollux")
_STEP_NAME = re.compile(r"step-(\d{10,})(?:-([1-9]\d*))?")


def step_name(step: int, number: int = 0) -> str:
    """Name of the folder of a step's checkpoint; with ten digits, so that names sort as steps do.

    `number` counts how often a checkpoint of the step was replaced.
    """
    return f"step-{step:010d}-{number}" if number else f"step-{step:010d}"


def place_of(path: PurePath) -> tuple[int, int] | None:
    """(step, number) of a checkpoint's folder, `None` for any other name."""
    match = _STEP_NAME.fullmatch(path.name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def last_created(folder: Path) -> float | None:
    """When the newest checkpoint in a folder was made, in seconds since 1970; None where that is not known.

    Needs no lock, and reads one manifest only.
    """
    try:
        found = ((place, path) for path in folder.iterdir() if (place := place_of(path)) is not None)
        newest = max(found, default=None)
        return None if newest is None else created_at(read_manifest(newest[1]).created)
    except (OSError, PolluxError) as error:
        _logger.debug("no age of the last checkpoint: %s", error)
        return None


def require_step(path: Path, manifest: Manifest) -> None:
    """Raise `CheckpointDamaged` where a manifest is of another step than the name of its folder says."""
    place = place_of(path)
    if place is None or manifest.step != place[0]:
        raise CheckpointDamaged(f"{path}: its manifest is of step {manifest.step}")


def flush(path: Path) -> None:
    """Force a file's content, or a folder's entries, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(beside: Path, manifest: Manifest) -> None:
    """Write the manifest into a folder whose files are all there; verify it and flush it to disk."""
    path = beside / MANIFEST_NAME
    path.write_bytes(encode(manifest))
    flush(path)
    decode(path.read_bytes())
    flush(beside)


class CheckpointFolder:
    """The folder on disk. Replica 0 holds its lock, which the death of the process releases.

    With `insists` false a folder that another process has locked is used as well: a lease then decides which process
    may write. A folder that cannot be written to now can be read, and every `begin` tries to lock it again.
    """

    def __init__(self, path: Path, insists: bool = True) -> None:
        self.path = path
        self._damaged: set[Path] = set()
        self._spared: set[Path] = set()
        self._insists = insists
        self._exclusive = False
        self._lock: int | None = None
        self._problem = ""
        self._open()
        if self._problem:
            _logger.error(
                "checkpoint folder %s: %s; training goes on without new checkpoints, and each save tries again",
                path,
                self._problem,
            )
        _close_in_children(self)

    def _open(self) -> None:
        """Lock the folder; where only the disk prevents that, `_problem` says why."""
        path, self._problem = self.path, ""
        try:
            path.mkdir(exist_ok=True)
            self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            self._problem = _explained(path, error)
            if not self._insists or is_misuse(path, error):
                raise InvalidInput(f"checkpoint folder {path}: {self._problem}") from error
            return
        try:
            self._exclusive = self._acquire(self._lock, self._insists)
        except PolluxError:
            self._unlock()
            raise

    def release(self) -> None:
        """Let others write to the folder."""
        self._problem = ""
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def published(self) -> dict[tuple[int, int], Path]:
        """The folders of published checkpoints by (step, number), the newest first, damaged ones included."""
        try:
            found = [(place_of(path), path) for path in self.path.iterdir() if path.is_dir()]
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise InvalidInput(
                f"checkpoint folder {self.path} cannot be read ({error.strerror}); repair the disk, or its rights"
            ) from error
        return dict(sorted(((place, path) for place, path in found if place is not None), reverse=True))

    def newest_whole(self) -> tuple[str, str] | None:
        """Name and manifest, as text, of the newest whole checkpoint; `None` where there is none at all."""
        reasons = []
        for path in self.published().values():
            try:
                return path.name, self._read_whole(path)
            except CheckpointDamaged as error:
                reasons.append(str(error))
                if path not in self._damaged:
                    self._damaged.add(path)
                    warnings.warn(f"skipped a damaged checkpoint: {error}", UserWarning, stacklevel=5)
        if reasons:
            raise CheckpointDamaged(
                f"none of the {len(reasons)} checkpoints in {self.path} is whole ({'; '.join(reasons)}); "
                "restore one from a copy, or start again in another folder"
            )
        return None

    def begin(self, step: int) -> tuple[str, str]:
        """Remove what dead writers left, make a new folder to write to, and return its name.

        The second text is the name that it will be published under; empty where that is not known yet.
        """
        self._open_again()
        if self._lock is None:
            raise MisusedJob(f"checkpoint folder {self.path} was released by close(); make a new Checkpointer")
        if self._exclusive:
            for stale in self.path.glob(".tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
        beside = self.path / f".tmp-{step}-{secrets.token_hex(4)}"
        beside.mkdir()
        return beside.name, ""

    def _open_again(self) -> None:
        """Try again to lock a folder that could not be locked, and make it again if it was removed."""
        if self._lock is not None and self._insists and not self.path.is_dir():
            self._unlock()
            self._problem = "it was removed"
        if self._problem:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        if self._problem:
            raise InvalidInput(f"checkpoint folder {self.path}: {self._problem}")

    def publish(self, beside: Path, manifest: Manifest, target: str = "") -> str:
        """Write the manifest as the last file, flush all, and give the folder its final name, which is returned.

        A whole checkpoint of the same step stays, with a lower number; damaged ones are moved aside. `target` is the
        name that `begin` chose, if it did.
        """
        seal(beside, manifest)
        path = self.path / step_name(manifest.step, self._next_number(manifest.step))
        os.rename(beside, path)
        flush(self.path)
        return path.name

    def withdraw(self, target: str) -> None:
        """Remove the unpublished files under the name that `begin` chose."""

    def retain(self, name: str, keep: int) -> None:
        """Keep the newest checkpoints of `keep` steps, the just published `name` among them, and remove all others.

        Checkpoints known to be damaged are moved aside; those that `drop_after` spared are removed.
        """
        for path in self._damaged & set(self.published().values()):
            self._set_aside(path)
        found = {place: path for place, path in self.published().items() if path not in self._spared}
        newest = self.path / name
        kept = self._newest_of_steps(found, newest, keep)
        newest_place = next((place for place, path in found.items() if path == newest), None)
        for place, path in self.published().items():
            if path not in kept and not (place in found and self._stays(place, newest_place)):
                self.discard(path)

    @staticmethod
    def _newest_of_steps(found: Mapping[tuple[int, int], Path], newest: Path, keep: int) -> list[Path]:
        """`newest`, and the newest checkpoint of each of the last steps before it, `keep` in all."""
        kept, steps = [newest], {place[0] for place, path in found.items() if path == newest}
        for (step, _), path in found.items():
            if step not in steps and len(kept) < keep:
                kept.append(path)
            steps.add(step)
        return kept

    def _stays(self, place: tuple[int, int], newest: tuple[int, int] | None) -> bool:
        """Whether a checkpoint beyond the number to keep stays nevertheless; `newest` is the newest of this process."""
        return False

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, but not the last whole one: the next `retain` removes that."""
        found = self.published()
        later = {place: path for place, path in found.items() if place[0] > step}
        if not any(self._is_whole(path) for place, path in found.items() if place not in later):
            nearest = sorted(later, key=lambda place: (place[0], -place[1]))
            whole = next((place for place in nearest if self._is_whole(later[place])), None)
            # Where none is whole all stay: `newest_whole` will say what is wrong with each.
            spared = set(later) if whole is None else {whole}
            self._spared.update(later[place] for place in spared)
            later = {place: path for place, path in later.items() if place not in spared}
        for path in later.values():
            self.discard(path)

    def discard(self, path: Path) -> None:
        """Remove a checkpoint. It is renamed first, so that no process finds a partial one."""
        doomed = self.path / f".tmp-removed-{secrets.token_hex(4)}"
        try:
            os.rename(path, doomed)
        except OSError as error:
            _logger.warning("the old checkpoint %s cannot be removed: %s", path, error.strerror)
        else:
            # A later checkpoint may have this name, and is neither damaged nor spared.
            self._damaged.discard(path)
            self._spared.discard(path)
            shutil.rmtree(doomed, ignore_errors=True)

    def _next_number(self, step: int) -> int:
        """Move damaged checkpoints of a step aside; the number after that of the newest whole one."""
        for (at, number), path in self.published().items():
            if at == step and self._is_whole(path):
                return number + 1
            if at == step:
                self._set_aside(path)
        return 0

    def _read_whole(self, path: Path) -> str:
        """Verify every file of a checkpoint, and return its manifest as text."""
        manifest = read_manifest(path)
        require_step(path, manifest)
        verify_files(path, manifest.files)
        return (path / MANIFEST_NAME).read_text(encoding="utf-8")

    def _is_whole(self, path: Path) -> bool:
        try:
            self._read_whole(path)
        except (CheckpointDamaged, CheckpointMismatch):
            return False
        return True

    def _set_aside(self, path: Path) -> None:
        aside = self.path / f".damaged-{path.name}-{secrets.token_hex(4)}"
        try:
            os.rename(path, aside)
        except OSError as error:
            _logger.warning("the damaged checkpoint %s cannot be moved aside: %s", path, error.strerror)
            return
        self._damaged.discard(path)
        self._spared.discard(path)
        _logger.warning("the damaged checkpoint %s was moved to %s", path, aside)

    def _acquire(self, lock: int, insists: bool) -> bool:
        """Lock the folder and write our name into the lock; false where the file system knows no locks."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not insists:
                return False
            owner = os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process"
            raise MisusedJob(
                f"checkpoint folder {self.path} is in use by {owner}; end that job or give this one its own folder"
            ) from error
        except OSError as error:
            _logger.warning("checkpoint folder %s cannot be locked: %s", self.path, error.strerror)
            return False
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            os.fsync(lock)
        except OSError as error:
            # The name is for messages where the folder is found locked; the lock holds without it.
            _logger.warning("checkpoint folder %s: its owner cannot be noted there (%s)", self.path, error.strerror)
        return True


def _close_in_children(folder: CheckpointFolder) -> None:
    # A forked child, such as a loader's worker, shares the lock and would keep it after our death.
    reference = weakref.ref(folder)

    def close() -> None:
        forked = reference()
        if forked is not None:
            forked._unlock()

    os.register_at_fork(after_in_child=close)


def is_misuse(path: Path, error: OSError) -> bool:
    """Whether a folder can never be made or written to there; a full or broken disk is no misuse."""
    if isinstance(error, PermissionError):
        return not path.is_dir()
    return isinstance(error, FileNotFoundError | NotADirectoryError | FileExistsError) or error.errno in (
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EINVAL,
    )


def _explained(path: Path, error: OSError) -> str:
    if not path.parent.exists():
        return f"its parent {path.parent} does not exist; create it first"
    if not path.is_dir() and path.exists():
        return "is a file; give a folder"
    return f"cannot be written to ({error.strerror}); give a folder that can, on a disk with room"
