"""Feeds micro-batches to a job's own loop, through passes, and again after a dropped step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from pollux.agent.data.step_shape import MicroBatch
from pollux.agent.job.parts import JobParts
from pollux.agent.job.record import RunRecord
from pollux.agent.reporting.status import pass_ledger
from pollux.core.errors import InvalidInput

__all__ = ["BatchFeed", "on_device"]

_log = logging.getLogger("pollux")


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device; on the CPU the batch itself."""

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    if device.type == "cpu":
        return batch
    if hasattr(batch, "to") and not isinstance(batch, Tensor):
        return batch.to(device)
    return _pytree.tree_map(move, batch)


class BatchFeed:
    """Draws micro-batches from the loader, starts and ends its passes, and times the wait for data.

    `mid_step` says that some, but not all, micro-batches of the present step are done.
    """

    def __init__(self, parts: JobParts, record: RunRecord) -> None:
        self._loader = parts.loader
        self._clock = parts.engine.clock
        self._adaptation = parts.adaptation
        self._progress = parts.progress
        self._replicas = parts.replicas
        self._record = record
        self._receipt = parts.receipt
        self._iterator: Iterator[tuple[MicroBatch, Any]] | None = None
        self._pass_is_entered = False
        self.mid_step = False

    @property
    def epoch_is_over(self) -> bool:
        """Whether the epoch is over: its progress is complete or, in exact mode, its pass over the data is."""
        if self._adaptation.adapts and self._progress.epoch_size is not None:
            return self._progress.epoch_reached
        return self._loader.pass_done

    def forget(self) -> None:
        """Drop batches that were drawn ahead: the next micro-batch is the first of a step."""
        self._iterator, self.mid_step = None, False

    def close(self) -> None:
        """Stop drawing."""
        self._iterator = None

    def rewind(self) -> None:
        """Return to the first sample that no finished step has used."""
        self._loader.rewind()
        self.forget()

    def next(self) -> tuple[MicroBatch, Any] | None:
        """The next micro-batch; None at the end of a pass: then call again, unless the epoch is over."""
        if self._iterator is None:
            if self._loader.pass_done:
                if not self._pass_is_entered:
                    self._enter_pass()
                self._next_pass()
            self._iterator = self._loader.micro_batches(self._adaptation.shape, self._progress.steps)
        if not self.mid_step:
            step = self._progress.steps
            self._clock.begin_step(self._adaptation.times_compute(step, self._adaptation.shape(step).measured))
        item = self._adaptation.timed_next(self._iterator)
        if item is None:
            self._iterator = None
            if self._loader.cursor == 0:
                raise InvalidInput(
                    f"pass {self._loader.pass_index} had no whole step of {self._adaptation.total} samples: check the "
                    "dataset's iterator or sampler, or use a smaller batch (max_batch_size=) with drop_last"
                )
            self._enter_pass()
        return item

    def close_epoch(self, left_early: bool) -> None:
        """Where an epoch is a pass, end the pass; `left_early`: skip its rest."""
        if self._adaptation.adapts and self._progress.epoch_size is not None:
            return
        if self._loader.pass_done:
            if self._iterator is not None:
                # One more call lets the iterator find the end of the pass.
                with contextlib.suppress(StopIteration):
                    next(self._iterator)
                self._iterator = None
            self._enter_pass()
            self._next_pass()
        elif left_early:
            self.rewind()
            self._loader.skip_pass()

    def _enter_pass(self) -> None:
        """Add a pass that is over to the receipt, after all replicas have compared what they used; a collective."""
        self._pass_is_entered = True
        if not self._loader.pass_done:
            return
        ledger = pass_ledger(self._loader, self._replicas)
        if not ledger.is_complete:
            text = (
                f"pass {ledger.pass_index} used {ledger.samples} samples where {ledger.expected_samples} were due: "
                "replicas did not see the same order"
            )
            _log.error("%s", text)
            self._record.mark_not_exact(text)
        self._receipt.close_pass(ledger.pass_index, ledger.samples, f"{ledger.hash:#018x}")
        if self._progress.epoch_size is None:
            self._progress.epoch_size = self._loader.cursor

    def _next_pass(self) -> None:
        self._loader.next_pass()
        self._pass_is_entered = False
        # The user's sampler may draw differently on each replica, which would lose and repeat samples.
        order = self._loader.order_hash()
        if order:
            self._replicas.require_same("the order that the sampler drew", order)
