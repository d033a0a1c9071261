"""The keys and values of a job's store, and the waiters for keys. Pure: `peers` has the connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pollux.wire.live.store_channel import MAX_KEY_BYTES

__all__ = ["KeyValues", "StoreRefusal", "Waiter"]

MAX_VALUE_BYTES = 16 << 20
"""The largest value that is kept; those that Pollux itself reads are far smaller."""

_MAX_KEYS = 1_000_000
_MAX_BYTES = 1 << 30
_LEAST, _MOST = -(2**63), 2**63 - 1


class StoreRefusal(ValueError):
    """What was asked of the store is not done; the text says why."""


@dataclass(slots=True, eq=False)
class Waiter:
    """Somebody who is told once all of these keys are there; `missing` are those that are not yet."""

    missing: set[bytes]
    tell: Callable[[], None]


class KeyValues:
    """Keys with their values, within bounds."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._bytes = 0
        self._waiters: dict[bytes, list[Waiter]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> bytes | None:
        """The value of a key; None where it is not there."""
        return self._values.get(key)

    def has(self, keys: Sequence[bytes]) -> bool:
        """Whether all of these are there."""
        return all(key in self._values for key in keys)

    def set(self, key: bytes, value: bytes) -> None:
        """Write a key, and tell those that wait for it."""
        before = self._values.get(key)
        size = self._bytes + len(value) - (len(before) if before is not None else -len(key))
        if len(key) > MAX_KEY_BYTES:
            raise StoreRefusal(f"a key of {len(key)} bytes: the store takes {MAX_KEY_BYTES}")
        if len(value) > MAX_VALUE_BYTES:
            raise StoreRefusal(f"a value of {len(value)} bytes: the store takes {MAX_VALUE_BYTES}")
        if size > _MAX_BYTES or (before is None and len(self._values) >= _MAX_KEYS):
            raise StoreRefusal(f"the store is full: it has {len(self._values)} keys and {self._bytes} bytes")
        self._values[key] = value
        self._bytes = size
        for waiter in self._waiters.pop(key, ()):
            waiter.missing.discard(key)
            if not waiter.missing:
                waiter.tell()

    def add(self, key: bytes, amount: int) -> int:
        """Count a key up, from 0 where it is not there; the new number."""
        try:
            total = int(self._values.get(key, b"0")[:32]) + amount
        except ValueError:
            raise StoreRefusal("a value that is no number cannot be added to") from None
        if not _LEAST <= total <= _MOST:
            raise StoreRefusal("a number beyond 64 bits")
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Write a key that has the expected value, or is not there where that is empty; the value that holds now.

        For a key that is not there although a value was expected, that is the expected one, as in PyTorch's stores.
        """
        before = self._values.get(key)
        if before is None and expected:
            return expected
        if before is None or before == expected:
            self.set(key, desired)
            return desired
        return before

    def delete(self, key: bytes) -> bool:
        """Forget a key; whether it was there."""
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= len(key) + len(value)
        return value is not None

    def append(self, key: bytes, value: bytes) -> None:
        """Write on at the end of a value."""
        self.set(key, self._values.get(key, b"") + value)

    def wait(self, keys: Sequence[bytes], tell: Callable[[], None]) -> Waiter | None:
        """Tell once, when all of them are there; None where they are now, and nothing is told."""
        waiter = Waiter({key for key in keys if key not in self._values}, tell)
        for key in waiter.missing:
            self._waiters.setdefault(key, []).append(waiter)
        return waiter if waiter.missing else None

    def forget(self, waiter: Waiter) -> None:
        """It waits no longer."""
        for key in waiter.missing:
            others = [each for each in self._waiters.get(key, ()) if each is not waiter]
            if others:
                self._waiters[key] = others
            else:
                self._waiters.pop(key, None)
