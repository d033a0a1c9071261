"""Events as plain JSON values and back, for logs, exports and snapshots of the controller's state.

Every shape has a version; older versions are converted when they are read.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

from pollux.controller.messages import events
from pollux.controller.messages.events import Event, JobReported, JobSpec
from pollux.controller.state.records import JobRecord
from pollux.core import Decision, GoodputFunction, InvalidInput, Placement, PolluxError
from pollux.core.errors import StoreFailed
from pollux.goodput import CorrectedThroughput, FabricThroughput, GoodputModel, PublishedThroughput, ThroughputModel
from pollux.goodput.fabric import AllReduce
from pollux.wire.dataclass_codec import (
    SCALAR_READERS,
    Misfit,
    ValueReader,
    ValueWriter,
    as_it_is,
    instead_of,
    read_number,
    shown,
)

__all__ = [
    "UPCASTS",
    "Upcast",
    "decode",
    "decode_value",
    "encode",
    "encode_model",
    "encode_value",
]

_Value = TypeVar("_Value")
Upcast = Callable[[dict[str, Any]], dict[str, Any]]
"""Converts an event from one version's shape to the next, without `type` and `v`."""

UPCASTS: dict[tuple[str, int], Upcast] = {}
"""By type and the version that is read: `("job-submitted", 1)` turns version 1 into version 2."""

_INFINITIES = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}

# Oracles exist in simulations only, a policy's memory is never logged, and the rest is derived.
_UNWRITTEN: dict[type, tuple[str, ...]] = {
    JobSpec: ("oracle",),
    Decision: ("memory",),
    JobRecord: ("seen", "written"),
}


def _dashed(name: str) -> str:
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).removeprefix("-")


