"""The options of a framework's loop about the batch, with the names and meanings of `pollux.init`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pollux.agent.adaptation import lr_rules
from pollux.agent.adaptation.adaptation import BatchRange
from pollux.agent.adaptation.lr_rules import OwnRule
from pollux.agent.distributed.environment import Environment
from pollux.agent.job.option_checks import batch_range
from pollux.core.errors import InvalidInput

__all__ = ["FrameworkOptions"]


@dataclass(frozen=True, slots=True)
class FrameworkOptions:
    """The user's options for the batch, its limits, learning rates and noise."""

    batch_size: int
    max_batch_size: int | None = None
    max_local_batch: int | None = None
    accumulation: int = 0
    lr_rule: str | OwnRule | None = None
    warmup_epochs: float = 0.0
    measure_noise: bool | None = None
    epoch_size: int | None = None

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "max_batch_size": 1, "max_local_batch": 1, "accumulation": 0, "epoch_size": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is None and name != "batch_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise InvalidInput(f"{name} is {value!r}: give a whole number, {lowest} or more")
        batch_range(self.batch_size, self.max_batch_size, self.max_local_batch, self.accumulation)
        lr_rules.create(self.lr_rule if self.lr_rule is not None else "none", warmup=self.warmup_epochs)

    def within(self, environment: Environment, may_grow: bool = True) -> FrameworkOptions:
        """The options with the launcher's limits, as `pollux.init` applies them; see `Environment.batches`."""
        _, most, local = environment.batches(self.batch_size, self.max_batch_size, self.max_local_batch)
        return replace(self, max_batch_size=most if may_grow else None, max_local_batch=local)

    @property
    def allowed(self) -> BatchRange:
        """The batches that are allowed."""
        return BatchRange(self.batch_size, self.max_batch_size, self.max_local_batch, self.accumulation)
