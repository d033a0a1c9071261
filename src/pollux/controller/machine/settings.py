"""When a controller decides, and whether a driver provides what a policy needs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pollux.core import InvalidInput, Policy, UnknownName

__all__ = ["SERVICE_FIELDS", "ControllerSettings", "require"]

SERVICE_FIELDS = frozenset({"goodput", "remaining", "prior", "kind", "group", "deadline", "loss_history"})
"""Optional fields of `JobView` that a service fills."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """When to decide.

    `rounds`: every `interval_seconds`. `events`: after an event that can change the answer, at least
    `min_gap_seconds` apart; a model counts as changed when its prediction moved by more than `model_drift`.
    """

    trigger: Literal["rounds", "events"] = "rounds"
    interval_seconds: float = 60.0
    min_gap_seconds: float = 2.0
    model_drift: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trigger not in ("rounds", "events"):
            raise UnknownName("trigger", self.trigger, ("rounds", "events"))
        for name in ("interval_seconds", "min_gap_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidInput(f"{name} is {value}; give a finite number of seconds above 0")


def require(policy: Policy, offered: Iterable[str]) -> None:
    """Refuse a policy that needs something that the driver does not offer."""
    missing = sorted(policy.needs - set(offered))
    if missing:
        raise InvalidInput(
            f"policy '{policy.name}' needs {', '.join(missing)}, which this driver does not know; "
            "use it in the simulator, or choose another policy"
        )
