"""Many runs: every workload under every policy, in one process or several, with the same results."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pollux.policies as registry
from pollux.core import InvalidInput, UnknownName
from pollux.sim.applications.application import Application
from pollux.sim.simulation.simulation import RunOutcome, SimulationSettings, simulate
from pollux.sim.workloads.workload import Workload, check_applications

__all__ = ["PolicyChoice", "check_runs", "choose_policies", "compare"]

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy by name, and the options to make it with."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict)


def choose_policies(names: Sequence[str], options: Mapping[str, object]) -> tuple[PolicyChoice, ...]:
    """The policies, each with the options that it has; refuses an option that none of them has."""
    if not names:
        raise InvalidInput(f"no policy given; choose from {', '.join(registry.names())}")
    chosen: list[PolicyChoice] = []
    for name in names:
        if any(choice.name == name for choice in chosen):
            raise InvalidInput(f"policy '{name}' is given twice; leave one out")
        accepted = registry.options(name)
        choice = PolicyChoice(name, {key: value for key, value in options.items() if key in accepted})
        registry.create(choice.name, **choice.options)
        chosen.append(choice)
    return tuple(chosen)


def check_runs(
    workloads: Sequence[Workload],
    policies: Sequence[PolicyChoice],
    applications: Mapping[str, Application],
    settings: SimulationSettings,
) -> None:
    """Refuse, before any run, a workload that would fail later, with the line at fault.

    If a policy keeps users' requests, they must fit on the nodes on which the application was measured.
    """
    rigid = [policy.name for policy in policies if registry.create(policy.name).batch == "fixed"]
    for workload in workloads:
        check_applications(workload, applications, settings.num_gpus)
        for job in workload.jobs if rigid else ():
            num_nodes = -(-job.num_gpus // settings.gpus_per_node)
            most = applications[job.application].max_nodes
            if num_nodes > most:
                where = job.source or f"job '{job.name}'"
                raise InvalidInput(
                    f"{where}, field 'num_replicas': '{job.num_gpus}': needs {num_nodes} nodes of "
                    f"{settings.gpus_per_node} GPUs, but {job.application} was measured on at most {most}; "
                    f"ask for fewer, or leave out {rigid[0]}"
                )


def compare(
    workloads: Sequence[Workload],
    policies: Sequence[PolicyChoice],
    applications: Mapping[str, Application],
    settings: SimulationSettings,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[RunOutcome, ...]:
    """Every workload under every policy: by workload, then by policy, in the order given.

    `progress(done, total)` counts finished jobs over all runs. Several `workers` are processes that each
    do one run at a time; nothing but timings depends on their number.
    """
    if workers < 1:
        raise InvalidInput(f"workers is {workers}; give at least 1")
    check_runs(workloads, policies, applications, settings)
    runs = [(workload, policy) for workload in workloads for policy in policies]
    total = sum(len(workload.jobs) for workload, _ in runs)
    report = progress or (lambda done, total: None)
    report(0, total)
    if min(workers, len(runs)) > 1:
        return _in_processes(runs, applications, settings, workers, lambda done: report(done, total))
    outcomes: list[RunOutcome] = []
    before = 0
    for workload, policy in runs:
        start = before
        outcomes.append(
            simulate(
                workload,
                registry.create(policy.name, **policy.options),
                applications,
                settings,
                lambda done, _, start=start: report(start + done, total),  # type: ignore[misc]
            )
        )
        before += len(workload.jobs)
    return tuple(outcomes)


@dataclass(slots=True)
class _World:
    """The arguments that a worker process gets once."""

    applications: Mapping[str, Application]
    settings: SimulationSettings
    done: Any


_world: _World | None = None


def _begin(applications: Mapping[str, Application], settings: SimulationSettings, done: Any) -> None:
    global _world
    # The terminal sends Ctrl-C to every process; only the parent handles it, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _world = _World(applications, settings, done)


def _run(index: int, workload: Workload, policy: PolicyChoice) -> RunOutcome:
    assert _world is not None
    world = _world

    def report(done: int, _: int) -> None:
        world.done[index] = done

    try:
        made = registry.create(policy.name, **policy.options)
        return simulate(workload, made, world.applications, world.settings, report)
    except UnknownName as error:
        # `UnknownName` takes more than a message, so it could not be unpickled.
        raise InvalidInput(str(error)) from None


def _in_processes(
    runs: Sequence[tuple[Workload, PolicyChoice]],
    applications: Mapping[str, Application],
    settings: SimulationSettings,
    workers: int,
    report: Callable[[int], None],
) -> tuple[RunOutcome, ...]:
    # Not forked, since the caller may have threads, such as that of a progress bar.
    context = multiprocessing.get_context("spawn")
    done: Any = context.Array("q", len(runs), lock=False)
    strangers = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(min(workers, len(runs)), context, _begin, (applications, settings, done))
    try:
        with _interrupts_held():
            futures = [pool.submit(_run, index, *run) for index, run in enumerate(runs)]
        _watch(futures, lambda: report(sum(done)))
        outcomes = tuple(future.result() for future in futures)
    except BaseException:
        # Children end first; otherwise the pool's thread would write to closed pipes.
        for child in set(multiprocessing.active_children()) - strangers:
            child.terminate()
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    pool.shutdown()
    return outcomes


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C until the block ends; processes that start in it ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(futures: Sequence[Future[RunOutcome]], report: Callable[[], None]) -> None:
    """Wait until all have ended or one has failed."""
    pending: set[Future[RunOutcome]] = set(futures)
    while pending:
        ended, pending = wait(pending, _POLL_SECONDS, FIRST_EXCEPTION)
        report()
        for future in ended:
            future.result()
