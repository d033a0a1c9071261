"""Which errors mean memory, and the guard in front of a forward pass."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from pollux.agent.step.oom import OomTrial, is_out_of_memory, predicted_local_batch
from pollux.core.errors import InvalidInput


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_mean_memory(error, expected):
    assert is_out_of_memory(error) is expected


def test_nothing_is_predicted_without_a_gpu():
    assert predicted_local_batch(torch.device("cpu"), 8) is None


class Hungry(nn.Module):
    def __init__(self, limit):
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.limit = limit
        self.calls = []

    def forward(self, x, scale=1.0, extra=None):
        self.calls.append(len(x))
        if len(x) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"scores": self.layer(x) * scale, "extra": extra, "mean": x.mean()}


@contextlib.contextmanager
def watching(trial):
    trial.start()
    try:
        yield
    finally:
        trial.stop()


def test_a_forward_pass_that_fails_still_gives_values():
    model = Hungry(4)
    trial = OomTrial(model, 3)
    x = torch.randn(10, 2)
    with watching(trial):
        out = model(x, scale=2.0, extra=torch.arange(10))
    assert trial.failed
    assert model.calls == [10, 3, 3, 3, 1]
    torch.testing.assert_close(out["scores"], model.layer(x) * 2.0)
    assert torch.equal(out["extra"], torch.arange(10))
    assert out["scores"].requires_grad
    assert out["scores"].grad_fn is None


def test_one_that_fits_is_left_alone():
    model = Hungry(10)
    trial = OomTrial(model, 3)
    with watching(trial):
        out = model(torch.randn(10, 2))
    assert not trial.failed
    assert out["scores"].grad_fn is not None
    assert "forward" not in vars(model), "the guard is gone"


def test_a_forward_of_the_instances_own_comes_back():
    model: Any = Hungry(10)
    own = lambda x: x  # noqa: E731
    model.forward = own
    with watching(OomTrial(model, 3)):
        assert model.forward is not own
    assert model.forward is own


def test_other_errors_and_evaluation_pass_through():
    model = Hungry(4)
    trial = OomTrial(model, 3)
    with watching(trial):
        with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
            model(torch.randn(10, 2))
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.randn(2, 7))
    assert not trial.failed


def test_what_does_not_fit_in_pieces_either_is_refused():
    model = Hungry(0)
    with watching(OomTrial(model, 1)), pytest.raises(InvalidInput, match="memory does not hold 1 sample even without"):
        model(torch.randn(4, 2))
