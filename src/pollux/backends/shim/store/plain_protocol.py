"""The protocol of PyTorch's own `TCPStore`, which has no authentication: reads its questions and makes the answers.

Scripts that make their process groups themselves use it. `peers` decides who may do so.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from pollux.wire.live.store_channel import MAX_FRAME_BYTES, MAX_PARTS, BrokenFrame, StoreOperation

__all__ = ["CANCEL", "OPENING", "PlainQuestion", "answer_of", "read_question"]

OPENING = b"\0" + struct.pack("=I", 0x3C85F7CE)
"""The first bytes of a connection with this protocol."""

CANCEL = b"\x01"
"""The answer to a client that cancels its wait."""

_CANCEL_NUMBER, _PING_NUMBER = 12, 13
_SIZE, _INTEGER, _PING = struct.Struct("=Q"), struct.Struct("=q"), struct.Struct("=I")
# The number of strings in each question; None: the question itself has a count first.
_STRINGS = {1: 2, 2: 3, 3: 1, 4: 1, 5: None, 6: None, 7: 0, 8: 1, 9: 2, 10: None, 11: None, 12: 0, 13: 0}
_OPERATIONS = {
    1: StoreOperation.SET,
    2: StoreOperation.COMPARE_SET,
    3: StoreOperation.GET,
    4: StoreOperation.ADD,
    5: StoreOperation.CHECK,
    6: StoreOperation.WAIT,
    7: StoreOperation.COUNT,
    8: StoreOperation.DELETE,
    9: StoreOperation.APPEND,
    10: StoreOperation.MULTI_GET,
    11: StoreOperation.MULTI_SET,
}
_SILENT = frozenset({StoreOperation.SET, StoreOperation.APPEND, StoreOperation.MULTI_SET})
_VECTORS = frozenset({StoreOperation.GET, StoreOperation.COMPARE_SET, StoreOperation.MULTI_GET})
# Operations whose strings are keys and values in turn; in most others each string is a key.
_IN_TURN = frozenset({StoreOperation.SET, StoreOperation.APPEND, StoreOperation.MULTI_SET})


@dataclass(frozen=True, slots=True)
class PlainQuestion:
    """A question: its operation (None: cancel the wait, or answer the `ping`), its parts, and its size in bytes."""

    operation: StoreOperation | None
    parts: list[bytes]
    size: int
    ping: bytes = b""


def read_question(rest: bytes | bytearray) -> PlainQuestion | None:
    """The first question in these bytes; None until it is whole, `BrokenFrame` for what is no question."""
    if not rest:
        return None
    number = rest[0]
    if number not in _STRINGS:
        raise BrokenFrame(f"question {number} of PyTorch's store, which has no answer here")
    if number == _PING_NUMBER:
        return PlainQuestion(None, [], 5, bytes(rest[1:5])) if len(rest) >= 5 else None
    if number == _CANCEL_NUMBER:
        return PlainQuestion(None, [], 1)
    try:
        operation, at, count = _OPERATIONS[number], 1, _STRINGS[number]
        if count is None:
            (count,) = _SIZE.unpack_from(rest, at)
            at += _SIZE.size
            if count > MAX_PARTS // 2:
                raise BrokenFrame(f"a question about {count} keys")
            count *= 2 if operation is StoreOperation.MULTI_SET else 1
        parts = []
        for _ in range(count):
            (size,) = _SIZE.unpack_from(rest, at)
            if size > MAX_FRAME_BYTES or at > MAX_FRAME_BYTES:
                raise BrokenFrame(f"a string of {size} bytes")
            at += _SIZE.size
            if at + size > len(rest):
                return None
            parts.append(bytes(rest[at : at + size]))
            at += size
        if operation is StoreOperation.ADD:
            (amount,) = _INTEGER.unpack_from(rest, at)
            parts.append(b"%d" % amount)
            at += _INTEGER.size
    except struct.error:
        return None
    return PlainQuestion(operation, _own_keys(operation, parts), at)


def _own_keys(operation: StoreOperation, parts: list[bytes]) -> list[bytes]:
    """The parts with keys as other clients write them: PyTorch's client puts a slash before each key."""
    if operation in (StoreOperation.ADD, StoreOperation.COMPARE_SET):
        return [parts[0].removeprefix(b"/"), *parts[1:]]
    step = 2 if operation in _IN_TURN else 1
    return [part.removeprefix(b"/") if number % step == 0 else part for number, part in enumerate(parts)]


def answer_of(operation: StoreOperation, parts: Sequence[bytes]) -> bytes:
    """The answer in this protocol; empty where the client reads none."""
    if operation in _SILENT:
        return b""
    if operation in _VECTORS:
        return b"".join(_SIZE.pack(len(part)) + part for part in parts)
    if operation is StoreOperation.WAIT:
        return b"\0"
    number = int(parts[0])
    return bytes([0 if number else 1]) if operation is StoreOperation.CHECK else _INTEGER.pack(number)
