"""What is remembered of kinds of jobs: step times of earlier jobs of a kind, and their total work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from pollux.core import Prior
from pollux.goodput.batch import BatchLimits
from pollux.goodput.corrected import corrected
from pollux.goodput.efficiency import Efficiency
from pollux.goodput.fit import Observation, fit
from pollux.goodput.model import GoodputModel
from pollux.goodput.throughput import PublishedThroughput, ThroughputModel

__all__ = ["KindMemory", "ModelBank"]

# The most that is remembered: enough for a kind's curve, little enough to be written with every state.
_MOST_ROWS = 128
_MOST_TOTALS = 16
_MOST_KINDS = 1000
_MOST_WORKS = 64
# A time that changed by less than this share is not stored again.
_SAME = 0.03

_Place = tuple[str, int, int, int]
"""GPU type, nodes, GPUs, and the local batch in half octaves."""


@dataclass(frozen=True, slots=True)
class KindMemory:
    """One kind: the newest step time at each place, the noise at a job's start, the work of ended jobs.

    `works` holds that work for each command, `totals` for all of them.
    """

    limits: BatchLimits
    efficiency: Efficiency
    efficiency_at: float
    rows: Mapping[_Place, Observation] = field(default_factory=dict)
    totals: tuple[float, ...] = ()
    learned_at: float = 0.0
    throughputs: Mapping[str, PublishedThroughput] = field(default_factory=dict)
    works: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def priors(self) -> Mapping[str, Prior | None]:
        """What to expect of a new job of the kind, for each command that is known, and as '' for any other."""
        general = self.prior()
        by_work = {} if general is None else {w: replace(general, total=median(t)) for w, t in self.works.items()}
        return {"": general, **by_work}

    def prior(self) -> Prior | None:
        """What to expect of a new job of the kind; `None` while nothing was measured."""
        if not self.throughputs:
            return None
        models = {name: self._corrected(name) for name in self.throughputs}
        newest = list(models.values())[-1]
        by_type = {name: model for name, model in models.items() if name}
        return Prior(
            GoodputModel(newest, self.efficiency, self.limits, by_type),
            largest_gpus=max(place[2] for place in self.rows),
            num_observations=len(self.rows),
            learned_at=self.learned_at,
            total=median(self.totals) if self.totals else None,
            observations=tuple(self.rows.values()),
        )

    def _corrected(self, gpu_type: str) -> ThroughputModel:
        rows = [row for place, row in self.rows.items() if place[0] == gpu_type]
        return corrected(self.throughputs[gpu_type], rows)


@dataclass(frozen=True, slots=True)
class ModelBank:
    """Memories by kind of job; immutable: each change returns a new bank."""

    kinds: Mapping[str, KindMemory] = field(default_factory=dict)
    priors: Mapping[str, Mapping[str, Prior | None]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, kinds: Mapping[str, KindMemory]) -> ModelBank:
        """A bank of these memories, for instance stored ones."""
        return cls(kinds, {kind: memory.priors() for kind, memory in kinds.items()})

    def prior(self, kind: str, work: str = "") -> Prior | None:
        """What is known of a kind before a job of it has run; its total is that of the same `work`, if known."""
        known = self.priors.get(kind, {})
        return known.get(work, known.get(""))

    def measured(
        self, kind: str, model: GoodputModel, place: tuple[str, int, int], local_batch: int, progress: float, at: float
    ) -> ModelBank:
        """The bank with the step time of a running job's own model at `place`: (GPU type, nodes, GPUs)."""
        gpu_type, num_nodes, num_gpus = place
        throughput = model.throughput_on(gpu_type)
        row = Observation(
            num_nodes,
            num_gpus,
            local_batch,
            float(throughput.compute_seconds(float(local_batch))),
            float(throughput.step_seconds(float(num_nodes), float(num_gpus), float(local_batch))),
        )
        memory = self.kinds.get(kind) or KindMemory(model.limits, model.efficiency, math.inf)
        key = (*place, round(2.0 * math.log2(max(local_batch, 1))))
        known = memory.rows.get(key)
        earlier = progress < memory.efficiency_at
        if known is not None and _alike(known, row) and not earlier:
            return self
        if earlier:
            memory = replace(memory, efficiency=model.efficiency, efficiency_at=progress, limits=model.limits)
        if known is None or not _alike(known, row):
            memory = _with_row(memory, key, row, at)
        return self._with(kind, memory)

    def ended(self, kind: str, total: float, work: str = "") -> ModelBank:
        """The bank with the useful samples of an ended job, also for jobs with the same `work`."""
        memory = self.kinds.get(kind)
        if memory is None or not (math.isfinite(total) and total > 0.0):
            return self
        works = {name: totals for name, totals in memory.works.items() if name != work}
        if work:
            works[work] = (*memory.works.get(work, ()), total)[-_MOST_TOTALS:]
        works = dict(list(works.items())[-_MOST_WORKS:])
        return self._with(kind, replace(memory, totals=(*memory.totals, total)[-_MOST_TOTALS:], works=works))

    def _with(self, kind: str, memory: KindMemory) -> ModelBank:
        kinds = {**self.kinds, kind: memory}
        priors = {**self.priors, kind: memory.priors()}
        if len(kinds) > _MOST_KINDS:
            oldest = min(kinds, key=lambda name: kinds[name].learned_at)
            del kinds[oldest], priors[oldest]
        return ModelBank(kinds, priors)


def _alike(a: Observation, b: Observation) -> bool:
    return abs(a.step_seconds - b.step_seconds) <= _SAME * a.step_seconds and (
        abs(a.compute_seconds - b.compute_seconds) <= _SAME * a.compute_seconds
    )


def _with_row(memory: KindMemory, key: _Place, row: Observation, at: float) -> KindMemory:
    rows = {place: known for place, known in memory.rows.items() if place != key}
    rows[key] = row
    rows = dict(list(rows.items())[-_MOST_ROWS:])
    gpu_type = key[0]
    mine = [known for place, known in rows.items() if place[0] == gpu_type]
    found = fit(mine, memory.throughputs.get(gpu_type)).parameters
    throughputs = {name: model for name, model in memory.throughputs.items() if name != gpu_type}
    if found is not None:
        throughputs[gpu_type] = found
    return replace(memory, rows=rows, learned_at=at, throughputs=throughputs)
