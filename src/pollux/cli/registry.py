"""The sub-commands of `pollux`: the module of each, which is imported on use, and a summary."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import typer
import typer.main
from typer.core import TyperGroup

__all__ = ["COMMANDS", "LazyGroup"]

COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("pollux.cli.commands.jobs.run:app", "Run one job on this machine, without a service"),
    "up": ("pollux.cli.commands.service.up:up", "Start the service on this machine: scheduler and API"),
    "down": ("pollux.cli.commands.service.up:down", "Stop the service"),
    "submit": ("pollux.cli.commands.jobs.submit:app", "Submit jobs and print the plan for each"),
    "ls": ("pollux.cli.commands.jobs.ls:ls", "List jobs: state, GPUs, batch, goodput, progress, ETA and why"),
    "top": ("pollux.cli.commands.cluster.top:top", "Watch nodes, jobs and decisions live"),
    "show": ("pollux.cli.commands.jobs.show:show", "Show everything about a job"),
    "explain": (
        "pollux.cli.commands.jobs.show:explain",
        "Explain why a job has the GPUs it has, and what to do about it",
    ),
    "logs": ("pollux.cli.commands.jobs.logs:logs", "Print the output of a job"),
    "cancel": ("pollux.cli.commands.jobs.control:cancel", "Cancel jobs for good"),
    "pause": ("pollux.cli.commands.jobs.control:pause", "Take the GPUs from jobs until they are resumed"),
    "resume": ("pollux.cli.commands.jobs.control:resume", "Let paused jobs run again"),
    "resize": ("pollux.cli.commands.jobs.control:resize", "Change how many GPUs a job may have"),
    "queues": ("pollux.cli.commands.cluster.queues:app", "List queues: weight, quota, GPUs in use, jobs"),
    "nodes": (
        "pollux.cli.commands.cluster.nodes:app",
        "List nodes: GPUs, type, GPUs in use, jobs",
    ),
    "simulate": (
        "pollux.cli.commands.simulation.simulate:simulate",
        "Simulate workloads under scheduling policies and compare completion times, fairness and cost",
    ),
    "whatif": (
        "pollux.cli.commands.simulation.whatif:whatif",
        "Replay this cluster's own history under another size or policy",
    ),
    "workload": ("pollux.cli.commands.simulation.workload:app", "Make workloads: who submits which job when"),
    "policies": (
        "pollux.cli.commands.simulation.policies:policies",
        "List the scheduling policies, and where each of them runs",
    ),
    "backends": (
        "pollux.cli.commands.service.backends:backends",
        "List the backends, and what is missing for those that do not work",
    ),
    "doctor": ("pollux.cli.commands.service.doctor:doctor", "Check what works on this machine and what is missing"),
    "config": ("pollux.cli.commands.service.config:config", "Show the settings in force and where each comes from"),
    "history": ("pollux.cli.commands.cluster.history:app", "Export and import what the service has recorded"),
}
"""Name to (module:attribute, summary); the attribute is a function or a `typer.Typer`."""


def _load(name: str) -> Any:
    module, _, attribute = COMMANDS[name][0].partition(":")
    target: Callable[..., None] | typer.Typer = getattr(importlib.import_module(module), attribute)
    if not isinstance(target, typer.Typer):
        program = typer.Typer(rich_markup_mode=None, add_completion=False)
        program.command(name)(target)
        target = program
    target.rich_markup_mode = None
    target._add_completion = False
    command: Any = typer.main.get_command(target)
    command.name = name
    parameters = command.get_params
    command.get_params = lambda ctx: _convert_if_given(parameters(ctx))
    return command


class _IfGiven:
    """Converts a value only if there is one."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def coerce(self, value: Any, **context: Any) -> Any:
        return None if value is None else self._make().coerce(value, **context)


def _convert_if_given(parameters: list[Any]) -> list[Any]:
    """Skip the conversion of None: some versions of typer import pydantic for it, a third of the time of `ls`."""
    for parameter in parameters:
        make = getattr(parameter, "get_runtime_param", None)
        single = parameter.nargs == 1 and not getattr(parameter, "multiple", False)
        if make is not None and single and "get_runtime_param" not in vars(parameter):
            parameter.get_runtime_param = functools.partial(_IfGiven, make)
    return parameters


class _OnUse(MutableMapping[str, Any]):
    """The commands by name; each is made when it is first used."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = _load(name)
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class LazyGroup(TyperGroup):
    """A group that lists its commands without importing them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _OnUse()

    def get_params(self, ctx: Any) -> list[Any]:
        """The options before the command."""
        return _convert_if_given(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the registry."""
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list in `pollux --help`, from the registry's summaries."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])
