"""The keys and values of a job's store, and the waiters for keys. Pure: `peers` has the connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pollux.wire.live.store_channel import MAX_KEY_BYTES

__all__ = ["KeyValues", "StoreRefusal", "Waiter"]

MAX_VALUE_BYTES = 16 << 20
"""The largest value that the store takes; values that Pollux itself reads are far smaller."""

_MAX_KEYS = 1_000_000
_MAX_BYTES = 1 << 30
_LEAST, _MOST = -(2**63), 2**63 - 1


class StoreRefusal(ValueError):
    """The store refuses a request; the text says why."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits for keys: `tell` is called once none is `missing`."""

    missing: set[bytes]
    tell: Callable[[], None]


class KeyValues:
    """Keys with their values, limited in number and size."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._bytes = 0
        self._waiters: dict[bytes, list[Waiter]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> bytes | None:
        """The value of a key; None for a key that has not been written."""
        return self._values.get(key)

    def has(self, keys: Sequence[bytes]) -> bool:
        """Whether all of these keys have been written."""
        return all(key in self._values for key in keys)

    def set(self, key: bytes, value: bytes) -> None:
        """Write a key, and answer requests that wait for it."""
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
        """Add to the number of a key, from 0 for a new key; the new number."""
        try:
            total = int(self._values.get(key, b"0")[:32]) + amount
        except ValueError:
            raise StoreRefusal("a value that is no number cannot be added to") from None
        if not _LEAST <= total <= _MOST:
            raise StoreRefusal("a number beyond 64 bits")
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Write a key if it has the expected value, or is new and none is expected; its value after that.

        If the key is new but a value was expected, this returns the expected value, as PyTorch's stores do.
        """
        before = self._values.get(key)
        if before is None and expected:
            return expected
        if before is None or before == expected:
            self.set(key, desired)
            return desired
        return before

    def delete(self, key: bytes) -> bool:
        """Delete a key; whether it existed."""
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= len(key) + len(value)
        return value is not None

    def append(self, key: bytes, value: bytes) -> None:
        """Append to the value of a key."""
        self.set(key, self._values.get(key, b"") + value)

    def wait(self, keys: Sequence[bytes], tell: Callable[[], None]) -> Waiter | None:
        """Call `tell` once all of these keys have been written; None, without a call, if they have been already."""
        waiter = Waiter({key for key in keys if key not in self._values}, tell)
        for key in waiter.missing:
            self._waiters.setdefault(key, []).append(waiter)
        return waiter if waiter.missing else None

    def forget(self, waiter: Waiter) -> None:
        """Cancel a waiting request."""
        for key in waiter.missing:
            others = [each for each in self._waiters.get(key, ()) if each is not waiter]
            if others:
                self._waiters[key] = others
            else:
                self._waiters.pop(key, None)
