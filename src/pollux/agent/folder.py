"""The folder that holds a job's checkpoints: its lock, its names, and what is removed when.

Every change on disk is made so that a death at any moment leaves only whole checkpoints under their names. What is
inside a checkpoint is the matter of `staging` and `manifest`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
import warnings
import weakref
from pathlib import Path

from pollux.agent.manifest import MANIFEST_NAME, decode, read_manifest, verify_files
from pollux.core.errors import CheckpointDamaged, CheckpointMismatch, InvalidInput, MisusedJob, PolluxError

__all__ = ["CheckpointFolder", "flush", "step_name"]

_logger = logging.getLogger("pollux")
_STEP_NAME = re.compile(r"step-(\d{10,})")


def step_name(step: int) -> str:
    """Name of the folder of a step's checkpoint; with ten digits, so that names sort as steps do."""
    return f"step-{step:010d}"


def flush(path: Path) -> None:
    """Force a file's content, or a folder's entries, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class CheckpointFolder:
    """The folder on disk, held by a lock that death releases; only replica 0 of one job has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._damaged: set[Path] = set()
        try:
            path.mkdir(exist_ok=True)
            lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InvalidInput(f"checkpoint folder {path}: {_explained(path, error)}") from error
        self._lock: int | None = lock
        try:
            self._exclusive = self._acquire(lock)
        except PolluxError:
            self.release()
            raise
        _close_in_children(self)

    def release(self) -> None:
        """Let others write to the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def steps(self) -> dict[int, Path]:
        """The folders of published checkpoints by step, the newest first; whole or not."""
        found = [(_STEP_NAME.fullmatch(path.name), path) for path in self.path.iterdir() if path.is_dir()]
        return dict(sorted(((int(match[1]), path) for match, path in found if match), reverse=True))

    def newest_whole(self) -> str:
        """The manifest of the newest whole checkpoint as text, empty where there is none at all."""
        reasons = []
        for step, path in self.steps().items():
            try:
                self._require_whole(step, path)
                return (path / MANIFEST_NAME).read_text(encoding="utf-8")
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
        return ""

    def has_whole(self, step: int) -> bool:
        """Whether this step is published and whole; a damaged one is moved aside."""
        path = self.path / step_name(step)
        if not path.exists():
            return False
        try:
            self._require_whole(step, path)
        except (CheckpointDamaged, CheckpointMismatch):
            self._set_aside(path)
            return False
        return True

    def begin(self, step: int) -> str:
        """Make a new folder to write to, after what dead writers left was removed; returns its name."""
        if self._lock is None:
            raise MisusedJob(f"checkpoint folder {self.path} was released by close(); make a new Checkpointer")
        if self._exclusive:
            for stale in self.path.glob(".tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
        beside = self.path / f".tmp-{step}-{secrets.token_hex(4)}"
        beside.mkdir()
        return beside.name

    def publish(self, beside: Path, step: int, manifest: bytes) -> None:
        """Write the manifest, last and verified, and give the folder its name; all of it flushed to disk."""
        path = beside / MANIFEST_NAME
        path.write_bytes(manifest)
        flush(path)
        decode(path.read_bytes())
        flush(beside)
        os.rename(beside, self.path / step_name(step))
        flush(self.path)

    def retain(self, published: int, keep: int) -> None:
        """Remove all but `keep` checkpoints, the published one among them; known damaged ones are moved aside."""
        for path in self._damaged & set(self.steps().values()):
            self._set_aside(path)
        others = [path for step, path in self.steps().items() if step != published]
        for path in others[keep - 1 :]:
            self.discard(path)

    def discard(self, path: Path) -> None:
        """Remove a checkpoint; it loses its name first, so that no half of one is ever found."""
        doomed = self.path / f".tmp-removed-{secrets.token_hex(4)}"
        try:
            os.rename(path, doomed)
        except OSError as error:
            _logger.warning("the old checkpoint %s cannot be removed: %s", path, error.strerror)
        else:
            shutil.rmtree(doomed, ignore_errors=True)

    def _require_whole(self, step: int, path: Path) -> None:
        manifest = read_manifest(path)
        if manifest.step != step:
            raise CheckpointDamaged(f"{path}: its manifest is of step {manifest.step}")
        verify_files(path, manifest.files)

    def _set_aside(self, path: Path) -> None:
        aside = self.path / f".damaged-{path.name}-{secrets.token_hex(4)}"
        os.rename(path, aside)
        self._damaged.discard(path)
        _logger.warning("the damaged checkpoint %s was moved to %s", path, aside)

    def _acquire(self, lock: int) -> bool:
        """Lock the folder and leave our name in it; false where the file system knows no locks."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
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
            raise InvalidInput(f"checkpoint folder {self.path}: {_explained(self.path, error)}") from error
        return True


def _close_in_children(folder: CheckpointFolder) -> None:
    # A forked child, such as a loader's worker, shares the lock and would keep it beyond our death.
    reference = weakref.ref(folder)

    def close() -> None:
        forked = reference()
        if forked is not None:
            forked.release()

    os.register_at_fork(after_in_child=close)


def _explained(path: Path, error: OSError) -> str:
    if not path.parent.exists():
        return f"its parent {path.parent} does not exist; create it first"
    if not path.is_dir() and path.exists():
        return "is a file; give a folder"
    return f"cannot be written to ({error.strerror}); give a folder that can, on a disk with room"
