"""Changes of the batch at fixed places of a training, whatever the machine's speed."""

from __future__ import annotations

from typing import Any


def scripted_changes(initial_batch: int) -> None:
    """The batch grows to 24 and 48, with an efficiency of 0.8 above the initial one; for the rest of this process."""
    from pollux.agent.adaptation.adaptation import Adaptation
    from pollux.agent.adaptation.batch_tuner import BatchChange, fitting_choice

    def next_change(self: Adaptation, progress: float) -> BatchChange | None:
        total = 48 if progress > 400.0 else 24
        if total == self.total:
            return None
        return BatchChange(fitting_choice(total, self.choice.num_gpus, self.local_max), 2.0, 1.0, 0.8, "scripted")

    patched: Any = Adaptation
    patched.next_change = next_change
    patched.is_round = lambda self, step: step % 6 == 0
    patched.efficiency = lambda self, total: 1.0 if total <= initial_batch else 0.8
