"""The policies, by name; each in a file of its own, loaded on use."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, cast

from pollux.core import Policy, UnknownName

__all__ = ["create", "names", "options", "summary"]

_REGISTRY: Mapping[str, str] = {
    "pollux": "pollux.policies.elastic.pollux:Pollux",
    "pollux-genetic": "pollux.policies.elastic.genetic:PolluxGenetic",
    "castor": "pollux.policies.elastic.castor:Castor",
    "tiresias": "pollux.policies.rigid.tiresias:Tiresias",
    "optimus-oracle": "pollux.policies.elastic.optimus:OptimusOracle",
    "fifo": "pollux.policies.rigid.fifo:Fifo",
    "srtf": "pollux.policies.rigid.srtf:Srtf",
    "las": "pollux.policies.rigid.las:Las",
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
