"""How long a change of replicas keeps one of them from training, and what it spends that time on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pollux.wire.live.heartbeat import PauseReport
from pollux.wire.live.plan import GenerationPlan

__all__ = ["ResizePause"]


@dataclass(slots=True)
class ResizePause:
    """The pause of one change, from the last step before it (`began`) to the first step after it.

    `kind` is what the change is for the job, as in `GenerationPlan.kind`; `parts` are seconds by part of the change.
    """

    plan: GenerationPlan
    kind: str
    began: float
    num_bytes: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    last: float = 0.0

    def end_part(self, name: str) -> None:
        """Count the time since the end of the last part for this part."""
        now = time.perf_counter()
        self.parts[name] = self.parts.get(name, 0.0) + now - self.last
        self.last = now

    def count_from(self, met: float, paused_seconds: float) -> None:
        """Count, for a replica that joined, what the others had paused when it met them, not its own wait for them."""
        self.began, self.last = met - paused_seconds, met
        self.parts["regroup"] = paused_seconds

    @property
    def seconds(self) -> float:
        """The length of the pause up to the end of its last part."""
        return self.last - self.began

    def report(self, step: int) -> PauseReport:
        """What the supervisor is told once the pause is over, after that step."""
        return PauseReport(self.seconds, self.kind, step, self.num_bytes, self.parts)
