import collections
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pollux.agent.elastic.state_codec import decode, encode
from pollux.core.errors import InvalidInput

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(allow_nan=False),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=4),
    ),
    max_leaves=12,
)


def there_and_back(value):
    tensors: list[torch.Tensor] = []
    text = json.dumps(encode(value, tensors))
    return decode(json.loads(text), tensors)


@given(VALUES)
def test_plain_values_come_back_with_their_types(value):
    assert repr(there_and_back(value)) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        {"#": "tuple", "is": [1]},
        collections.OrderedDict([(2, "b"), (1, "a")]),
        collections.Counter({30: 1, 80: 2}),
        collections.deque([1, 2]),
        {1, 2},
        frozenset({3}),
        bytearray(b"x"),
        torch.float16,
        torch.device("cpu"),
        torch.Size([2, 3]),
        (math.inf, -math.inf),
        10**40,
    ],
)
def test_other_kinds_come_back_with_their_types(value):
    back = there_and_back(value)
    assert type(back) is type(value)
    assert back == value


def test_tensors_and_arrays_come_back_bit_for_bit():
    value: dict[str, Any] = {
        "a": torch.randn(2, 3, dtype=torch.bfloat16),
        "b": np.arange(6, dtype=np.int16).reshape(2, 3),
        "c": np.float32(0.1),
        "d": np.array(3.5),
    }
    back = there_and_back(value)
    assert torch.equal(back["a"], value["a"])
    assert back["b"].dtype == np.int16
    assert (back["b"] == value["b"]).all()
    assert type(back["c"]) is np.float32
    assert back["c"] == value["c"]
    assert back["d"].shape == ()


def test_a_scheduler_with_milestones_travels():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 80])
    state = scheduler.state_dict()
    assert there_and_back(state) == state


class Own:
    pass


@pytest.mark.parametrize("value", [Own(), lambda: 0, {"a": [Own()]}, np.array([Own()]), collections.defaultdict(list)])
def test_what_only_pickle_could_carry_is_refused_by_name(value):
    with pytest.raises(InvalidInput, match=r"object\.mine"):
        encode(value, [], "object.mine")


def test_a_sparse_tensor_is_refused():
    with pytest.raises(InvalidInput, match="sparse"):
        encode(torch.eye(2).to_sparse(), [])