_NAMES: dict[type[Event], str] = {
    kind: _dashed(kind.__name__)
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
_TYPES = {name: kind for kind, name in _NAMES.items()}


def encode(event: Event) -> dict[str, Any]:
    """`{"type": "job-submitted", "v": 1, ...}` of plain JSON values; infinities are the words `inf` and `-inf`.

    A goodput function that is not a `GoodputModel` cannot be written: InvalidInput.
    """
    name = _NAMES.get(type(event))
    if name is None:
        raise InvalidInput(
            f"event {type(event).__name__} has no written form; use one of pollux.controller.messages.events"
        )
    if isinstance(event, JobReported) and event.goodput is not None:
        _check_model(event.goodput)
    return {"type": name, "v": event.VERSION, **encode_value(event)}


def decode(value: Any) -> Event:
    """The event that `encode` wrote, by this version or an older one.

    A type or version from the future is StoreFailed; a value of the wrong shape is InvalidInput that names the field.
    """
    if not isinstance(value, dict):
        raise InvalidInput(instead_of(value, "a mapping with 'type' and 'v'").message("an event"))
    body = dict(value)
    name, version = body.pop("type", None), body.pop("v", None)
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise StoreFailed(f"event type {shown(name)} is unknown to this version of Pollux; upgrade to read it")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InvalidInput(instead_of(version, "a whole number, 1 or more").message(f"{name}: v"))
    if version > kind.VERSION:
        raise StoreFailed(
            f"event '{name}' has version {version}, this version of Pollux knows {kind.VERSION}; upgrade to read it"
        )
    for old in range(version, kind.VERSION):
        body = UPCASTS[name, old](body)
    return decode_value(kind, body, name)


def encode_value(value: Any) -> Any:
    """Plain JSON values of the parts of events: specs, limits, nodes, queues, placements, reasons, models."""
    try:
        return _write(value)
    except Misfit as misfit:
        raise InvalidInput(misfit.message(type(value).__name__)) from None


def decode_value(kind: type[_Value], value: Any, where: str = "") -> _Value:
    """The value of that type that `encode_value` wrote; `where` names it in errors. Refuses unknown fields."""
    try:
        return typing.cast("_Value", _read(kind, value))
    except Misfit as misfit:
        raise InvalidInput(misfit.message(where or kind.__name__)) from None


def encode_model(model: GoodputFunction) -> dict[str, Any]:
    """A learned model as numbers: throughput (and by GPU type), efficiency, limits of the batch."""
    _check_model(model)
    return typing.cast("dict[str, Any]", encode_value(model))


def _check_model(model: GoodputFunction) -> None:
    """Refuse a goodput function of any other class: it could not be read again."""
    if not isinstance(model, GoodputModel):
        raise InvalidInput(
            f"a goodput function of type {type(model).__name__} has no written form; report a GoodputModel"
        )
    for throughput in (model.throughput, *model.by_type.values()):
        if not isinstance(throughput, PublishedThroughput | FabricThroughput | CorrectedThroughput):
            raise InvalidInput(
                f"a throughput model of type {type(throughput).__name__} has no written form; "
                "report PublishedThroughput, FabricThroughput or CorrectedThroughput"
            )


@dataclass(frozen=True, slots=True)
class _WrittenThroughput:
    """A throughput model as it is written: its kind and its parameters in their order.

    `fabric` adds the algorithm, `corrected` the places: nodes, GPUs, correction.
    """

    kind: Literal["published", "fabric", "corrected"]
    parameters: tuple[float, float, float, float, float, float, float]
    algorithm: AllReduce | None = None
    places: tuple[tuple[int, int, float], ...] = ()


def _write_corrected(model: CorrectedThroughput, depth: int) -> dict[str, Any]:
    places = [[nodes, gpus, float(value)] for nodes, gpus, value in model.places]
    return _write_published(model.base, depth) | {"kind": "corrected", "places": places}


def _write_published(model: PublishedThroughput | FabricThroughput, depth: int) -> dict[str, Any]:
    return {"kind": "published", "parameters": [float(number) for number in model.parameters]}


def _write_fabric(model: FabricThroughput, depth: int) -> dict[str, Any]:
    return _write_published(model, depth) | {"kind": "fabric", "algorithm": model.algorithm}


def _read_throughput(value: Any) -> ThroughputModel:
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if kind not in ("published", "fabric", "corrected"):
        raise StoreFailed(
            f"a throughput model is of the kind {shown(kind)}, unknown to this version of Pollux; upgrade to read it"
        )
    written = _read(_WrittenThroughput, value)
    try:
        if kind == "published":
            return PublishedThroughput(*written.parameters)
        if kind == "corrected":
            return CorrectedThroughput(PublishedThroughput(*written.parameters), written.places)
        return FabricThroughput(*written.parameters, algorithm=written.algorithm)
    except PolluxError as error:
        raise Misfit(f"does not fit: {error}") from None


def _write_number(value: Any, depth: int) -> int | float | str:
    if isinstance(value, Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _read_number(value: Any) -> float:
    return _INFINITIES[value] if isinstance(value, str) and value in _INFINITIES else read_number(value)


def _write_placement(value: Placement, depth: int) -> list[Any] | dict[str, Any]:
    shares = [[node, int(count)] for node, count in value.shares]
    return {"halves": shares} if value.shared else shares


def _read_placement(value: Any) -> Placement:
    shared = isinstance(value, Mapping) and set(value) == {"halves"}
    try:
        return Placement(_read(tuple[tuple[str, int], ...], value["halves"] if shared else value), shared)
    except PolluxError as error:
        raise Misfit(f"does not fit: {error}") from None


_write: ValueWriter = ValueWriter(
    {
        type(None): as_it_is,
        bool: as_it_is,
        str: lambda value, depth: str(value),
        float: _write_number,
        int: _write_number,
        Real: _write_number,
        Placement: _write_placement,
        PublishedThroughput: _write_published,
        FabricThroughput: _write_fabric,
        CorrectedThroughput: _write_corrected,
    },
    unwritten=_UNWRITTEN,
)
_read: ValueReader = ValueReader(
    {
        **SCALAR_READERS,
        float: _read_number,
        Placement: _read_placement,
        ThroughputModel: _read_throughput,
        GoodputFunction: lambda value: _read(GoodputModel, value),
    },
    unwritten=_UNWRITTEN,
)
