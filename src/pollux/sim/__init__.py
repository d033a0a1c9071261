"""The simulator: the controller's first driver, with a virtual clock and simulated jobs."""

from __future__ import annotations

from pollux.sim.applications.application import Application, FixedConfiguration
from pollux.sim.applications.profiles import load_profiles
from pollux.sim.results.fairness import IsolatedTimes, finish_time_fairness
from pollux.sim.results.metrics import bounds, configuration, describe_world, document, measure, to_json
from pollux.sim.simulation.compare import PolicyChoice, check_runs, choose_policies, compare
from pollux.sim.simulation.simulation import JobOutcome, RunOutcome, SimulationSettings, simulate
from pollux.sim.workloads.builtin import builtin_applications, builtin_workload
from pollux.sim.workloads.generate import GenerateSettings, generate_workload
from pollux.sim.workloads.workload import Workload, WorkloadJob, check_applications, read_workload, write_workload

__all__ = [
    "Application",
    "FixedConfiguration",
    "GenerateSettings",
    "IsolatedTimes",
    "JobOutcome",
    "PolicyChoice",
    "RunOutcome",
    "SimulationSettings",
    "Workload",
    "WorkloadJob",
    "bounds",
    "builtin_applications",
    "builtin_workload",
    "check_applications",
    "check_runs",
    "choose_policies",
    "compare",
    "configuration",
    "describe_world",
    "document",
    "finish_time_fairness",
    "generate_workload",
    "load_profiles",
    "measure",
    "read_workload",
    "simulate",
    "to_json",
    "write_workload",
]
