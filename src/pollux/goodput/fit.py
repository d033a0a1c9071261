"""Fit of the throughput parameters to measured step times, with optimistic priors for what was not yet seen.

The loss, the priors and what is reported live here; the solver is in `solver`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from pollux.goodput.fabric import AllReduce, FabricThroughput
from pollux.goodput.loss import CONSTANT_SLOTS, GROWTH_SLOTS, LOWER, FitProblem
from pollux.goodput.solver import minimise
from pollux.goodput.throughput import FloatArray, PublishedThroughput, SyncBasis, published_sync_basis

__all__ = ["FitResult", "Observation", "fit", "fit_fabric"]
