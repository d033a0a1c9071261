"""Saves the checkpoints of a training job in the background, and finds the newest whole one.

A checkpoint is written under a temporary name, verified, then renamed: `step-0000001234/`, and `step-0000001234-1/`,
`-2/` ... where a step is saved again. `folder` has names and removal, `host_buffers` copies and files, `manifest` the
manifest; `reader` loads. `job` decides when to save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pollux.agent.checkpoint.agreement import Outcome, attempt
from pollux.agent.checkpoint.folder import CheckpointFolder, flush, last_created
from pollux.agent.checkpoint.handover import FolderHold
from pollux.agent.checkpoint.host_buffers import Abandoned, HostBuffers, write_files
from pollux.agent.checkpoint.lease import Holder
from pollux.agent.checkpoint.manifest import (
    FORMAT,
    JSON,
    FileDigest,
    Manifest,
    decode,
    encode,
    frozen_json,
    verify_files,
)
from pollux.agent.checkpoint.object_store import ObjectStoreFolder, fetch, last_stored, put
from pollux.agent.checkpoint.reader import Saved
from pollux.agent.checkpoint.save_request import SaveRequest, check_pickling, pickled_objects
from pollux.agent.checkpoint.state import State
from pollux.agent.distributed.byte_collectives import broadcast_bytes, gather_bytes
from pollux.core.errors import CheckpointDamaged, InvalidInput, MisusedJob, PolluxError
from pollux.core.version import __version__
from pollux.storage.object_store import ObjectStore

__all__ = ["Checkpointer"]

_logger = logging.getLogger("pollux")
_T = TypeVar("_T")
_LOOK_SECONDS = 5.0
# After these pauses an awaited checkpoint is tried again: a disk that was full may have room.
_RETRY_SECONDS = (0.5, 2.0)


class Checkpointer:
    """Keeps the newest checkpoints of one job: in `folder`, or in a store with copies in a folder of this machine.

    All replicas must see the folder or reach the store. Only one process may write there: replica 0 locks the folder
    until `close` or its death, and has a lease on a store in the name of `holder`. With `opens` false that waits until
    `rebind`. With `sharded` false the state is the same on all replicas, replica 0 alone writes it and no collective
    runs. With `sharded` true every replica writes its shards, and `save` is called on all of them. `group` must carry
    CPU tensors (gloo), and nothing else may use it while a sharded save is in flight; `None` is for one replica. The
    constructor and `latest` are collectives where `num_replicas` > 1. The writing thread calls `measured` with the
    seconds from the request of a checkpoint until it was whole, and `failed` with the error where it was not written.
    """

    def __init__(
        self,
        folder: Path | ObjectStore,
        *,
        keep: int = 2,
        replica: int = 0,
        num_replicas: int = 1,
        group: dist.ProcessGroup | None = None,
        sharded: bool = False,
        opens: bool = True,
        holder: Holder | None = None,
    ) -> None:
        if keep < 1:
            raise InvalidInput(f"keep is {keep}; at least 1 checkpoint must stay")
        self._store = folder if isinstance(folder, ObjectStore) else None
        self.folder = folder.cache if isinstance(folder, ObjectStore) else Path(folder).absolute()
        self.where = folder.address if isinstance(folder, ObjectStore) else str(self.folder)
        self.last_saved: Saved | None = None
        self.last_error: Exception | None = None
        self.last_pause_seconds = 0.0
        self.measured: Callable[[float], None] = lambda seconds: None
        self.failed: Callable[[Exception], None] = lambda error: None
        self._keep = keep
        self._replica = replica
        self._num_replicas = num_replicas
        self._group = group
        self._sharded = sharded and num_replicas > 1
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._abandoned = threading.Event()
        self._holder = holder or Holder()
        self._hold = FolderHold(self.folder, self._store, self._holder, wanted=replica == 0)
        if opens:
            self._on_first_replica(self._hold.open)

    @property
    def writes(self) -> bool:
        """Whether this replica writes files: with shards all replicas do, else replica 0."""
        return self._sharded or self._replica == 0

    @property
    def busy(self) -> bool:
        """Whether a save is in flight here."""
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate host memory for these tensors, so that the first save is as fast as later ones."""
        if self.writes:
            self.wait()
            self._buffers.prepare(tensors)

    def save(
        self,
        step: int,
        state: State,
        signature: Mapping[str, JSON],
        *,
        wait: bool = False,
        finite: Collection[str] | None = None,
    ) -> bool:
        """Copy the state and write the copy in the background; the caller may change everything when this returns.

        First it waits for an earlier save in flight, and with `wait` for this one too. It does not wait for an earlier
        save that is being sent to a store: with `wait` that save is abandoned; else it goes on, and this call returns
        false. Tensors have flat names such as `model.layer.weight`. Where a tensor named in `finite` (`None`: all named
        `model.*`) has a value that is NaN or infinite, nothing is published. An object that cannot be pickled raises
        `InvalidInput` at once, on every replica that has it. A write that fails is logged and kept in `last_error`;
        with `wait` it is tried twice more, within 3 s. The older checkpoints stay. A whole checkpoint of the same step
        is replaced once the new one is whole. Replicas that do not write only check the objects.
        """
        began = time.perf_counter()
        if not self.writes:
            # If replica 0 raises an error, the other replicas must not wait for it.
            check_pickling(state.objects)
            return True
        if not self._end_save_before(step, wait):
            return False
        request = self._request(step, state, signature, finite, wait)
        refused = request.staged.problem if isinstance(request.staged.problem, InvalidInput) else None
        if refused is None or self._sharded:
            self._start(request)
        if refused is not None:
            # With shards the other replicas learn of it in the exchange that has just begun.
            raise InvalidInput(str(refused)) from refused
        if wait:
            self.wait()
        self.last_pause_seconds = time.perf_counter() - began
        return True

    def _end_save_before(self, step: int, wait: bool) -> bool:
        """Wait for the save in flight, or abandon one that is being sent to a store; whether `step` may be saved."""
        if self._is_sending and not wait:
            # A store may be slow, or not answer for a while: training does not wait for it.
            _logger.info("no checkpoint of step %d: the one before is still being sent to %s", step, self.where)
            return False
        if self._is_sending:
            # The new save has the newer state, and there may be little time.
            self._abandoned.set()
        self.wait()
        self._abandoned.clear()
        return True

    @property
    def _is_sending(self) -> bool:
        """Whether this replica is sending a save to a store; the other replicas do not know."""
        return self._store is not None and not self._sharded and self.busy

    def finish_local_save(self) -> bool:
        """Wait for a save in flight, unless it is being sent to a store; returns whether none is left."""
        if not self._is_sending:
            self.wait()
        return not self._is_sending

    def wait(self) -> None:
        """Wait for a save in flight; `last_saved` and `last_error` say how it ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def unbind(self) -> None:
        """Release the group. A save in flight goes on: only a sharded one needs other replicas."""
        self._group = None

    def rebind(self, replica: int, num_replicas: int, group: dist.ProcessGroup | None) -> None:
        """Continue as that replica of a new group; not for sharded state. The new replica 0 is to hold the folder.

        It acquires the folder when it first writes, since the old replica 0 may have to finish a save.
        """
        self._replica, self._num_replicas, self._group = replica, num_replicas, group
        self._hold.wanted = replica == 0
        if replica != 0 and self._hold.folder is not None:
            self.wait()
            self._hold.release()
        if replica == 0 and self._store is not None and self._hold.folder is None:
            # Now and not at the next save: until then another job would find the store free.
            self._hold.acquire_in_background()

    def latest(self) -> Saved | None:
        """The newest whole checkpoint, or `None` where there is none; waits for a save in flight.

        Replica 0 verifies every checksum, and the others rely on it. Damaged checkpoints are skipped, with one warning
        each. All replicas raise `CheckpointDamaged` where none is whole, and `CheckpointMismatch` where the newest has
        another format.
        """
        self.wait()
        if self._store is not None:
            return self._latest_stored(self._store)
        found = self._on_first_replica(lambda: self._folder_here().newest_whole())
        return self._saved(*found) if found else None

    def _saved(self, name: str, manifest: str) -> Saved:
        return Saved(self.folder / name, decode(manifest.encode()))

    def _latest_stored(self, store: ObjectStore) -> Saved | None:
        """Replica 0 finds it, and every machine copies it to its disk; both may outlast a collective's timeout."""

        def find() -> list[str] | None:
            if self._replica != 0:
                return None
            disk = self._folder_here()
            assert isinstance(disk, ObjectStoreFolder)
            found = disk.newest_whole()
            return None if found is None else [*found, disk.key_of(found[0])]

        found = self._patiently(find)[0]
        if found is None:
            return None
        name, manifest, key = found
        self._patiently(lambda: str(fetch(store, name, key, manifest.encode(), self._holder.launch)))
        return self._saved(name, manifest)

    def find_created(self, tell: Callable[[float | None], None]) -> None:
        """Call `tell` with the time of the newest checkpoint, in seconds since 1970; None where it cannot be found out.

        For a store that happens later, in another thread: training does not wait for the store.
        """
        store = self._store
        if store is None:
            tell(last_created(self.folder))
        else:
            threading.Thread(target=lambda: tell(last_stored(store)), name="pollux-age", daemon=True).start()

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of later steps: after a roll-back no start may resume from them.

        Where there is no whole one at or before the step, the next later one stays until the next save.
        """
        self.wait()
        if self._hold.folder is not None:
            self._hold.folder.drop_after(step)

    def close(self, most_seconds: float | None = None) -> None:
        """Wait for a save in flight and release the folder; nothing can be saved afterwards.

        A save that is being sent to a store is abandoned after `most_seconds`; None: never.
        """
        if self._is_sending and most_seconds is not None and self._thread is not None:
            self._thread.join(most_seconds)
            self._abandoned.set()
        self.wait()
        self._hold.close()

    def _folder_here(self) -> CheckpointFolder:
        if self._hold.folder is None:
            raise MisusedJob(f"replica {self._replica} does not hold {self.where}; only replica 0 does")
        return self._hold.folder

    def _on_first_replica(self, decide: Callable[[], _T]) -> _T:
        """Call `decide` on replica 0; all replicas return its value or raise its error."""
        if self._num_replicas == 1:
            return decide()
        outcome: Outcome[_T] = attempt(decide) if self._replica == 0 else Outcome()
        first = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        return Outcome[_T].decode(broadcast_bytes(outcome.encode(), first, self._group)).get()

    def _request(
        self,
        step: int,
        state: State,
        signature: Mapping[str, JSON],
        finite: Collection[str] | None,
        insists: bool,
    ) -> SaveRequest:
        began = time.monotonic()
        tensors, twice = state.tensors, ", ".join(sorted(state.tensors.keys() & state.objects.keys()))
        if step < 0 or twice:
            raise InvalidInput(
                f"step {step} must not be negative, and no name both tensor and object: {twice or 'none'}"
            )
        manifest = Manifest(
            format=FORMAT,
            pollux=__version__,
            torch=str(torch.__version__),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            step=step,
            num_replicas=self._num_replicas,
            values=frozen_json("value", state.values),
            signature=frozen_json("signature", signature),
            tied={},
            files={},
        )
        staged = attempt(lambda: self._buffers.stage(tensors, pickled_objects(state.objects)))
        if finite is None:
            finite = [name for name in tensors if name.startswith("model.")]
        return SaveRequest(manifest, staged, frozenset(finite), self._abandoned, began, insists)

    def _start(self, request: SaveRequest) -> None:
        # A replica that hangs must not keep this process from exiting; without others the process finishes its write.
        name = f"checkpoint-{request.manifest.step}"
        self._thread = threading.Thread(target=self._write, args=(request,), name=name, daemon=self._sharded)
        self._thread.start()

    def _write(self, request: SaveRequest) -> None:
        """Write the checkpoint, in a thread; all writing replicas take part in all exchanges, even where one fails."""
        pauses = _RETRY_SECONDS if request.insists else ()
        for pause in pauses:
            if self._try_to_write(request) or self._abandoned.wait(pause):
                return
        self._try_to_write(request)

    def _try_to_write(self, request: SaveRequest) -> bool:
        """Write the checkpoint, or log why that failed; returns whether to try no more."""
        step, may_pass = request.manifest.step, False
        beside, target = "", ""
        try:
            beside, target = self._together(lambda: self._begin(request))[0]
            self.last_saved = self._saved(*self._write_beside(request, self.folder / beside, target))
            self.last_error, target = None, ""
            self.measured(time.monotonic() - request.began)
        except Abandoned:
            _logger.info("the checkpoint of step %d was abandoned", step)
        except Exception as error:
            # The traceback would keep the frames alive, and with them the state.
            self.last_error = error.with_traceback(None)
            _logger.warning(
                "the checkpoint of step %d was not written to %s: %s; training goes on, older checkpoints stay",
                step,
                self.where,
                str(error) or type(error).__name__,
            )
            self.failed(self.last_error)
            may_pass = isinstance(error, OSError | RuntimeError | CheckpointDamaged)
        self._clear(beside, target)
        return not may_pass

    def _clear(self, beside: str, target: str) -> None:
        """Remove what an unpublished save has left: its folder, and its files in the store."""
        if beside and (self._hold.folder is not None or self._store is not None):
            shutil.rmtree(self.folder / beside, ignore_errors=True)
        if target and self._hold.folder is not None:
            with contextlib.suppress(PolluxError):
                self._hold.folder.withdraw(target)

    def _begin(self, request: SaveRequest) -> tuple[str, str]:
        """Make the folder to write to, on replica 0; returns its name, and the published name where that is known."""
        request.require_finite()
        if self._replica == 0:
            self._hold.acquire()
        return self._hold.folder.begin(request.manifest.step) if self._hold.folder is not None else ("", "")

    def _write_beside(self, request: SaveRequest, beside: Path, target: str) -> tuple[str, str]:
        """Write the files and publish them; the name of the checkpoint, and its manifest as text."""
        parts = self._together(lambda: self._write_part(request, beside, target))
        files = {name: FileDigest(**digest) for part in parts for name, digest in part.items()}
        return self._together(lambda: self._publish(request, beside, target, files))[0]

    def _write_part(self, request: SaveRequest, beside: Path, target: str) -> dict[str, Any]:
        if self._store is not None:
            # Replica 0 has made the folder on its own machine only.
            beside.mkdir(exist_ok=True)
        group = (self._group or dist.group.WORLD) if self._sharded else None
        digests = write_files(beside, request.staged.get(), abandoned=request.abandoned, group=group)
        for name in digests:
            flush(beside / name)
        request.proceed()
        verify_files(beside, digests, from_disk=True)
        if self._store is not None:
            put(self._store, beside, digests, target, request.proceed)
        return {name: asdict(digest) for name, digest in digests.items()}

    def _publish(
        self, request: SaveRequest, beside: Path, target: str, files: Mapping[str, FileDigest]
    ) -> tuple[str, str]:
        request.proceed()
        if self._hold.folder is None:
            return "", ""
        manifest = dataclasses.replace(request.manifest, files=files, tied=request.staged.get().tied)
        name = self._hold.folder.publish(beside, manifest, target)
        self._hold.folder.retain(name, self._keep)
        return name, encode(manifest).decode()

    def _together(self, action: Callable[[], _T]) -> list[_T]:
        """Call `action` on every replica that writes; the values of all, or an error on all where one failed."""
        if not self._sharded:
            return [action()]
        return self._on_all(action)

    def _patiently(self, action: Callable[[], _T]) -> list[_T]:
        """As `_on_all`, for an action that may take longer than a collective: replicas ask until all are done."""
        if self._num_replicas == 1:
            return [action()]
        outcomes: list[Outcome[_T]] = []
        thread = threading.Thread(target=lambda: outcomes.append(attempt(action)), name="pollux-fetch", daemon=True)
        thread.start()
        while True:
            thread.join(_LOOK_SECONDS)
            answers = gather_bytes(outcomes[0].encode() if outcomes else b"", self._num_replicas, self._group)
            if all(answers):
                outcomes[0].get()
                return [Outcome[_T].decode(answer).get() for answer in answers]

    def _on_all(self, action: Callable[[], _T]) -> list[_T]:
        """Call `action` on every replica; the values of all, or an error on all where one failed."""
        outcome = attempt(action)
        if self._num_replicas == 1:
            return [outcome.get()]
        answers = gather_bytes(outcome.encode(), self._num_replicas, self._group)
        outcome.get()
        return [Outcome[_T].decode(answer).get() for answer in answers]
