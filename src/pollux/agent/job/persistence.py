"""Saving a job and going on from what was saved: everything in one state, in checkpoints and in snapshots.

When to save is decided in `job`; how files are written is in `checkpointer`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pollux.agent.checkpoint.checkpointer import Saved, load
from pollux.agent.checkpoint.manifest import created_at
from pollux.agent.checkpoint.oom_notes import TrialNotes
from pollux.agent.checkpoint.training_state import State, from_loaded
from pollux.agent.job.status import JobStatus, Parts
from pollux.agent.step.oom import is_out_of_memory
from pollux.core.errors import MisusedJob, PolluxError
from pollux.core.notice import ahead_seconds
from pollux.wire.live.heartbeat import Activity

__all__ = ["SavedJob"]

_log = logging.getLogger("pollux")


class SavedJob(JobStatus):
    """A job that can be saved and resumed; its loop is in `Job`."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._began = time.monotonic()
        self._seconds_before = 0.0
        self._preparing: threading.Thread | None = None
        self._saving: tuple[int, float, float] | None = None
        self._resumed_at: tuple[int, int] | None = None
        self._notes: TrialNotes | None = None
        if parts.checkpointer is not None:
            parts.checkpointer.measured = self._measured
            parts.watch.save_ahead(ahead_seconds(parts.environment.notice, None))
            kind, adapts = parts.adaptation.memory.gpu_type, parts.adaptation.adapts
            # Exactly the batch that was asked for, unless it is certain that memory does not hold it.
            self._notes = TrialNotes(parts.checkpointer.folder, kind, counts_deaths=adapts)

    @property
    def _seconds(self) -> float:
        """Time spent training, that before a restart included."""
        return self._seconds_before + time.monotonic() - self._began

    def checkpoint(self, *, wait: bool = True) -> None:
        """Save everything now; with several replicas, call it on all of them at the same step."""
        checkpointer = self._parts.checkpointer
        if checkpointer is None:
            raise MisusedJob("there is no checkpoint folder: pass checkpoint_dir= to pollux.init")
        if wait and self._parts.live is not None:
            # Who held the folder before may let it go only when this replica goes on.
            self._parts.live.end_pause()
        with self._announced():
            self._await_buffers()
            self._note_saved()
            state = self._capture()
            begun = checkpointer.save(
                self._progress.steps,
                state.tensors,
                state.objects,
                state.values,
                self._signature(),
                wait=wait,
                finite=self._parts.state.parameter_names(),
            )
            if begun:
                self._saving = self.step, self.progress, checkpointer.last_pause_seconds
            if wait:
                self._note_saved()
            if wait and checkpointer.last_error is not None:
                raise PolluxError(
                    f"the checkpoint of step {self.step} was not written to {checkpointer.where}: "
                    f"{checkpointer.last_error}; free the disk or repair what it names; older checkpoints are untouched"
                ) from checkpointer.last_error

    @contextlib.contextmanager
    def _announced(self) -> Iterator[None]:
        """Tell whoever listens for signs of life that something is saved: that may take long, and uses no processor."""
        live = self._parts.live
        if live is None or live.beat.busy not in (Activity.TRAINING, Activity.PASS_END):
            yield
            return
        before, live.beat.busy = live.beat.busy, Activity.CHECKPOINT
        try:
            yield
        finally:
            if live.beat.busy == Activity.CHECKPOINT:
                live.beat.busy = before

    def _note_saved(self) -> None:
        """Enter the last save into the receipt once it is known to have succeeded."""
        checkpointer = self._parts.checkpointer
        if self._saving is None or checkpointer is None:
            return
        if not checkpointer.settle():
            return
        step, progress, pause = self._saving
        self._saving = None
        saved = checkpointer.last_saved
        if checkpointer.last_error is None and saved is not None and saved.step == step:
            self._receipt.event("checkpointed", step, progress, f"saved to {checkpointer.where}", pause=pause)
            if self._parts.teller is not None:
                self._parts.teller.saved(time.time())

    def _measured(self, seconds: float) -> None:
        """A checkpoint took so long: where that is more than the notice of a node's end, the next ones come earlier.

        Only the clock of the first replica requests them, so that the others need not know.
        """
        checkpointer, teller = self._parts.checkpointer, self._parts.teller
        if teller is not None:
            teller.checkpoint_seconds = seconds
        pause = 0.0 if checkpointer is None else checkpointer.last_pause_seconds
        self._parts.watch.save_ahead(ahead_seconds(self._parts.environment.notice, seconds, pause))

    def _prepare_buffers(self) -> None:
        """After the first step, when the optimiser has its state: memory for checkpoints, off the training thread."""
        checkpointer = self._parts.checkpointer
        if self._preparing is not None or checkpointer is None:
            return
        tensors = self._parts.state.tensors()
        self._preparing = threading.Thread(
            target=checkpointer.prepare, args=(tensors,), name="pollux-buffers", daemon=True
        )
        self._preparing.start()

    def _await_buffers(self) -> None:
        if self._preparing is not None:
            self._preparing.join()

    def _signature(self) -> dict[str, Any]:
        return self._parts.state.signature()

    def _capture(self) -> State:
        """Everything; the same on all replicas but for shards. A collective."""
        if not self._engine.counts_batchnorm:
            self._replicas.broadcast_buffers(self._engine.inner)
        self._merge_ledger()
        return self._own_state(self._parts.state.rng_texts())

    def _own_state(self, rng_texts: Sequence[str]) -> State:
        """Everything that this replica holds, which with a merged ledger is everything."""
        state = self._parts.state.own(rng_texts)
        data = self._loader.state_dict()
        if data["order"] is not None:
            state.tensors["data.order"] = data["order"]
        state.objects["data.dataset"] = data["dataset_state"]
        state.values["data"] = {key: value for key, value in data.items() if key not in ("order", "dataset_state")}
        state.values["progress"] = self._progress.state_dict()
        state.values["schedule"] = 0 if self._parts.schedule is None else self._parts.schedule.taken
        state.values["adaptation"] = self._adaptation.state_dict()
        state.values["receipt"] = self._receipt.state_dict()
        state.values["seconds"] = self._seconds
        state.values["num_replicas"] = self.num_replicas
        return state

    def _restore(self, state: State, in_place: bool) -> None:
        """Model, optimiser, objects, data and progress as they were; what was learned of the machine stays."""
        self._parts.state.restore(state, tensors_in_place=in_place)
        data: dict[str, Any] = dict(state.values["data"])
        data["order"] = state.tensors.get("data.order")
        data["dataset_state"] = state.objects["data.dataset"]
        self._loader.rewind()
        self._loader.load_state_dict(data)
        self._progress.load_state_dict(state.values["progress"])
        if self._parts.schedule is not None:
            self._parts.schedule.taken = int(state.values["schedule"])

    def resume(self, saved: Saved) -> None:
        """Go on from a checkpoint, at whatever number of replicas there are now; called by `init`."""
        # Before anything is read into the model: data of another shape is refused, and the model stays as it was.
        self._loader.check_state(dict(saved.values["data"]))  # type: ignore[arg-type]
        self._parts.state.check_schedule(saved.values)
        tensors = self._parts.state.templates(saved)
        loaded = load(saved, tensors, signature=self._signature())
        state = from_loaded(loaded, tensors)
        self._restore(state, in_place=True)
        values: Mapping[str, Any] = state.values
        self._adaptation.load_state_dict(values["adaptation"], self.step)
        if self._engine.meter is not None:
            self._engine.meter.refresh()
        self._receipt.load_state_dict(values["receipt"])
        self._parts.state.restore_rng(values, self.step)
        self._seconds_before = float(values["seconds"])
        self._resumed_at = self.step, self.epoch
        if self._parts.teller is not None:
            self._parts.teller.saved(created_at(saved.created))
        before = int(values["num_replicas"])
        if before != self.num_replicas:
            text = f"from {before} to {self.num_replicas} replicas"
            self._receipt.event("resized", self.step, self.progress, text, before=before, after=self.num_replicas)
        self._receipt.event("resumed", self.step, self.progress, f"from {saved.path.name}")

    def heed_deaths(self) -> None:
        """Stay below the local batch that ended an earlier start; called by `init`. A collective."""
        lesson = None if self._notes is None else self._notes.lesson(writes=self.is_first)
        everyones = self._replicas.gather([0.0, 0.0] if lesson is None else [float(number) for number in lesson])
        known = sorted((int(largest), int(local)) for local, largest in everyones.tolist() if largest > 0)
        if known and self._adaptation.limit(known[0][0]):
            largest, local = known[0]
            text = f"a local batch of {local} ended an earlier start for want of memory: none above {largest} is tried"
            _log.warning("%s", text)
            self._receipt.event("out-of-memory", self.step, self.progress, text, local_batch=local, smaller=largest)

    def _end_trial(self) -> None:
        if self._notes is not None:
            self._notes.end(writes=self.is_first)

    def _note_death(self) -> None:
        """Where the script ends for want of memory in a trial, the next start is to know; other ends blame nothing."""
        error = sys.exception() or getattr(sys, "last_value", None)
        if self._notes is not None and error is not None and is_out_of_memory(error):
            self._notes.ran_out()
        self._end_trial()
