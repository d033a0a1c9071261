"""The loop of a training job: epochs, batches, steps, requests between steps, and the end of the loop."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pollux.agent.checkpoint.save_request import check_pickling
from pollux.agent.data.step_shape import MicroBatch
from pollux.agent.distributed.process_group import WrappedModel
from pollux.agent.distributed.sync_batchnorm import set_counted, synchronise_batchnorm
from pollux.agent.elastic.step_requests import CHECKPOINT, RESIZE, STOP
from pollux.agent.job.batch_feed import on_device
from pollux.agent.job.elastic_job import ElasticJob
from pollux.agent.job.run import JobRun
from pollux.agent.reporting.tensorboard import Scalars
from pollux.core.errors import InvalidInput, MisusedJob, PolluxError
from pollux.wire.live import exit_codes
from pollux.wire.live.heartbeat import Activity

__all__ = ["JobStopped", "TrainingLoop"]

_log = logging.getLogger("pollux")
_LEAVE_SECONDS = 10.0


class JobStopped(SystemExit):
    """Raised at a step boundary after a request to stop, once the state is saved; ends the process.

    The exit code is 143, as of a process that SIGTERM ended: the job is not done and can be resumed.
    """

    def __init__(self) -> None:
        super().__init__(exit_codes.STOPPED)


class TrainingLoop:
    """Runs the steps of a job; `failed` says that an error ended the loop, after which nothing is saved."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._parts = run.parts
        self._progress = run.parts.progress
        self._elastic = ElasticJob(run)
        self._drawn: tuple[MicroBatch, Any] | None = None
        self._dropped_step = False
        self._at_boundary = False
        run.parts.script_schedules.attach(lambda: run.feed.mid_step or self._dropped_step)
        self._in_epoch = False
        self._left_batches = False
        self._left_epochs = False
        self._finished = False
        self._closed = False
        self.failed = False

    def start(self, tensorboard_dir: str | os.PathLike[str] | None) -> None:
        """Resume from the newest checkpoint or from other replicas' memory, or start from the beginning."""
        parts, member, checkpointer = self._parts, self._parts.member, self._parts.checkpointer
        if member is not None:
            member.attach(self._elastic, parts.requests)
        if checkpointer is not None:
            check_pickling(parts.state.user_objects())
        if member is not None and member.joins:
            member.join(self._elastic)
            continues = True
        else:
            continues = self._resume_or_begin()
        if tensorboard_dir is not None:
            resumed = self._progress.samples if continues else None
            self._run.record.scalars = Scalars(tensorboard_dir, replica=parts.replicas.replica, resumed_samples=resumed)
        self._run.record.note_batchnorm(accumulates=parts.adaptation.choice.accumulation > 0)

    def _resume_or_begin(self) -> bool:
        """Start together with all other replicas; returns whether there was a checkpoint to resume from."""
        parts, checkpointer = self._parts, self._parts.checkpointer
        saved = checkpointer.latest() if checkpointer is not None else None
        if saved is not None:
            self._run.persistence.resume(saved)
        else:
            if parts.replicas.replica > 0:
                # Replica 0 keeps the random state of the script, as with plain PyTorch.
                parts.state.seed_rng(0)
            self._run.record.event(
                "started", f"{parts.replicas.num_replicas} replicas on {parts.replicas.num_nodes} nodes"
            )
        if checkpointer is not None:
            self._run.oom.learn_from_earlier_starts()
        return saved is not None

    # Epochs and batches

    def epochs(self, count: int) -> Iterator[int]:
        """See `Job.epochs`."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidInput(f"epochs is {count!r}: give a whole number of epochs, 1 or more")
        self._require_open()
        self._run.record.reports.set_epochs(count)
        while self._progress.epoch < count:
            number = self._progress.epoch
            self._in_epoch, self._left_batches, self._left_epochs = True, False, True
            yield number
            self._left_epochs = False
            # After a loss this replica may receive a state of a later epoch.
            while self._progress.epoch == number and not self._elastic.survive_loss(self._close_epoch):
                pass
            self._elastic.survive_loss(self._serve_requests)
        self._in_epoch = False
        self._enter_loop()
        while not self._elastic.survive_loss(self._finish):
            pass

    def batches(self) -> Iterator[Any]:
        """See `Job.batches`."""
        if not self._in_epoch:
            raise MisusedJob("job.batches() was called outside of an epoch: loop over job.epochs(n) around it")
        self._require_open()
        self._drop_unfinished_step()
        self._enter_loop()
        ended, number = False, self._progress.epoch
        try:
            while self._progress.epoch == number and not self._run.feed.epoch_is_over:
                self._drawn = None
                self._elastic.survive_loss(self._draw)
                if self._drawn is None:
                    continue
                micro, batch = self._drawn
                self._run.oom.begin_micro_batch(micro)
                self._parts.script_schedules.in_batches = True
                yield on_device(batch, self._parts.replicas.device) if self._parts.move_batches else batch
                # Now, and not in `backward`: the script's own work of this step is done and belongs to the state.
                if self._at_boundary:
                    self._serve_after_step()
            ended = True
        finally:
            self._left_batches = self._left_batches or not ended
            self._drawn = None
            self._parts.script_schedules.in_batches = False
            if self._parts.member is not None:
                self._parts.member.start_activity(Activity.PASS_END)

    def _enter_loop(self) -> None:
        """Note that a replica that joined has come to the loop, like all others."""
        if self._parts.member is not None:
            self._parts.member.stray_check.stop_watching()

    def _draw(self) -> None:
        beat = None if self._parts.member is None else self._parts.member.beat
        if beat is not None:
            beat.start_reading()
        self._drawn = self._run.feed.next()
        if beat is not None:
            beat.start_computing()

    def _drop_unfinished_step(self) -> None:
        if self._run.feed.mid_step or self._parts.engine.is_waiting:
            self._run.oom.end_trial()
            self._parts.engine.abandon()
            self._run.feed.rewind()

    def _close_epoch(self) -> None:
        parts = self._parts
        self._drop_unfinished_step()
        if not parts.engine.counts_batchnorm:
            # The collective first: if a replica is lost in it, nothing has changed yet.
            parts.replicas.broadcast_buffers(parts.engine.inner)
        self._run.feed.close_epoch(self._left_batches)
        self._progress.close_epoch()
        if parts.schedule is not None:
            parts.schedule.after_epoch()
        self._run.record.scalars.flush()

    # Steps

    def backward(self, loss: Tensor, reduction: str, weight: float | Tensor | None) -> None:
        """See `Job.backward`."""
        try:
            self._elastic.survive_loss(lambda: self._backward(loss, reduction, weight))
        except Exception:
            self.failed = True
            raise

    def _backward(self, loss: Tensor, reduction: str, weight: float | Tensor | None) -> None:
        self._require_whole_model()
        micro = self._parts.engine.backward(loss, reduction, weight)
        self._run.feed.mid_step = not micro.is_last
        if micro.is_last:
            self._finish_step(micro)

    def _require_whole_model(self) -> None:
        """Raise the error of a replica that was lost during a forward pass."""
        engine = self._parts.engine
        model = engine.model
        if isinstance(model, WrappedModel) and model.broken:
            problem, model.broken = model.broken, ""
            set_counted(engine.inner, True)
            raise RuntimeError(problem)

    def _finish_step(self, micro: MicroBatch) -> None:
        parts, progress = self._parts, self._progress
        parts.rates.check(progress.steps, progress.epoch)
        finished = parts.engine.finish(parts.adaptation.factors(micro.total, progress.epochs))
        self._run.oom.end_trial()
        self._dropped_step = not finished
        if not finished:
            self._run.oom.shrink_batch(micro.largest_local_batch)
            self._run.feed.rewind()
            return
        progress.add(micro.total, parts.adaptation.end_step(micro))
        parts.loader.commit()
        self._run.record.step_done()
        if parts.schedule is not None:
            parts.schedule.after_step(progress)
        self._run.persistence.prepare_buffers()
        self._run.rounds.run_due()
        self._at_boundary = True

    # Requests

    def _serve_after_step(self) -> None:
        try:
            self._elastic.survive_loss(self._serve_requests)
        except Exception:
            self.failed = True
            raise

    def _serve_requests(self) -> None:
        self._at_boundary = False
        for request in sorted(self._parts.requests.at_boundary(self._progress.steps)):
            self._serve(request)
            member = self._parts.member
            if member is not None and member.beat.busy == Activity.CHECKPOINT:
                member.beat.busy = Activity.TRAINING

    def _serve(self, request: str) -> None:
        member = self._parts.member
        if request == RESIZE and member is not None:
            member.resize(self._elastic, self._parts.requests.target)
            return
        saves = request == STOP or (request == CHECKPOINT and self._parts.checkpointer is not None)
        if saves and member is not None:
            member.beat.busy = Activity.CHECKPOINT
        if request == STOP:
            self._stop()
        elif saves:
            self._run.persistence.checkpoint(wait=False)

    def _stop(self) -> None:
        # Before the state is saved, so that the receipt of the resumed run has it.
        self._run.record.event("stopped", "asked to stop")
        if self._parts.checkpointer is None:
            _log.warning("stopped without a checkpoint: pass checkpoint_dir= to pollux.init to keep the work")
        else:
            try:
                self._run.persistence.checkpoint(wait=True)
            except PolluxError as error:
                _log.error("stopped without saving the last steps: %s", error)
        # Wait until replica 0 has saved: when one replica ends, a launcher ends the others.
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._parts.replicas.gather([1.0])
        self._left_epochs = False
        self._run.record.write_output()
        self.close()
        raise JobStopped

    # The end

    def _finish(self) -> None:
        # A finished job that was resumed has nothing new to save.
        if self._parts.checkpointer is not None and not self._run.persistence.has_nothing_new:
            try:
                self._run.persistence.checkpoint(wait=True)
            except PolluxError as error:
                # The model is trained, and the script must be able to use it.
                _log.error("finished, but the last checkpoint could not be saved: %s", error)
        self._parts.requests.give_back_signals()
        self._finished = True
        if self._parts.member is not None:
            self._parts.member.finish()
        self._run.record.event("finished", f"{self._progress.epoch} epochs done")
        self._run.record.write_output()

    def _require_open(self) -> None:
        if self._closed:
            raise MisusedJob("this job was closed: call pollux.init for another")

    def close(self) -> None:
        """See `Job.close`."""
        if self._closed:
            return
        self._closed = True
        self._run.feed.close()
        self._run.oom.note_end_of_process()
        try:
            self._leave()
        finally:
            self._release()

    def _leave(self) -> None:
        """Save if the script left the loop over epochs by `break`, not by an error."""
        left = self._left_epochs and not self._elastic.saved_alone
        if not left or self.failed or getattr(sys, "last_value", None) is not None:
            return
        self._left_epochs = False
        parts, step = self._parts, self._progress.steps
        if parts.checkpointer is not None and parts.replicas.are_all_at(step, _LEAVE_SECONDS):
            self._drop_unfinished_step()
            try:
                self._run.persistence.checkpoint(wait=True)
            except PolluxError as error:
                _log.error("%s", error)
        elif parts.checkpointer is not None:
            _log.warning("not saved: not all replicas left the loop at step %d; break on all of them alike", step)
        if parts.member is not None:
            parts.member.finish()
        self._run.record.write_output()

    def _release(self) -> None:
        parts = self._parts
        self._run.record.close_reports(self._finished)
        parts.requests.close()
        parts.loader.close()
        parts.adaptation.close()
        if parts.engine.meter is not None:
            parts.engine.meter.close()
        self._run.persistence.await_buffers()
        if parts.checkpointer is not None:
            parts.checkpointer.close()
        self._run.record.scalars.close()
        if parts.engine.counts_batchnorm:
            synchronise_batchnorm(parts.engine.inner, None)
        parts.script_schedules.close()
        parts.on_close()
        parts.replicas.close()
