"""Encodes a state as JSON that keeps types, and its tensors separately; refuses what only pickle can carry."""

from __future__ import annotations

import base64
import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pollux.core.errors import InvalidInput

__all__ = ["decode", "encode"]

_KIND = "#"


def encode(value: Any, tensors: list[Tensor], where: str = "state") -> Any:
    """`value` as JSON that keeps its types; tensors and arrays are appended to `tensors`, and JSON has their number.

    `InvalidInput` names the first value that only pickle could carry, by its place.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, Tensor):
        return _encode_tensor(value, tensors, where)
    if isinstance(value, np.ndarray | np.generic):
        return _encode_array(np.asarray(value), tensors, where, scalar=isinstance(value, np.generic))
    if kind is list:
        return [encode(item, tensors, f"{where}[{index}]") for index, item in enumerate(value)]
    encoded = _encode_collection(value, tensors, where)
    return _encode_plain(value, where) if encoded is None else encoded


def _encode_collection(value: Any, tensors: list[Tensor], where: str) -> dict[str, Any] | None:
    """A sequence or mapping of a known class, with its name; None for anything else."""
    for name, kind in _SEQUENCES.items():
        if type(value) is kind:
            return {_KIND: name, "is": [encode(item, tensors, f"{where}[...]") for item in value]}
    for name, kind in _MAPPINGS.items():
        if type(value) is kind:
            items = [
                [encode(key, tensors, where), encode(item, tensors, f"{where}[{key!r}]")] for key, item in value.items()
            ]
            return {_KIND: name, "is": items}
    return None


def _encode_plain(value: Any, where: str) -> dict[str, Any]:
    """A single value as text; `InvalidInput` where its class is not known."""
    for name, (kind, write, _) in _PLAIN.items():
        if isinstance(value, kind):
            return {_KIND: name, "is": write(value)}
    raise InvalidInput(
        f"{where} is a {type(value).__name__}, which cannot travel between replicas without pickle: make it of "
        "tensors, arrays, numbers, texts, bytes, lists, tuples and dicts; until then the job moves by a restart"
    )


def _encode_tensor(value: Tensor, tensors: list[Tensor], where: str) -> dict[str, Any]:
    if type(value) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) or value.layout != torch.strided:
        raise InvalidInput(
            f"{where} is a {type(value).__name__} of layout {value.layout}, which cannot travel between replicas: use "
            "a plain dense tensor; until then the job moves by a restart"
        )
    tensors.append(value)
    return {_KIND: "tensor", "is": len(tensors) - 1}


def _encode_array(array: np.ndarray[Any, Any], tensors: list[Tensor], where: str, scalar: bool) -> dict[str, Any]:
    if array.dtype.hasobject or array.dtype.names is not None:
        raise InvalidInput(f"{where} is an array of {array.dtype}, which only pickle could carry: use numbers")
    content = np.frombuffer(np.ascontiguousarray(array).tobytes(), dtype=np.uint8).copy()
    tensors.append(torch.from_numpy(content))
    kind = "scalar" if scalar else "array"
    return {_KIND: kind, "is": len(tensors) - 1, "dtype": array.dtype.str, "shape": list(array.shape)}


def decode(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The value that `encode` was given, with its tensors."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = value[_KIND], value["is"]
    if kind == "tensor":
        return tensors[content]
    if kind in ("array", "scalar"):
        return _decode_array(value, tensors[content])
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item, tensors) for item in content)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({decode(key, tensors): decode(item, tensors) for key, item in content})
    return _PLAIN[kind][2](content)


def _decode_array(value: dict[str, Any], content: Tensor) -> Any:
    raw = content.cpu().numpy().tobytes()
    array = np.frombuffer(raw, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return array[()] if value[_KIND] == "scalar" else array


_SEQUENCES: dict[str, Any] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "size": torch.Size,
}
_MAPPINGS: dict[str, Any] = {"dict": dict, "ordered": collections.OrderedDict, "counter": collections.Counter}
# Class, how to write it, how to read it.
_PLAIN: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (float, repr, float),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "bytearray": (bytearray, lambda v: base64.b64encode(v).decode(), lambda text: bytearray(base64.b64decode(text))),
    "complex": (complex, repr, complex),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), lambda text: getattr(torch, text)),
    "device": (torch.device, str, torch.device),
}
