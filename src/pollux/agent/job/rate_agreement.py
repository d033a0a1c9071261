"""Compares the learning rates of all replicas where a script may have made them differ."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.core.errors import InvalidInput

__all__ = ["RateAgreement"]

_FIRST_STEPS = 3


class RateAgreement:
    """Due at the first steps among new replicas, and at the first step of each epoch: between them nobody is asked.

    A replica that joins has the state of the others, but not what their script counts: a schedule by hand, or one
    whose state nobody sends, gives it other learning rates from its second step or from the next epoch on.
    """

    def __init__(self, replicas: ReplicaGroup, optimizer: torch.optim.Optimizer, schedulers: Sequence[str]) -> None:
        self._replicas = replicas
        self._optimizer = optimizer
        self._schedulers = tuple(schedulers)
        self._left = _FIRST_STEPS
        self._epoch: int | None = None

    def restart(self) -> None:
        """Compare at the next steps again, among new replicas."""
        self._left = _FIRST_STEPS

    def check(self, step: int, epoch: int) -> None:
        """Before a step: `InvalidInput` on all replicas where their learning rates differ; a collective when due."""
        if self._replicas.num_replicas == 1 or (self._left <= 0 and epoch == self._epoch):
            return
        self._left, self._epoch = self._left - 1, epoch
        mine = [float(group["lr"]) for group in self._optimizer.param_groups]
        everyones = [json.loads(text) for text in self._replicas.gather_bytes(json.dumps(mine).encode())]
        if all(rates == everyones[0] for rates in everyones):
            return
        told = "; ".join(f"replica {replica}: {rates}" for replica, rates in enumerate(everyones))
        known = f" (the script steps {', '.join(self._schedulers)})" if self._schedulers else ""
        raise InvalidInput(
            f"replicas have different learning rates at step {step}{known}: {told}. A replica that joined later has "
            "not made the script's earlier calls: pass the scheduler as lr_scheduler= to pollux.init, or in state= "
            "what the script counts, or compute the rate from job.progress"
        )
