"""Numbers read late: on a host at once, on a GPU one exchange later."""

import pytest
import torch

from pollux.agent.step.deferred_copy import DeferredCopy


def test_on_the_host_values_come_at_once_and_are_a_copy():
    late: DeferredCopy[int] = DeferredCopy()
    values = torch.ones(3)
    arrived = late.exchange(values, 7)
    values.zero_()
    assert arrived is not None
    assert arrived[0].tolist() == [1.0, 1.0, 1.0]
    assert arrived[1] == 7
    assert late.wait() is None


@pytest.mark.gpu
def test_on_a_gpu_values_come_one_exchange_later():
    late: DeferredCopy[int] = DeferredCopy()
    values = torch.ones(3, device="cuda")
    assert late.exchange(values, 1) is None
    values.fill_(5.0)
    first = late.exchange(values, 2)
    assert first is not None
    assert (first[0].tolist(), first[1]) == ([1.0, 1.0, 1.0], 1)
    second = late.wait()
    assert second is not None
    assert second[0].tolist() == [5.0, 5.0, 5.0]
    late.exchange(values, 3)
    late.forget()
    assert late.wait() is None
