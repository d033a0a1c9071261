"""From what an agent reports to the model that policies ask."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pollux.core import GoodputFunction, InvalidInput
from pollux.wire.report import ModelReport

if TYPE_CHECKING:
    from pollux.goodput import GoodputModel

__all__ = ["limited", "model_from"]

_NUM_PARAMETERS = 7
_MOST_TYPES = 16


def model_from(
    report: ModelReport, local_batch_max: int | None = None, before: GoodputFunction | None = None
) -> GoodputModel:
    """The reported model; one GPU takes at most `local_batch_max` samples at once where that is known.

    Its throughput is that of the GPU type it was measured on; what `before` knew of other types stays. Types that were
    never measured are taken for like the newest.
    """
    # Imported here because it brings numpy, which those who only keep facts do without.
    from pollux.goodput import BatchLimits, Efficiency, GoodputModel, PublishedThroughput

    if len(report.parameters) != _NUM_PARAMETERS:
        raise InvalidInput(
            f"a model has {len(report.parameters)} parameters; give {_NUM_PARAMETERS}: αc βc αn βn αr βr γ"
        )
    limits = BatchLimits(
        report.initial_batch, report.max_batch, report.local_batch_min, report.local_batch_max, report.accumulation
    )
    efficiency = Efficiency.from_estimates(report.initial_batch, report.grad_sqr, report.grad_var)
    throughput = PublishedThroughput(*report.parameters)
    by_type = {} if not isinstance(before, GoodputModel) else dict(before.by_type)
    if report.gpu_type:
        # The newest last: where there are too many, the oldest go.
        by_type.pop(report.gpu_type, None)
        by_type = dict([*by_type.items(), (report.gpu_type, throughput)][-_MOST_TYPES:])
    model = GoodputModel(throughput, efficiency, limits, by_type)
    found = limited(model, local_batch_max)
    assert isinstance(found, GoodputModel)
    return found


def limited(model: GoodputFunction | None, local_batch_max: int | None) -> GoodputFunction | None:
    """The same model where one GPU takes no more than `local_batch_max` samples at once (None: as it is)."""
    if model is None or local_batch_max is None:
        return model
    from pollux.goodput import GoodputModel

    if not isinstance(model, GoodputModel) or model.limits.local_max <= local_batch_max:
        return model
    most = max(local_batch_max, 1)
    limits = replace(model.limits, local_max=most, local_min=min(model.limits.local_min, most))
    return replace(model, limits=limits)
