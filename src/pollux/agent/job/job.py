"""The one object that a training script holds: epochs, batches, backward, and what they say about themselves.

It ties the parts together at step boundaries; each part does its own work elsewhere.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from pollux.agent.adaptation.adaptation import RoundReport
from pollux.agent.adaptation.batch_tuner import BatchChange
from pollux.agent.checkpoint.training_state import State
from pollux.agent.data.step_shape import MicroBatch
from pollux.agent.distributed.sync_batchnorm import has_batchnorm, synchronise_batchnorm
from pollux.agent.elastic.step_requests import CHECKPOINT, RESIZE, STOP
from pollux.agent.job.elastic_job import MovingJob
from pollux.agent.job.status import Parts
from pollux.agent.reporting.tensorboard import Scalars
from pollux.core.errors import InvalidInput, MisusedJob, NonFiniteValue, PolluxError
from pollux.wire.live import exit_codes
from pollux.wire.live.heartbeat import Activity

__all__ = ["Job", "JobStopped"]

_log = logging.getLogger("pollux")
_MOST_ROUNDS_WITH_A_SCALER = 5
_LEAVE_SECONDS = 10.0


class JobStopped(SystemExit):
    """Raised at a step boundary after a request to stop, once the state is saved; ends the process.

    The exit code is 143, as of a process that SIGTERM ended: the job is not done and can be resumed.
    """

    def __init__(self) -> None:
        super().__init__(exit_codes.STOPPED)


@dataclass(slots=True)
class _Snapshot:
    state: State
    total: int
    step: int
    progress: float


class Job(MovingJob):
    """A training job; made by `pollux.init`. What it can be asked is in `JobStatus`, how it is saved in `SavedJob`.

    ```
    for epoch in job.epochs(90):
        for x, y in job.batches():
            loss = F.cross_entropy(job.model(x), y)
            job.backward(loss)
    ```
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._iterator: Iterator[tuple[MicroBatch, Any]] | None = None
        self._mid_step = False
        self._left_early = False
        self._in_epoch = False
        self._closed = False
        self._snapshot: _Snapshot | None = None
        self._last_report = RoundReport(None, None)
        self._last_row_at = -1
        self._left_loop = False
        self._failed = False
        self._rounds_not_finite = 0
        self._finished = False
        self._pass_closed = False
        self._taken: tuple[MicroBatch, Any] | None = None
        self._beat = None if parts.live is None else parts.live.beat

    # The loop

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs still to do, up to `count` in all; resumes inside the one that was interrupted.

        An epoch is one pass over the data at the initial batch, and with larger batches the same progress.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidInput(f"epochs is {count!r}: give a whole number of epochs, 1 or more")
        self._require_open()
        self._epochs_wanted = count
        if self._parts.teller is not None:
            self._parts.teller.wants_epochs(count)
        while self._progress.epoch < count:
            number = self._progress.epoch
            self._in_epoch, self._left_early, self._left_loop = True, False, True
            yield number
            self._left_loop = False
            # Replicas that were lost may leave this one behind in an epoch that others have closed.
            while self._progress.epoch == number and not self._surviving(self._close_epoch):
                pass
            self._surviving(self._serve_requests)
        self._in_epoch = False
        if self._parts.live is not None:
            self._parts.live.astray.end()
        while not self._surviving(self._finish):
            pass

    def batches(self) -> Iterator[Any]:
        """This replica's batches until the epoch is over, moved to its device; pass each one's loss to `backward`.

        With accumulation one optimiser step takes several of them. Left by `break`, the rest of the pass is skipped in
        exact mode, and the epoch counts as done.
        """
        if not self._in_epoch:
            raise MisusedJob("job.batches() was called outside of an epoch: loop over job.epochs(n) around it")
        self._require_open()
        self._drop_unfinished_step()
        if self._parts.live is not None:
            self._parts.live.astray.end()
        ended, number = False, self._progress.epoch
        try:
            while self._progress.epoch == number and not self._epoch_over():
                self._taken = None
                self._surviving(self._take_batch)
                item = self._taken
                if item is None:
                    continue
                micro, batch = item
                self._begin(micro)
                yield self._moved(batch) if self._parts.move_batches else batch
            ended = True
        finally:
            self._left_early = self._left_early or not ended
            self._taken = None
            self._rest(Activity.PASS_END)

    def backward(self, loss: Tensor, *, reduction: str = "mean", weight: float | Tensor | None = None) -> None:
        """The backward pass, and after the last micro-batch of a step the step itself.

        `loss` is the mean over the samples of the batch; or their sum (`reduction="sum"`); or the mean over something
        else, tokens for instance, whose number in this batch is `weight`. At any number of replicas and any
        accumulation the gradient is that of the whole batch. It may end the process: see `JobStopped`.
        """
        try:
            self._surviving(lambda: self._backward(loss, reduction, weight))
        except Exception:
            self._failed = True
            raise

    def _backward(self, loss: Tensor, reduction: str, weight: float | Tensor | None) -> None:
        self._require_whole_model()
        micro = self._engine.backward(loss, reduction, weight)
        self._mid_step = not micro.is_last
        if micro.is_last:
            self._finish_step(micro)

    def _announce(self, what: Activity) -> None:
        """Tell whoever listens for signs of life what takes long now, if anything."""
        if self._beat is not None:
            self._beat.busy = what

    def _rest(self, what: Activity) -> None:
        """Tell the same that the user's own code runs next."""
        if self._parts.live is not None:
            self._parts.live.rest(what)

    def log(self, **values: float) -> None:
        """Record metrics of the user's own, by samples and epoch, in the receipt and TensorBoard."""
        progress = self._progress
        self._receipt.log(values, samples=progress.samples, epoch=progress.epochs, progress=progress.progress)
        if self._parts.scalars is not None:
            self._parts.scalars.metrics(values, progress.samples)
        if self._parts.teller is not None:
            self._parts.teller.logged(values)

    def write_receipt(self, folder: str | Path | None = None) -> list[Path]:
        """Write `receipt.json` and its picture into a folder, by default the job's output folder; replica 0 only."""
        target = Path(folder) if folder is not None else self._parts.output_dir
        if target is None:
            raise MisusedJob("there is no folder for the receipt: pass output_dir= to pollux.init, or a folder here")
        self._add_row()
        return self._receipt.write(target) if self.is_first else []

    def close(self) -> None:
        """Stop watching signals, finish writing, leave the process group; another job may then be started."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._iterator = None
        self._note_death()
        try:
            self._leave()
        finally:
            self._release()

    def _release(self) -> None:
        parts = self._parts
        if parts.teller is not None:
            parts.teller.close(self, self._last_report.loss, self._last_report.throughput, self._finished)
        parts.watch.close()
        parts.loader.close()
        parts.adaptation.close()
        if parts.engine.meter is not None:
            parts.engine.meter.close()
        self._await_buffers()
        if parts.checkpointer is not None:
            parts.checkpointer.close()
        if parts.scalars is not None:
            parts.scalars.close()
        if parts.engine.counts_batchnorm:
            synchronise_batchnorm(parts.engine.inner, None)
        parts.on_close()
        parts.replicas.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        self._failed = self._failed or error is not None
        self.close()

    def _leave(self) -> None:
        """The loop over epochs was left by `break`, not by an error: what it did so far is kept."""
        if not self._left_loop or self._failed or getattr(sys, "last_value", None) is not None:
            return
        self._left_loop = False
        if self._parts.checkpointer is not None and self._replicas.are_all_at(self.step, _LEAVE_SECONDS):
            self._drop_unfinished_step()
            try:
                self.checkpoint(wait=True)
            except PolluxError as error:
                _log.error("%s", error)
        elif self._parts.checkpointer is not None:
            _log.warning("not saved: not all replicas left the loop at step %d; break on all of them alike", self.step)
        if self._parts.live is not None:
            self._parts.live.finish()
        self._write_output()

    # Inside

    def _require_open(self) -> None:
        if self._closed:
            raise MisusedJob("this job was closed: call pollux.init for another")

    def _epoch_over(self) -> bool:
        if self._adaptation.adapts and self._progress.epoch_size is not None:
            return self._progress.epoch_reached
        return self._loader.pass_done

    def _forget_course(self) -> None:
        self._end_trial()
        self._iterator, self._mid_step, self._snapshot = None, False, None
        self._rounds_not_finite = 0

    def _take_batch(self) -> None:
        if self._beat is not None:
            self._beat.reads()
        self._taken = self._next_batch()
        if self._beat is not None:
            self._beat.computes()

    def _next_batch(self) -> tuple[MicroBatch, Any] | None:
        """The next micro-batch; None where a pass ended and the question is to be asked anew."""
        if self._iterator is None:
            if self._loader.pass_done:
                if not self._pass_closed:
                    self._pass_ended()
                self._next_pass()
            self._iterator = self._loader.micro_batches(self._adaptation.shape, self._progress.steps)
        if not self._mid_step:
            step = self._progress.steps
            self._engine.clock.begin(self._adaptation.is_told_apart(step, self._adaptation.shape(step).measured))
        began = time.perf_counter()
        item = next(self._iterator, None)
        self._engine.clock.waited(time.perf_counter() - began)
        if item is None:
            self._iterator = None
            if self._loader.cursor == 0:
                raise InvalidInput(
                    f"pass {self._loader.pass_index} had no whole step of {self.batch_size} samples: check the "
                    "dataset's iterator or sampler, or use a smaller batch (max_batch_size=) with drop_last"
                )
            self._pass_ended()
        return item

    def _begin(self, micro: MicroBatch) -> None:
        local = _local_batch(micro, self.num_replicas)
        fits = self._adaptation.trial_from(local) if micro.index == 0 else None
        if fits is not None and self._notes is not None:
            self._notes.begin(local, self._adaptation.memory.held, writes=self.is_first)
        self._engine.begin(micro, fits)

    def _moved(self, batch: Any) -> Any:
        device = self._replicas.device

        def move(leaf: Any) -> Any:
            return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

        if device.type == "cpu":
            return batch
        if hasattr(batch, "to") and not isinstance(batch, Tensor):
            return batch.to(device)
        return _pytree.tree_map(move, batch)

    def _drop_unfinished_step(self) -> None:
        if self._mid_step or self._engine.is_waiting:
            self._end_trial()
            self._engine.abandon()
            self._loader.rewind()
            self._iterator, self._mid_step = None, False

    def _finish_step(self, micro: MicroBatch) -> None:
        local = _local_batch(micro, self.num_replicas)
        progress = self._progress
        finished = self._engine.finish(self._adaptation.factors(micro.total, progress.epochs))
        self._end_trial()
        if not finished:
            self._survive_out_of_memory(local)
            return
        self._engine.clock.end(micro.repeats, local, micro.measured)
        progress.add(micro.total, self._adaptation.stepped(local, micro.total))
        self._loader.commit()
        self._tell_step()
        if self._parts.schedule is not None:
            self._parts.schedule.after_step(progress)
        self._prepare_buffers()
        if self._adaptation.is_round(progress.steps):
            self._round()
        self._serve_requests()

    def _tell_step(self) -> None:
        live, teller = self._parts.live, self._parts.teller
        changed = live is not None and live.stepped(self._progress.steps)
        if teller is not None:
            teller.stepped()
            teller.live = live is not None and not live.refusal
            if changed and live is not None and live.last_pause is not None:
                teller.resized(*live.last_pause)

    def _serve_requests(self) -> None:
        for request in sorted(self._parts.watch.at_boundary(self._progress.steps)):
            self._serve(request)
            if self._beat is not None and self._beat.busy == Activity.CHECKPOINT:
                self._beat.busy = Activity.TRAINING

    def _serve(self, request: str) -> None:
        if request == CHECKPOINT and self._parts.checkpointer is not None:
            self._announce(Activity.CHECKPOINT)
            self.checkpoint(wait=False)
        elif request == STOP:
            self._announce(Activity.CHECKPOINT)
            self._stop()
        elif request == RESIZE and self._parts.live is not None:
            self._parts.live.resize(self, self._parts.watch.target)

    def _stop(self) -> None:
        # Before the state is saved, so that the receipt of the run that goes on knows of it.
        self._receipt.event("stopped", self.step, self.progress, "asked to stop")
        if self._parts.checkpointer is None:
            _log.warning("stopped without a checkpoint: pass checkpoint_dir= to pollux.init to keep the work")
        else:
            try:
                self.checkpoint(wait=True)
            except PolluxError as error:
                _log.error("stopped without saving the last steps: %s", error)
        self._await_others()
        self._left_loop = False
        self._write_output()
        self.close()
        raise JobStopped

    def _await_others(self) -> None:
        """Be here until replica 0 has saved: where one replica ends, launchers end the others."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._replicas.gather([1.0])

    def _survive_out_of_memory(self, local: int) -> None:
        if local <= 1:
            raise InvalidInput("memory does not hold a single sample: use a smaller model, or a GPU with more memory")
        before = self._adaptation.choice
        smaller = self._adaptation.ran_out(local)
        self._loader.rewind()
        self._iterator = None
        text = f"a local batch of {local} ran out of memory: back to {smaller}, the step's samples are taken again"
        _log.warning("%s", text)
        self._receipt.event("out-of-memory", self.step, self.progress, text, local_batch=local, smaller=smaller)
        if self._adaptation.choice.accumulation > before.accumulation:
            self.note_batchnorm(accumulates=True)

    def attach_scalars(self, scalars: Scalars) -> None:
        """Write rows and metrics there from now on; called by `init`."""
        self._parts.scalars = scalars

    def note_batchnorm(self, accumulates: bool) -> None:
        """Say, once, where BatchNorm makes exactness impossible."""
        if not has_batchnorm(self._engine.inner):
            return
        halves = self._adaptation.measures_noise and self.num_replicas == 1
        split = accumulates or halves or (self.num_replicas > 1 and not self._engine.counts_batchnorm)
        if split and self._receipt.is_exact:
            cause = "accumulation" if accumulates else "measuring in halves" if halves else "unsynchronised replicas"
            text = (
                f"BatchNorm normalises over parts of the batch under {cause}: the curve differs from the whole batch's"
            )
            _log.warning("not exact: %s", text)
            self._receipt.mark_not_exact(text, self.step, self.progress)

    # Rounds

    def _round(self) -> None:
        report = self._adaptation.round(self._progress.steps)
        self._last_report = report
        if report.spike is not None and self._snapshot is not None:
            self._roll_back(str(report.spike))
            return
        self._engine.tolerates = self._snapshot is not None and self._adaptation.guard.is_watching
        finite = report.loss is None or math.isfinite(report.loss)
        self._rounds_not_finite = 0 if finite else self._rounds_not_finite + 1
        # A scaler finds its scale by trying; what it never finds in this many rounds is not there.
        if self._rounds_not_finite > (_MOST_ROUNDS_WITH_A_SCALER if self._engine.has_scaler else 0):
            raise NonFiniteValue(
                f"the loss became {report.loss} by step {self.step}: lower the learning rate, clip gradients "
                "(clip_norm=), or check the data; the last checkpoint is untouched"
            )
        self._add_row()
        if not self._adaptation.guard.is_watching:
            self._snapshot = None
        change = self._adaptation.next_change(self._progress.progress)
        if change is not None:
            self._change(change)

    def _change(self, change: BatchChange) -> None:
        before = self._adaptation.choice
        total = self._adaptation.total
        captured = self._parts.state.copied(self._capture())
        self._snapshot = _Snapshot(captured, total, self.step, self.progress)
        self._adaptation.take(change)
        self._engine.tolerates = True
        text = f"batch {total:,} to {self.batch_size:,}: {change.reason}"
        _log.info("%s", text)
        self._receipt.event(
            "batch-changed",
            self.step,
            self.progress,
            text,
            before=total,
            after=self.batch_size,
            gain=change.gain,
            efficiency=change.efficiency,
            accumulation=change.choice.accumulation,
        )
        if change.choice.accumulation > before.accumulation:
            self.note_batchnorm(accumulates=True)

    def _roll_back(self, why: str) -> None:
        snapshot = self._snapshot
        assert snapshot is not None
        bad = self.batch_size
        self._engine.abandon()
        self._engine.tolerates = False
        self._restore(snapshot.state, in_place=False)
        self._parts.state.restore_rng(snapshot.state.values, snapshot.step)
        self._adaptation.go_back(snapshot.total, snapshot.step, snapshot.state.values["adaptation"])
        self._adaptation.guard.freeze(self._progress.progress)
        self._iterator = None
        self._snapshot = None
        if self._parts.checkpointer is not None:
            # First the one to go on from, then those that nobody is to go on from.
            try:
                self.checkpoint(wait=True)
            except PolluxError as error:
                # Only the first replica knows of it, and all of them go on.
                _log.error("rolled back, but not saved: %s", error)
            self._parts.checkpointer.drop_after(snapshot.step)
        if self._parts.scalars is not None:
            self._parts.scalars.rolled_back(self.samples)
        until = self._adaptation.guard.frozen_until
        text = f"{why}: back to step {snapshot.step} and batch {snapshot.total:,} from {bad:,}, which is left alone"
        _log.warning("%s", text)
        self._receipt.event("rolled-back", self.step, self.progress, text, before=bad, after=snapshot.total)
        self._receipt.event("frozen", self.step, self.progress, f"no change of batch until progress {until:,.0f}")

    def _add_row(self) -> None:
        if self._last_row_at == self.step:
            return
        self._last_row_at = self.step
        row = self._row(self._last_report, self._seconds)
        self._receipt.sample(row)
        if self._parts.scalars is not None:
            self._parts.scalars.row(row)
        if self._parts.teller is not None:
            self._parts.teller.round(self, self._last_report.loss, self._last_report.throughput)

    # Epochs and passes

    def _pass_ended(self) -> None:
        self._pass_closed = True
        if self._loader.pass_done:
            ledger = self.ledger()
            if not ledger.is_complete:
                text = (
                    f"pass {ledger.pass_index} used {ledger.samples} samples where {ledger.expected_samples} were due: "
                    "replicas did not see the same order"
                )
                _log.error("%s", text)
                self._receipt.mark_not_exact(text, self.step, self.progress)
            self._receipt.close_pass(ledger.pass_index, ledger.samples, f"{ledger.hash:#018x}")
            if self._progress.epoch_size is None:
                self._progress.epoch_size = self._loader.cursor

    def _close_epoch(self) -> None:
        self._drop_unfinished_step()
        if not self._engine.counts_batchnorm:
            # First what needs the others: where one is lost, nothing has changed yet.
            self._replicas.broadcast_buffers(self._engine.inner)
        exact = not self._adaptation.adapts or self._progress.epoch_size is None
        if exact and self._loader.pass_done:
            self._end_pass()
        elif exact and self._left_early:
            self._loader.rewind()
            self._iterator = None
            self._loader.skip_pass()
        self._progress.close_epoch()
        if self._parts.schedule is not None:
            self._parts.schedule.after_epoch()
        if self._parts.scalars is not None:
            self._parts.scalars.flush()

    def _end_pass(self) -> None:
        if self._iterator is not None:
            # The iterator learns the end of the pass by being asked once more.
            with contextlib.suppress(StopIteration):
                next(self._iterator)
            self._iterator = None
        self._pass_ended()
        self._next_pass()

    def _next_pass(self) -> None:
        self._loader.next_pass()
        self._pass_closed = False
        # A sampler of the user's own may draw differently on each replica, which would lose and repeat samples.
        order = self._loader.order_hash()
        if order:
            self._replicas.check_same("the order that the sampler drew", order)

    def _finish(self) -> None:
        # A job that was done already when it was resumed has nothing to add.
        if self._parts.checkpointer is not None and self._resumed_at != (self.step, self.epoch):
            try:
                self.checkpoint(wait=True)
            except PolluxError as error:
                # The model is trained, and what the script does next with it must not be lost as well.
                _log.error("finished, but the last checkpoint could not be saved: %s", error)
                self._receipt.event("not-saved", self.step, self.progress, f"the last checkpoint failed: {error}")
        self._parts.watch.give_back_signals()
        self._finished = True
        if self._parts.live is not None:
            self._parts.live.finish()
        self._receipt.event("finished", self.step, self.progress, f"{self._progress.epoch} epochs done")
        self._write_output()

    def _write_output(self) -> None:
        self._add_row()
        if self._parts.output_dir is not None and self.is_first:
            self._receipt.write(self._parts.output_dir)
        if self._parts.scalars is not None:
            self._parts.scalars.flush()


def _local_batch(micro: MicroBatch, num_replicas: int) -> int:
    """The largest part that any replica has in the step."""
    return -(-micro.total // (num_replicas * micro.repeats))
