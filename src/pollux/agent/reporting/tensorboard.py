"""The rows of the receipt and the user's metrics as TensorBoard scalars, with samples as the x axis.

tensorboard is an extra and imported on use.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from pollux.agent.reporting.receipt_row import ReceiptRow
from pollux.agent.reporting.said_once import SaidOnce
from pollux.core.errors import InvalidInput

__all__ = ["Scalars"]


class Scalars:
    """Writes scalars into a folder from replica 0; on the other replicas, and without a folder, all calls do nothing.

    A run that was resumed at `resumed_samples` writes to the same folder: TensorBoard hides what an earlier process
    wrote beyond that point, so that no sample has two values. The first value opens the event file.
    After a failed write nothing more is written, and the log says so.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None, *, replica: int = 0, resumed_samples: int | None = None
    ) -> None:
        self._folder = None if folder is None else os.fspath(folder)
        self.set_replica(replica)
        self._resumed_samples = resumed_samples
        self._writer: Any = None
        self._unwritten = SaidOnce()
        self._what = f"the TensorBoard scalars in '{self._folder}'"
        if self._writes:
            _summary_writer()

    def row(self, row: ReceiptRow) -> None:
        """Write the values of a row that are known, under `pollux/`."""
        self._write(dict(_row_scalars(row)), row.samples, "pollux")

    def metrics(self, values: Mapping[str, float], samples: int) -> None:
        """Write the user's metrics, under `metrics/`."""
        self._write(values, samples, "metrics")

    def rolled_back(self, samples: int) -> None:
        """Hide what was written beyond these samples: the run continues from there."""
        self.close()
        self._resumed_samples = samples

    def set_replica(self, replica: int) -> None:
        """Set which replica this process is now; only replica 0 writes."""
        self._writes = replica == 0 and self._folder is not None

    def flush(self) -> None:
        """Flush what was written to the file system."""
        if self._writer is not None:
            with self._unwritten.tolerated(self._what):
                self._writer.flush()

    def close(self) -> None:
        """Close the event file; a later value opens another. May be called twice."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        self._resumed_samples = None
        with self._unwritten.tolerated(self._what):
            writer.close()

    def _write(self, values: Mapping[str, float], samples: int, prefix: str) -> None:
        if not self._writes or self._unwritten.has_failed(self._what):
            return
        with self._unwritten.tolerated(self._what):
            if self._writer is None:
                self._writer = self._open()
            for name, value in values.items():
                self._writer.add_scalar(f"{prefix}/{name}", float(value), samples)

    def _open(self) -> Any:
        # TensorBoard hides values of this step and of later ones.
        purge = None if self._resumed_samples is None else self._resumed_samples + 1
        try:
            return _summary_writer()(self._folder, purge_step=purge)
        except OSError as error:
            raise InvalidInput(
                f"TensorBoard scalars cannot be written to '{self._folder}': {error}; choose another folder"
            ) from None


def _row_scalars(row: ReceiptRow) -> Iterator[tuple[str, float]]:
    names = ("progress", "num_replicas", "num_nodes", "local_batch", "accumulation", "total_batch", "efficiency")
    maybe = ("throughput", "goodput", "noise_scale", "noise_low", "noise_high", "loss")
    for name in (*names, *maybe):
        value = getattr(row, name)
        if value is not None and math.isfinite(value):
            yield name, float(value)
    for group, factor in enumerate(row.lr_factors):
        yield ("lr_factor" if len(row.lr_factors) == 1 else f"lr_factor_{group}"), factor
    for group, rate in enumerate(row.learning_rates):
        if math.isfinite(rate):
            yield f"learning_rate/{group}", rate


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InvalidInput(
            "TensorBoard scalars need tensorboard, which is not installed: pip install 'pollux-scheduler[tensorboard]'"
        ) from None
    return SummaryWriter
