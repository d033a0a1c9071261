"""The simulator: the controller's first driver, with a virtual clock and simulated jobs."""

from __future__ import annotations

from pollux.sim.applications.application import Application
from pollux.sim.applications.profiles import load_profiles
from pollux.sim.results.fairness import IsolatedTimes
from pollux.sim.results.metrics import bounds, configuration, describe_world, document, measure, to_json
from pollux.sim.simulation.compare import PolicyChoice, check_runs, choose_policies, compare
from pollux.sim.simulation.simulation import SimulationSettings, simulate
from pollux.sim.workloads.builtin import builtin_applications, builtin_workload
from pollux.sim.workloads.workload import Workload, read_workload

__all__ = [
    "Application",
    "IsolatedTimes",
    "PolicyChoice",
    "SimulationSettings",
    "Workload",
    "bounds",
    "builtin_applications",
    "builtin_workload",
    "check_runs",
    "choose_policies",
    "compare",
    "configuration",
    "describe_world",
    "document",
    "load_profiles",
    "measure",
    "read_workload",
    "simulate",
    "to_json",
]
