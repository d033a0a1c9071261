"""The random generators that reading a sample may use: PyTorch's, Python's and numpy's on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["RandomState", "isolated_random", "seed_random"]


def seed_random(seed: int) -> None:
    """Seed the CPU generators that datasets use: torch's default one, `random` and `numpy.random`.

    Not by `torch.manual_seed`, which would also seed the generators of devices.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def _numpy_words() -> bytes:
    """The words of numpy's global Mersenne twister, faster than by `get_state`, which takes 40 µs."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # the stubs forgot it
    if isinstance(generator, np.random.MT19937):
        return ctypes.string_at(generator.ctypes.state_address, 625 * 4)
    return repr(generator.state).encode()


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of the three CPU generators at one moment; reading it takes about 15 µs, little for each batch."""

    torch_state: torch.Tensor
    python_state: tuple[Any, ...]
    numpy_words: bytes

    @classmethod
    def now(cls) -> RandomState:
        """The present state."""
        return cls(torch.default_generator.get_state(), random.getstate(), _numpy_words())

    def has_moved(self) -> bool:
        """Whether something was drawn or seeded since."""
        return (
            self.numpy_words != _numpy_words()
            or not torch.equal(self.torch_state, torch.default_generator.get_state())
            or self.python_state != random.getstate()
        )

    def restore(self) -> None:
        """Restore the state, but for numpy's cached second normal variate."""
        torch.default_generator.set_state(self.torch_state)
        random.setstate(self.python_state)
        if self.numpy_words != _numpy_words() and len(self.numpy_words) == 625 * 4:
            words = np.frombuffer(self.numpy_words, dtype=np.uint32)
            np.random.set_state(("MT19937", words[:624], int(words[624]), 0, 0.0))


@contextlib.contextmanager
def isolated_random() -> Iterator[None]:
    """Restore the CPU generators afterwards."""
    torch_state, python_state = torch.default_generator.get_state(), random.getstate()
    numpy_state = np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
