"""The shape of an optimiser step: its number of samples, and how replicas and micro-steps share them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MicroBatch", "StepShape", "share"]


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step to come: `total` samples over all replicas, in `repeats` = s + 1 micro-steps each; Eq. (G1).

    `measured` says that gradient noise is measured in it. The last step of a pass may have fewer samples.
    """

    total: int
    repeats: int
    measured: bool = False


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One replica's part in one micro-step.

    `samples` are this replica's own; 0 means a filler sample, whose loss must not count. `total` are the samples of the
    whole step, over all replicas and micro-steps, so `samples / total` is the weight of this part in the average.
    `samples_by_replica` are those of this micro-step on every replica.
    """

    step: int
    index: int
    repeats: int
    samples: int
    total: int
    measured: bool
    samples_by_replica: tuple[int, ...]

    @property
    def is_last(self) -> bool:
        """Whether this is the last micro-step of its step."""
        return self.index == self.repeats - 1

    @property
    def largest_local_batch(self) -> int:
        """The largest part that any replica has in the step."""
        return -(-self.total // (len(self.samples_by_replica) * self.repeats))


def share(total: int, num_replicas: int, repeats: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """How `total` consecutive samples are shared: `share(...)[micro_step][replica]` = (first, end).

    The parts are consecutive, micro-step by micro-step and replica by replica within it, and differ by at most
    one sample; with fewer samples than parts the last ones are empty.
    """
    parts = num_replicas * repeats
    size, extra = divmod(total, parts)
    ends = [0]
    for part in range(parts):
        ends.append(ends[-1] + size + (part < extra))
    return tuple(
        tuple(
            (ends[step * num_replicas + replica], ends[step * num_replicas + replica + 1])
            for replica in range(num_replicas)
        )
        for step in range(repeats)
    )
