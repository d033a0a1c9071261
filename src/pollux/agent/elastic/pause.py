"""The pause of a replica in a change of replicas, and its parts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pollux.wire.live.heartbeat import PauseReport
from pollux.wire.live.plan import GenerationPlan

__all__ = ["ResizePause"]


@dataclass(slots=True)
class ResizePause:
    """The pause of one change, from the last step before it (`began`) to the first step after it.

    `kind` is as in `GenerationPlan.kind`; `parts` are seconds by part of the change.
    """

    plan: GenerationPlan
    kind: str
    began: float
    num_bytes: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    last: float = 0.0

    def end_part(self, name: str) -> None:
        """End a part of the change, which began with the end of the last part."""
        now = time.perf_counter()
        self.parts[name] = self.parts.get(name, 0.0) + now - self.last
        self.last = now

    def count_from(self, met: float, paused_seconds: float) -> None:
        """Count a joining replica's pause from that of the others when it met them, without its own wait."""
        self.began, self.last = met - paused_seconds, met
        self.parts["regroup"] = paused_seconds

    @property
    def seconds(self) -> float:
        """The length of the pause up to the end of its last part."""
        return self.last - self.began

    def report(self, step: int) -> PauseReport:
        """The report to the shim, after that step."""
        return PauseReport(self.seconds, self.kind, step, self.num_bytes, self.parts)
