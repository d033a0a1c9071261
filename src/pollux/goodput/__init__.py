"""The goodput of a job: throughput, statistical efficiency, their fit to measurements, and the best batch.

Nothing here knows of clusters, other jobs or clocks.
"""

from pollux.goodput.batch import BatchChoice, BatchLimits, best_batch, published_best_batch, split_total
from pollux.goodput.corrected import CorrectedThroughput, corrected
from pollux.goodput.efficiency import Efficiency
from pollux.goodput.fabric import FabricThroughput
from pollux.goodput.fit import FitResult, Observation, fit, fit_fabric
from pollux.goodput.model import GoodputModel
from pollux.goodput.tables import BatchTables, batch_tables, goodput_tables
from pollux.goodput.throughput import PublishedThroughput, ThroughputModel

__all__ = [
    "BatchChoice",
    "BatchLimits",
    "BatchTables",
    "CorrectedThroughput",
    "Efficiency",
    "FabricThroughput",
    "FitResult",
    "GoodputModel",
    "Observation",
    "PublishedThroughput",
    "ThroughputModel",
    "batch_tables",
    "best_batch",
    "corrected",
    "fit",
    "fit_fabric",
    "goodput_tables",
    "published_best_batch",
    "split_total",
]
