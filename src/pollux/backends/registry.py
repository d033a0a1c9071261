"""Finds backends by name; imports each on use.

A new backend begins here, with one line in `_REGISTRY`. Its class fits `backends.protocol.Backend`; where an engine
lends nodes it extends `backends.fleet.backend.FleetBackend` and supplies a `backends.nodes.provider.NodeProvider`. Its
tests inherit `pollux.testing.conformance.backends`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from pollux.backends.protocol import Backend
from pollux.core.errors import InvalidInput, UnknownName, choices

__all__ = ["available", "create", "head_of", "load", "names", "option_kinds", "options", "summary"]

_REGISTRY: Mapping[str, str] = {
    "local": "pollux.backends.local.backend:LocalBackend",
    "inline": "pollux.backends.inline.backend:InlineBackend",
    "ray": "pollux.backends.ray.backend:RayBackend",
    "slurm": "pollux.backends.slurm.backend:SlurmBackend",
}


def names() -> tuple[str, ...]:
    """Every registered name, in the order of the registry."""
    return tuple(_REGISTRY)


def load(name: str) -> type[Any]:
    """The class of a backend; UnknownName for a name that is not registered."""
    return cast(type[Any], getattr(_module(name), _REGISTRY[name].partition(":")[2]))


def options(name: str) -> frozenset[str]:
    """The options that a backend takes."""
    return frozenset(option_kinds(name))


def option_kinds(name: str) -> Mapping[str, str]:
    """The options that a backend takes, each with its type as written in the source."""
    backend = load(name)
    named = [each for each in inspect.signature(backend).parameters.values() if each.kind is not each.VAR_KEYWORD]
    more = fields(backend.options_class) if backend.options_class else ()
    return {**{each.name: str(each.annotation) for each in named}, **{each.name: str(each.type) for each in more}}


def create(name: str, **given: object) -> Backend:
    """A backend by name; InvalidInput for options that it does not have, or where it cannot work on this machine."""
    missing = available(name)
    if missing is not None:
        raise InvalidInput(f"backend '{name}' cannot be used here: {missing}")
    for option in given:
        if option not in options(name):
            raise InvalidInput(f"backend '{name}' has no option '{option}': {choices(option, options(name))}")
    return cast(Backend, load(name)(**given))


def head_of(name: str, given: Mapping[str, object]) -> str | None:
    """The address by which nodes of a backend with these options reach this machine; None: it is the only node."""
    return cast(str | None, load(name).head_of(given))


def summary(name: str) -> str:
    """The first line of the docstring of a backend's module."""
    return (_module(name).__doc__ or "").strip().splitlines()[0]


def available(name: str) -> str | None:
    """What is missing for a backend on this machine, and how to get it; None where it can be used."""
    return load(name).missing() or None


def _module(name: str) -> Any:
    if name not in _REGISTRY:
        raise UnknownName("backend", name, _REGISTRY)
    return importlib.import_module(_REGISTRY[name].partition(":")[0])
