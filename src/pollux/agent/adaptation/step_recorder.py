"""Adds the measured times of steps to the profile, by placement and size."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from pollux.agent.adaptation.measurements import ReplicaExchange, StepTime
from pollux.agent.adaptation.step_profile import Profile, ProfileKey

__all__ = ["StepRecorder"]

_RESTS_KEPT = 64


class StepRecorder:
    """Records the steps of one job on one type of GPU, at the present number of replicas and nodes."""

    def __init__(self, profile: Profile, replicas: ReplicaExchange, gpu_type: str) -> None:
        self._profile = profile
        self._replicas = replicas
        self._gpu_type = gpu_type
        self._rests: deque[float] = deque(maxlen=_RESTS_KEPT)

    def forget_rests(self) -> None:
        """Forget the parts of step times that are not computing: the replicas have changed."""
        self._rests.clear()

    def record(self, times: Sequence[StepTime], includes_data_wait: bool) -> None:
        """Add steps to the profile; `includes_data_wait`: their compute times contain the wait for data."""
        replicas = self._replicas
        for step in times:
            compute = step.compute_seconds
            if compute is not None and not includes_data_wait:
                compute += step.data_seconds / step.repeats
            key = ProfileKey(replicas.num_nodes, replicas.num_replicas, step.local_batch, self._gpu_type)
            if replicas.num_replicas == 1 and compute is not None and not step.measured:
                self._rests.append(step.step_seconds - step.repeats * compute)
            if replicas.num_replicas == 1 and step.measured:
                self._record_part(key, compute, step)
                continue
            self._profile.add(
                key,
                compute_seconds=compute,
                step_seconds=step.step_seconds,
                data_seconds=step.data_seconds,
                repeats=step.repeats,
            )

    def _record_part(self, key: ProfileKey, compute: float | None, step: StepTime) -> None:
        """With one replica, add a part of a measured step as a step: its size separates αc from βc early on.

        The time that is not computing comes from steps without measuring, so that the cost of measuring does not count.
        """
        if compute is None or not self._rests:
            return
        seconds = compute + max(statistics.median(self._rests), 0.0)
        data = step.data_seconds / step.repeats
        self._profile.add(key, compute_seconds=None, step_seconds=seconds, data_seconds=data, repeats=1)
