"""The policies, by name; each in a file of its own, loaded on use."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, cast

from pollux.core import Policy, UnknownName

__all__ = ["create", "names", "options", "summary"]

_REGISTRY: Mapping[str, str] = {
    "pollux": "pollux.policies.pollux:Pollux",
    "pollux-genetic": "pollux.policies.genetic:PolluxGenetic",
    "castor": "pollux.policies.castor:Castor",
    "tiresias": "pollux.policies.tiresias:Tiresias",
    "optimus-oracle": "pollux.policies.optimus:OptimusOracle",
    "fifo": "pollux.policies.fifo:Fifo",
    "srtf": "pollux.policies.srtf:Srtf",
    "las": "pollux.policies.las:Las",
}


def names() -> tuple[str, ...]:
    """Every registered name, in the order of the registry."""
    return tuple(_REGISTRY)


def _load(name: str) -> type[Any]:
    target = _REGISTRY.get(name)
    if target is None:
        raise UnknownName("policy", name, _REGISTRY)
    module, _, attribute = target.partition(":")
    return cast(type[Any], getattr(importlib.import_module(module), attribute))


def create(name: str, **options: object) -> Policy:
    """A policy by name, with the options its class takes."""
    return cast(Policy, _load(name)(**options))


def options(name: str) -> frozenset[str]:
    """The options that a policy takes."""
    return frozenset(inspect.signature(_load(name)).parameters)


def summary(name: str) -> str:
    """The first line of what a policy's module says of itself."""
    module = importlib.import_module(_load(name).__module__)
    return (module.__doc__ or "").strip().splitlines()[0]
