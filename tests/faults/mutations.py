"""Messages that are nearly right: a random field of one, changed by its shape or by its bytes. Not a test."""

import base64
import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

EDGES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, -(2**31) - 1, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400,
    99999999999, 0.0, -0.0, 5e-324, -5e-324, 1e-310, 2.3e-308, 1e-30, 0.5, 1e29, 1e30, 1e31, 1.7e308, -1.7e308,
    float("inf"), float("-inf"), float("nan"), "", "x", "\0", "\x1b[2J", "\u202e", "\udc80", "é" * 50, "x" * 5000,
    "9" * 5000, "../x", "1e999", [], {}, [[]], [None], {"": None}, [0] * 300, {"kind": "plan"}, {"version": 2},
)  # fmt: skip
"""What a field may become: the ends of what numbers and texts can say, and other types."""

DEEP = "[" * 100_000
"""The line that once ended a shim, since no parser gets to its end."""


def mutated(value: Any, chance: random.Random) -> Any:
    """A copy with one to three of its parts changed."""
    changed = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        changed = _changed(changed, chance)
    return changed


def _changed(value: Any, chance: random.Random) -> Any:
    """One part of it, or itself, is another now."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice([*value])
        return _changed_dict(dict(value), key, chance)
    if isinstance(value, list) and value and chance.random() < 0.8:
        return _changed_list([*value], chance.randrange(len(value)), chance)
    if isinstance(value, bool) or not isinstance(value, int | float | str) or chance.random() < 0.6:
        return chance.choice(EDGES)
    if isinstance(value, str):
        return _changed_text(value, chance)
    larger = value * 1e300 if abs(value) < 2**63 else value
    return chance.choice((-value, value + 1, value - 1, larger, str(value)))


def _changed_dict(value: dict[Any, Any], key: Any, chance: random.Random) -> Any:
    match chance.randrange(6):
        case 0:
            del value[key]
        case 1:
            value[chance.choice(("version", "extra", "", "generation", "\0"))] = chance.choice(EDGES)
        case _:
            value[key] = _changed(value[key], chance)
    return value


def _changed_list(value: list[Any], at: int, chance: random.Random) -> Any:
    match chance.randrange(6):
        case 0:
            del value[at]
        case 1:
            value.insert(at, value[at])
        case 2:
            chance.shuffle(value)
        case _:
            value[at] = _changed(value[at], chance)
    return value


def _changed_text(value: str, chance: random.Random) -> str:
    if not value:
        return "x"
    at = chance.randrange(len(value))
    return chance.choice((value[:at], value[:at] + chr(chance.randrange(0x300)) + value[at + 1 :], value * 3))


def spoilt(text: bytes, chance: random.Random) -> bytes:
    """The bytes with some of them changed, cut off, repeated, or others between them."""
    at, end = sorted(chance.randrange(len(text) + 1) for _ in range(2))
    match chance.randrange(6):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + chance.randbytes(chance.randrange(1, 9)) + text[at:]
        case 2:
            return text[:end] + text[at:end] + text[end:]
        case 3:
            return text[:at] + text[end:]
        case 4 if text:
            at = min(at, len(text) - 1)
            return text[:at] + bytes([text[at] ^ 1 << chance.randrange(8)]) + text[at + 1 :]
        case _:
            return chance.choice((DEEP.encode(), b"", b"null", b"NaN", b"{}", b"[]", b'"\\ud800"', b"\xff\xfe", text))


def texts(values: Sequence[Any], chance: random.Random, number: int) -> Any:
    """So many texts of JSON, as bytes: most are whole values with another part, some are not even JSON."""
    for _ in range(number):
        value = chance.choice(values)
        if chance.random() < 0.8:
            yield json.dumps(mutated(value, chance)).encode()
        else:
            yield spoilt(json.dumps(value).encode(), chance)


def read_or_refused(read: Callable[[bytes], Any], refusals: tuple[type[BaseException], ...], text: bytes) -> Any:
    """What that makes of a text; None where it refuses it as it should. A text that it chokes on is told with it."""
    try:
        return read(text)
    except refusals:
        return None
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__}: {error} for {text[:300]!r}") from error


def encoded(data: bytes) -> str:
    """Bytes as messages have them."""
    return base64.b64encode(data).decode()
