"""Captures, saves and restores the state of a job, and resumes it from a checkpoint.

`training_loop` decides when to save; `pollux.agent.checkpoint` writes files.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pollux.agent.checkpoint.manifest import created_at
from pollux.agent.checkpoint.reader import Saved, load
from pollux.agent.checkpoint.state import State
from pollux.agent.job.parts import JobParts
from pollux.agent.job.record import RunRecord
from pollux.agent.reporting.status import merge_ledger
from pollux.core.errors import MisusedJob, PolluxError
from pollux.core.notice import ahead_seconds
from pollux.wire.live.heartbeat import Activity

__all__ = ["JobPersistence"]

# A failed checkpoint is tried again after this time, where the next one would be later.
_SAVE_AGAIN_SECONDS = 60.0


class JobPersistence:
    """Captures, saves, restores and resumes the state of a job."""

    def __init__(self, parts: JobParts, record: RunRecord) -> None:
        self._parts = parts
        self._record = record
        self._progress = parts.progress
        self._preparing: threading.Thread | None = None
        self._unconfirmed: tuple[int, float, float] | None = None
        self._resumed_at: tuple[int, int] | None = None
        if parts.checkpointer is not None:
            parts.checkpointer.measured = self._save_took
            parts.checkpointer.failed = self._save_failed
            parts.requests.save_ahead(ahead_seconds(parts.environment.notice, None))

    # Saving

    def checkpoint(self, *, wait: bool) -> None:
        """Save a checkpoint now; with several replicas, call it on all of them at the same step."""
        parts, checkpointer = self._parts, self._parts.checkpointer
        if checkpointer is None:
            raise MisusedJob("there is no checkpoint folder: pass checkpoint_dir= to pollux.init")
        if wait and parts.member is not None:
            # The replica that held the folder before may release it only after this one has reported its move.
            parts.member.end_pause()
        with self._announced():
            self.await_buffers()
            self.confirm_save()
            state = self.capture()
            step = self._progress.steps
            begun = checkpointer.save(
                step,
                state,
                parts.state.signature(),
                wait=wait,
                finite=parts.state.parameter_names(),
            )
            if begun:
                self._unconfirmed = step, self._progress.progress, checkpointer.last_pause_seconds
            if wait:
                self.confirm_save()
            if wait and checkpointer.last_error is not None:
                raise PolluxError(
                    f"the checkpoint of step {step} was not written to {checkpointer.where}: "
                    f"{checkpointer.last_error}; free the disk or repair what it names; older checkpoints are untouched"
                ) from checkpointer.last_error

    @contextlib.contextmanager
    def _announced(self) -> Iterator[None]:
        """Announce in the heartbeats that a checkpoint is saved, which may take long without processor time."""
        member = self._parts.member
        if member is None or member.beat.busy not in (Activity.TRAINING, Activity.PASS_END):
            yield
            return
        before, member.beat.busy = member.beat.busy, Activity.CHECKPOINT
        try:
            yield
        finally:
            if member.beat.busy == Activity.CHECKPOINT:
                member.beat.busy = before

    def confirm_save(self) -> None:
        """Enter the last save or its failure into the receipt, once the outcome is known."""
        checkpointer = self._parts.checkpointer
        if self._unconfirmed is None or checkpointer is None or not checkpointer.finish_local_save():
            return
        (step, progress, pause), self._unconfirmed = self._unconfirmed, None
        saved = checkpointer.last_saved
        if checkpointer.last_error is None and saved is not None and saved.manifest.step == step:
            text = f"saved to {checkpointer.where}"
            self._parts.receipt.event("checkpointed", step, progress, text, pause=pause)
            self._record.reports.note_save(time.time())
        elif checkpointer.last_error is not None:
            text = f"the checkpoint failed: {checkpointer.last_error}"
            self._parts.receipt.event("not-saved", step, progress, text, pause=pause)

    def _save_took(self, seconds: float) -> None:
        """Save more often from now on, if a checkpoint takes longer than the notice before a node is taken back.

        Only replica 0 requests checkpoints by the clock, so the others need not do this.
        """
        checkpointer = self._parts.checkpointer
        self._record.reports.checkpoint_seconds, self._record.reports.checkpoint_error = seconds, ""
        pause = 0.0 if checkpointer is None else checkpointer.last_pause_seconds
        self._parts.requests.save_ahead(ahead_seconds(self._parts.environment.notice, seconds, pause))

    def _save_failed(self, error: Exception) -> None:
        """Report the failure, and save again soon. The thread that writes checkpoints calls it."""
        self._record.reports.checkpoint_error = str(error) or type(error).__name__
        self._parts.requests.save_again(_SAVE_AGAIN_SECONDS)

    def prepare_buffers(self) -> None:
        """Allocate memory for checkpoints in a thread; called after a step, when the optimiser has its state."""
        checkpointer = self._parts.checkpointer
        if self._preparing is None and checkpointer is not None:
            tensors = self._parts.state.tensors()
            self._preparing = threading.Thread(
                target=checkpointer.prepare, args=(tensors,), name="pollux-buffers", daemon=True
            )
            self._preparing.start()

    def await_buffers(self) -> None:
        """Wait until the memory for checkpoints is allocated."""
        if self._preparing is not None:
            self._preparing.join()

    # Everything in one state

    def capture(self) -> State:
        """The whole state, equal on all replicas but for shards; a collective."""
        self.merge_shares()
        return self.own_state(self._parts.state.rng_texts())

    def merge_shares(self) -> None:
        """Merge the state that is spread over replicas: running buffers, and the ledger of samples; a collective."""
        parts = self._parts
        if not parts.engine.counts_batchnorm:
            parts.replicas.broadcast_buffers(parts.engine.inner)
        merge_ledger(parts.loader, parts.replicas)

    def own_state(self, rng_texts: Sequence[str]) -> State:
        """This replica's state; once the ledger is merged, that is the whole state."""
        parts = self._parts
        state = parts.state.own(rng_texts)
        data = parts.loader.state_dict()
        if data["order"] is not None:
            state.tensors["data.order"] = data["order"]
        state.objects["data.dataset"] = data["dataset_state"]
        state.values["data"] = {key: value for key, value in data.items() if key not in ("order", "dataset_state")}
        state.values["progress"] = self._progress.state_dict()
        state.values["schedule"] = 0 if parts.schedule is None else parts.schedule.taken
        state.values["adaptation"] = parts.adaptation.state_dict()
        state.values["receipt"] = parts.receipt.state_dict()
        state.values["seconds"] = self._record.seconds
        state.values["num_replicas"] = parts.replicas.num_replicas
        return state

    def restore(self, state: State, in_place: bool) -> None:
        """Restore model, optimiser, objects, data and progress; keep what was learned of the machine."""
        parts = self._parts
        parts.state.restore(state, tensors_in_place=in_place)
        data: dict[str, Any] = dict(state.values["data"])
        data["order"] = state.tensors.get("data.order")
        data["dataset_state"] = state.objects["data.dataset"]
        parts.loader.rewind()
        parts.loader.load_state_dict(data)
        self._progress.load_state_dict(state.values["progress"])
        if parts.schedule is not None:
            parts.schedule.taken = int(state.values["schedule"])

    def restore_record(self, values: Mapping[str, Any]) -> None:
        """Restore the receipt and the training time."""
        self._parts.receipt.load_state_dict(values["receipt"])
        self._record.seconds_before = float(values["seconds"])

    # Going on

    @property
    def has_nothing_new(self) -> bool:
        """Whether the job has not advanced since it was resumed."""
        return self._resumed_at == (self._progress.steps, self._progress.epoch)

    def forget_resume(self) -> None:
        """Forget where the job was resumed, since its state now comes from other replicas."""
        self._resumed_at = None

    def resume(self, saved: Saved) -> None:
        """Resume from a checkpoint, at any number of replicas."""
        parts, record = self._parts, self._record
        # Before anything is read into the model, so that a refusal leaves it unchanged.
        parts.loader.check_state(dict(saved.manifest.values["data"]))  # type: ignore[arg-type]
        parts.state.check_schedule(saved.manifest.values)
        tensors = parts.state.templates(saved)
        state = load(saved, tensors, signature=parts.state.signature())
        state.tensors = {**tensors, **state.tensors}
        self.restore(state, in_place=True)
        values: Mapping[str, Any] = state.values
        parts.adaptation.load_state_dict(values["adaptation"], self._progress.steps)
        if parts.engine.meter is not None:
            parts.engine.meter.refresh()
        parts.state.restore_rng(values, self._progress.steps)
        self.restore_record(values)
        self._resumed_at = self._progress.steps, self._progress.epoch
        record.reports.note_save(created_at(saved.manifest.created))
        before, after = int(values["num_replicas"]), parts.replicas.num_replicas
        if before != after:
            record.event("resized", f"from {before} to {after} replicas", before=before, after=after)
        record.event("resumed", f"from {saved.path.name}")
