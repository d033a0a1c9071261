"""The values that all other rooms use; standard library only, no behaviour beyond checking and planning."""

from __future__ import annotations

from pollux.core.check import Violation, check
from pollux.core.cluster import Cluster, Node, Queue
from pollux.core.errors import BrokenDecision, IllegalTransition, InvalidInput, PolluxError, UnknownName, choices
from pollux.core.job import FixedBatchOracle, GoodputFunction, JobLimits, JobView, Prior, is_gpu_type
from pollux.core.placement import NOWHERE, Allocation, Placement
from pollux.core.plan import Change, plan
from pollux.core.snapshot import BatchMode, Decision, Policy, Reason, Snapshot

__all__ = [
    "NOWHERE",
    "Allocation",
    "BatchMode",
    "BrokenDecision",
    "Change",
    "Cluster",
    "Decision",
    "FixedBatchOracle",
    "GoodputFunction",
    "IllegalTransition",
    "InvalidInput",
    "JobLimits",
    "JobView",
    "Node",
    "Placement",
    "Policy",
    "PolluxError",
    "Prior",
    "Queue",
    "Reason",
    "Snapshot",
    "UnknownName",
    "Violation",
    "check",
    "choices",
    "is_gpu_type",
    "plan",
]
