"""The batches of a loop that a framework owns, which may draw them before it runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from pollux.agent.adaptation.adaptation import Adaptation
from pollux.agent.adaptation.progress import TrainingProgress
from pollux.agent.data.loader import Loader
from pollux.agent.data.step_shape import MicroBatch
from pollux.core.errors import InvalidInput, MisusedJob

__all__ = ["EpochBatches"]


class EpochBatches:
    """Issues the micro-batches of epochs in order, and counts their samples once their step is done.

    In exact mode an epoch is a pass over the data. Otherwise an epoch is the progress of a pass at the initial batch,
    and may extend into the next pass; batches that are issued and not used yet count. `batch_size` is the initial
    batch. `loader` is that of the oldest step that is not done.
    """

    def __init__(self, loader: Loader, progress: TrainingProgress, batch_size: int, adapts: bool) -> None:
        self.loader = loader
        self._progress = progress
        self._batch_size = batch_size
        self._adapts = adapts
        self._issued: deque[MicroBatch] = deque()
        self._unfinished: deque[tuple[Loader, int]] = deque()
        self._mid_step = False
        self._epoch_ended = False

    @property
    def last_issued(self) -> MicroBatch:
        """The micro-batch that was issued last."""
        if not self._issued:
            raise MisusedJob("no batch was drawn from Pollux's loader")
        return self._issued[-1]

    @property
    def epoch_is_over(self) -> bool:
        """Whether all steps of the present epoch are done."""
        if self._epoch_ended or self._follows_progress:
            return self._epoch_ended or self._progress.epoch_reached
        size, drops = self.loader.size, self.loader.options.drop_last
        # A remainder of less than a whole batch will be dropped, though the loader does not know it yet.
        dropped = drops and size is not None and size - self.loader.cursor < self._batch_size
        return self.loader.pass_done or dropped

    @property
    def _follows_progress(self) -> bool:
        return self._adapts and self._progress.epoch_size is not None

    def epoch(self, adaptation: Adaptation) -> Iterator[Any]:
        """This replica's batches of the present or the next epoch; drops batches that were issued before."""
        self.forget_issued()
        self._enter_epoch()
        step, current = self._progress.steps, self.loader
        while True:
            began_at, first_step = current.cursor, step
            run = current.micro_batches(adaptation.shape, step)
            while not self._has_issued_enough(adaptation):
                item = adaptation.timed_next(run)
                if item is None:
                    break
                micro, batch = item
                step = micro.step + micro.is_last
                self._issue(micro, current)
                yield batch
            is_empty = step == first_step
            if self._has_issued_enough(adaptation) or not (self._follows_progress or is_empty):
                break
            if is_empty:
                self._check_empty_run(is_whole_pass=began_at == 0)
            current = self._following(current)
        self._epoch_ended = True

    def _enter_epoch(self) -> None:
        """Close the last epoch if it is over, and start the next pass if the last one is done."""
        if self.epoch_is_over:
            self._close_epoch()
            if not self._follows_progress:
                self.loader.skip_pass()
        if self.loader.pass_done:
            self.loader.next_pass()

    def _check_empty_run(self, is_whole_pass: bool) -> None:
        """Raise where a whole pass had no batch; otherwise the epoch had ended before."""
        if is_whole_pass:
            raise InvalidInput("a whole pass has no full batch: leave drop_last out, or use a smaller batch")
        if not self._follows_progress:
            # The pass of a stream had ended there already, which shows only when it is read.
            self._close_epoch()

    def _issue(self, micro: MicroBatch, loader: Loader) -> None:
        self._issued.append(micro)
        self._mid_step = not micro.is_last
        if micro.is_last:
            self._unfinished.append((loader, micro.total))

    def _has_issued_enough(self, adaptation: Adaptation) -> bool:
        if self._mid_step or not self._follows_progress or self._progress.epoch_size is None:
            return False
        ahead = sum(total * adaptation.counted_efficiency(total) for _, total in self._unfinished)
        return self._progress.in_epoch + ahead >= self._progress.epoch_size * (1.0 - 1e-9)

    def _following(self, current: Loader) -> Loader:
        """The loader of the next pass; steps of this one may be under way."""
        if not self._unfinished:
            current.skip_pass()
            return current
        return current.following()

    def _close_epoch(self) -> None:
        if self._progress.epoch_size is None:
            self._progress.epoch_size = self.loader.cursor
        self._progress.close_epoch()
        self._epoch_ended = False

    def begin_oldest(self) -> MicroBatch:
        """The oldest micro-batch that was issued, to run it now."""
        if not self._issued:
            raise MisusedJob("a batch came that is not from Pollux's loader: give the Trainer that loader alone")
        return self._issued.popleft()

    def commit(self) -> None:
        """Count the samples of the oldest step that was issued, which is done."""
        loader, _ = self._unfinished.popleft()
        if loader is not self.loader:
            self.loader.close()
            self.loader = loader
        loader.commit()

    def forget_issued(self) -> None:
        """Drop micro-batches that were issued and not committed; they will be issued again."""
        self._issued.clear()
        self._unfinished.clear()
        self._mid_step = False
        self.loader.rewind()

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, and whether the present epoch is over."""
        return {"data": self.loader.state_dict(), "ended": self.epoch_is_over and not self._unfinished}

    def load_state_dict(self, data: dict[str, Any], ended: bool) -> None:
        """Restore a state, and drop what was issued."""
        self.forget_issued()
        self.loader.load_state_dict(data)
        self._epoch_ended = ended
