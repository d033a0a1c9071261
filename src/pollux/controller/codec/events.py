"""Events as plain JSON values and back: what a log, an export and a snapshot of the controller's state are made of.

Where they are kept is the store's business. Shapes carry versions; older ones are brought up to date on reading.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

from pollux.controller.messages import events
from pollux.controller.messages.events import Event
from pollux.core import FixedBatchOracle, GoodputFunction, InvalidInput, Placement, PolluxError, UnknownName
from pollux.core.errors import StoreFailed
from pollux.goodput import BatchLimits, Efficiency, FabricThroughput, GoodputModel, PublishedThroughput, ThroughputModel

__all__ = [
    "UPCASTS",
    "Upcast",
    "decode",
    "decode_model",
    "decode_value",
    "encode",
    "encode_model",
    "encode_value",
]

_Value = TypeVar("_Value")
Upcast = Callable[[dict[str, Any]], dict[str, Any]]
"""From the shape of one version of an event to the next; `type` and `v` are not in it."""

UPCASTS: dict[tuple[str, int], Upcast] = {}
"""By type and the version that is read: `("job-submitted", 1)` turns version 1 into version 2."""

_INFINITIES = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}

# Left out on writing: an oracle exists in simulations only, a policy's memory never enters the log.
_UNWRITTEN = {("JobSpec", "oracle"), ("Decision", "memory")}


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
    return {"type": name, "v": event.VERSION, **_encode_fields(event)}


def decode(value: Any) -> Event:
    """The event that `encode` wrote, by this version or an older one.

    A type or version from the future is StoreFailed; a value of the wrong shape is InvalidInput that names the field.
    """
    if not isinstance(value, dict):
        raise InvalidInput(f"an event is {_shown(value)}; it must be an object with 'type' and 'v'")
    body = dict(value)
    name, version = body.pop("type", None), body.pop("v", None)
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise StoreFailed(f"event type {_shown(name)} is unknown to this version of Pollux; upgrade to read it")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InvalidInput(f"{name}.v is {_shown(version)}; it must be a whole number, 1 or more")
    if version > kind.VERSION:
        raise StoreFailed(
            f"event '{name}' has version {version}, this version of Pollux knows {kind.VERSION}; upgrade to read it"
        )
    for old in range(version, kind.VERSION):
        body = UPCASTS[name, old](body)
    decoded: Event = _decoder(kind)(body, name)
    return decoded


def encode_value(value: Any) -> Any:
    """Plain JSON values of what events are made of: specs, limits, nodes, queues, placements, reasons, models."""
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, Real):
        return _encode_number(value)
    if isinstance(value, Mapping):
        return {str(key): encode_value(item) for key, item in value.items()}
    if isinstance(value, Placement):
        return [[node, int(count)] for node, count in value.shares]
    if isinstance(value, list | tuple):
        return [encode_value(item) for item in value]
    if isinstance(value, GoodputModel):
        return encode_model(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _encode_fields(value)
    raise InvalidInput(f"{_shown(value)} has no written form; give numbers, text and the values of pollux.core")


def _encode_number(value: Real) -> int | float | str:
    if isinstance(value, Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else str(number)


def decode_value(kind: type[_Value], value: Any, where: str = "") -> _Value:
    """A value of that type from what `encode_value` wrote; `where` names it in messages. Strict: no unknown field."""
    decoded: _Value = _decoder(kind)(value, where or getattr(kind, "__name__", "value"))
    return decoded


def encode_model(model: GoodputFunction) -> dict[str, Any]:
    """A learned model as numbers: throughput (and by GPU type), efficiency, limits of the batch."""
    if not isinstance(model, GoodputModel):
        raise InvalidInput(
            f"a goodput function of type {type(model).__name__} has no written form; report a GoodputModel"
        )
    return {
        "throughput": _encode_throughput(model.throughput),
        "efficiency": _encode_fields(model.efficiency),
        "limits": _encode_fields(model.limits),
        "by_type": {name: _encode_throughput(throughput) for name, throughput in model.by_type.items()},
    }


def decode_model(value: Any, where: str = "model") -> GoodputModel:
    """The model that `encode_model` wrote."""
    body = _object(value, where, ("throughput", "efficiency", "limits", "by_type"))
    by_type = _object(body["by_type"], f"{where}.by_type")
    return _made(
        GoodputModel,
        {
            "throughput": _decode_throughput(body["throughput"], f"{where}.throughput"),
            "efficiency": _decoder(Efficiency)(body["efficiency"], f"{where}.efficiency"),
            "limits": _decoder(BatchLimits)(body["limits"], f"{where}.limits"),
            "by_type": {name: _decode_throughput(one, f"{where}.by_type.{name}") for name, one in by_type.items()},
        },
        where,
    )


def _encode_throughput(model: ThroughputModel) -> dict[str, Any]:
    if isinstance(model, PublishedThroughput):
        return {"kind": "published", "parameters": [float(number) for number in model.parameters]}
    if isinstance(model, FabricThroughput):
        parameters = [float(number) for number in model.parameters]
        return {"kind": "fabric", "parameters": parameters, "algorithm": model.algorithm}
    raise InvalidInput(
        f"a throughput model of type {type(model).__name__} has no written form; "
        "report PublishedThroughput or FabricThroughput"
    )


def _decode_throughput(value: Any, where: str) -> ThroughputModel:
    body = _object(value, where)
    kind = body.get("kind")
    known = {"published": ("kind", "parameters"), "fabric": ("kind", "parameters", "algorithm")}
    if kind not in known:
        raise StoreFailed(f"{where}.kind is {_shown(kind)}, unknown to this version of Pollux; upgrade to read it")
    _object(value, where, known[kind])
    numbers = body["parameters"]
    if not isinstance(numbers, list) or len(numbers) != 7:
        raise InvalidInput(f"{where}.parameters is {_shown(numbers)}; it must be a list of seven numbers")
    values = [_decoder(float)(number, f"{where}.parameters") for number in numbers]
    try:
        if kind == "published":
            return PublishedThroughput(*values)
        return FabricThroughput(*values, algorithm=body["algorithm"])
    except PolluxError as error:
        raise InvalidInput(f"{where}: {error}") from None


def _encode_fields(value: Any) -> dict[str, Any]:
    encoded = {}
    for name in _written(type(value)):
        item = getattr(value, name)
        # A foreign goodput function may be a dataclass too; by its fields alone nobody could bring it back.
        is_model = name == "goodput" and item is not None
        encoded[name] = encode_model(item) if is_model else encode_value(item)
    return encoded


def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.init and (kind.__name__, field.name) not in _UNWRITTEN)


_written: Callable[[Any], tuple[str, ...]] = cache(_field_names)

_Decoder = Callable[[Any, str], Any]


def _new_decoder(kind: Any) -> _Decoder:
    """The function that makes a value of type `kind`; made once per type, since a replay reads many of each."""
    special = _SPECIAL.get(kind)
    if special is not None:
        return special
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _optional(arguments, kind)
    if origin is Literal:
        return _one_of(arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _many(_decoder(arguments[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_decoder(arguments[1]))
    if is_dataclass(kind):
        return _dataclass(typing.cast("type[Any]", kind))
    raise InvalidInput(f"type {kind} has no written form; give a type that events are made of")


_decoder: Callable[[Any], _Decoder] = cache(_new_decoder)


def _optional(arguments: tuple[Any, ...], kind: Any) -> _Decoder:
    inner = [argument for argument in arguments if argument is not type(None)]
    if len(inner) != 1 or len(inner) == len(arguments):
        raise InvalidInput(f"type {kind} has no written form; of a union only `T | None` can be read")
    decoder = _decoder(inner[0])
    return lambda value, where: None if value is None else decoder(value, where)


def _one_of(words: tuple[Any, ...]) -> _Decoder:
    def read(value: Any, where: str) -> Any:
        if value not in words:
            raise UnknownName(where, str(value), words)
        return value

    return read


def _many(decoder: _Decoder) -> _Decoder:
    def read(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise InvalidInput(f"{where} is {_shown(value)}; it must be a list")
        return tuple(decoder(item, f"{where}[{index}]") for index, item in enumerate(value))

    return read


def _mapping(decoder: _Decoder) -> _Decoder:
    def read(value: Any, where: str) -> dict[str, Any]:
        return {key: decoder(item, f"{where}.{key}") for key, item in _object(value, where).items()}

    return read


def _dataclass(kind: type[Any]) -> _Decoder:
    hints = typing.get_type_hints(kind)
    decoders = {name: _decoder(hints[name]) for name in _written(kind)}
    optional = {field.name for field in fields(kind) if (field.default, field.default_factory) != (MISSING, MISSING)}
    required = [name for name in decoders if name not in optional]

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise InvalidInput(f"{where} is {_shown(value)}; it must be an object")
        unknown = next((name for name in value if name not in decoders), None)
        if unknown is not None:
            raise UnknownName(f"field of {where}", str(unknown), decoders)
        missing = next((name for name in required if name not in value), None)
        if missing is not None:
            raise InvalidInput(f"{where} has no '{missing}'; it must have one")
        return _made(kind, {name: decoders[name](item, f"{where}.{name}") for name, item in value.items()}, where)

    return read


def _made(kind: Callable[..., _Value], arguments: dict[str, Any], where: str) -> _Value:
    try:
        return kind(**arguments)
    except PolluxError as error:
        raise InvalidInput(f"{where}: {error}") from None


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{where} is {_shown(value)}; it must be text")
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{where} is {_shown(value)}; it must be true or false")
    return value


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{where} is {_shown(value)}; it must be a whole number")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, str) and value in _INFINITIES:
        return _INFINITIES[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"{where} is {_shown(value)}; it must be a number")
    return float(value)


def _placement(value: Any, where: str) -> Placement:
    shares = []
    for index, share in enumerate(_many(lambda item, _: item)(value, where)):
        if not isinstance(share, list | tuple) or len(share) != 2:
            raise InvalidInput(f"{where}[{index}] is {_shown(share)}; it must be a node and its number of GPUs")
        shares.append((_text(share[0], f"{where}[{index}][0]"), _whole(share[1], f"{where}[{index}][1]")))
    return _made(Placement, {"shares": tuple(shares)}, where)


def _object(value: Any, where: str, keys: tuple[str, ...] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{where} is {_shown(value)}; it must be an object")
    for key in value:
        if keys is not None and key not in keys:
            raise UnknownName(f"field of {where}", str(key), keys)
    for key in keys or ():
        if key not in value:
            raise InvalidInput(f"{where} has no '{key}'; it must have one")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_SPECIAL: dict[Any, _Decoder] = {
    str: _text,
    bool: _flag,
    int: _whole,
    float: _number,
    Placement: _placement,
    GoodputFunction: decode_model,
    GoodputModel: decode_model,
    FixedBatchOracle: lambda value, where: None,
}
