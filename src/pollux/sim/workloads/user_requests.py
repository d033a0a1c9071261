"""The GPUs and batches that users would choose, by the time of a whole training on packed GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from pollux.core import InvalidInput
from pollux.sim.applications.application import Application
from pollux.sim.applications.isolated import recorded_runs

__all__ = ["Users"]

_TUNED_SPEEDUP_PER_GPU = (0.5, 0.8)
_TUNED_GPUS = 16


class Users:
    """Configurations (GPUs, total batch) that make sense for each application on one cluster."""

    def __init__(self, applications: Mapping[str, Application], nodes: int, gpus_per_node: int) -> None:
        self.applications = applications
        self._nodes, self._gpus_per_node = nodes, gpus_per_node
        self._known: dict[tuple[str, int], dict[int, float]] = {}
        self._tuned: dict[str, tuple[tuple[int, int], ...]] = {}

    def least_gpu_hours(self, name: str) -> float:
        """GPU time of the best run on one GPU, or on the fewest on which the application runs."""
        fewest = self._fewest(name)
        return fewest * min(self._runs(name, fewest).values()) / 3600.0

    def tuned(self, name: str) -> tuple[tuple[int, int], ...]:
        """The fastest batch of each GPU count with a sensible speed-up per GPU.

        Sensible is 0.5 to 0.8, over the best run on one GPU; if no count has that, the nearest one is
        taken. Counts are those that people type, powers of two and six times these, up to 16 or a quarter
        of the cluster. An application with a fixed configuration has only that one.
        """
        if name not in self._tuned:
            fixed = self._fixed(name)
            self._tuned[name] = self._tune(name) if fixed is None else (fixed,)
        return self._tuned[name]

    def realistic(self, name: str, num_gpus: int) -> tuple[tuple[int, int], ...]:
        """That many GPUs, within cluster and application, with every recorded batch that is nearly right.

        Nearly right is within a factor of two of the fastest for that count.
        """
        count = max(self._fewest(name), min(num_gpus, self._most(name)))
        while not self._runs(name, count):
            count -= 1
        runs = self._runs(name, count)
        best = min(runs, key=lambda batch: (runs[batch], batch))
        return tuple((count, batch) for batch in runs if best <= 2 * batch <= 4 * best)

    def _runs(self, name: str, num_gpus: int) -> dict[int, float]:
        key = (name, num_gpus)
        if key not in self._known:
            self._known[key] = recorded_runs(self.applications[name], num_gpus, self._gpus_per_node)
        return self._known[key]

    def _most(self, name: str) -> int:
        application = self.applications[name]
        num_nodes = min(self._nodes, application.max_nodes)
        return min(num_nodes * self._gpus_per_node, application.limits.maximum // application.limits.local_min)

    def _fewest(self, name: str) -> int:
        most = self._most(name)
        found = next((count for count in range(1, most + 1) if self._runs(name, count)), None)
        if found is None:
            raise InvalidInput(
                f"application '{name}': no recorded batch runs on 1 to {most} GPUs, {self._gpus_per_node} a "
                "node; measure smaller placements, or raise nodes"
            )
        return found

    def _fixed(self, name: str) -> tuple[int, int] | None:
        fixed, available = self.applications[name].fixed, self._nodes * self._gpus_per_node
        if fixed is None:
            return None
        if fixed.num_gpus > available:
            raise InvalidInput(
                f"application '{name}' runs on {fixed.num_gpus} GPUs and the cluster has {available}; "
                "raise nodes or gpus-per-node"
            )
        return fixed.num_gpus, fixed.batch_size

    def _tune(self, name: str) -> tuple[tuple[int, int], ...]:
        fewest, least_gpu_seconds = self._fewest(name), self.least_gpu_hours(name) * 3600.0
        most = max(_TUNED_GPUS, self._nodes * self._gpus_per_node // 4)
        most = max(fewest, min(most, self._most(name)))
        typed = {factor << power for factor in (1, 6) for power in range(most.bit_length())}
        low, high = _TUNED_SPEEDUP_PER_GPU
        misses: dict[tuple[int, int], float] = {}
        for count in sorted(count for count in typed | {fewest} if count <= most):
            runs = self._runs(name, count)
            if runs:
                batch = min(runs, key=lambda batch: (runs[batch], batch))
                speedup_per_gpu = least_gpu_seconds / (count * runs[batch])
                misses[count, batch] = max(low - speedup_per_gpu, speedup_per_gpu - high, 0.0)
        found = tuple(configuration for configuration, miss in misses.items() if miss == 0.0)
        return found or (min(misses, key=lambda configuration: misses[configuration]),)
