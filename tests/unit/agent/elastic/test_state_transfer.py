from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pollux.agent.checkpoint.state import State
from pollux.agent.elastic import state_transfer
from pollux.agent.elastic.state_transfer import cut, exchange, pack, share_out
from pollux.core.errors import InvalidInput, PolluxError


@given(st.lists(st.integers(0, 200), max_size=12), st.integers(16, 100), st.integers(1, 5))
def test_every_byte_is_in_one_piece_and_shares_are_even(sizes, limit, num_senders):
    pieces = cut(sizes, [number % 3 == 0 for number in range(len(sizes))], limit)
    seen = [(segment.tensor, byte) for piece in pieces for segment in piece.segments for byte in _range(segment)]
    assert sorted(seen) == [(number, byte) for number, size in enumerate(sizes) for byte in range(size)]
    assert all(piece.num_bytes <= limit for piece in pieces)
    assert all(len({segment.tensor % 3 == 0 for segment in piece.segments}) == 1 for piece in pieces)
    owners = share_out(pieces, num_senders)
    assert owners == sorted(owners)
    total = sum(sizes)
    for sender in range(num_senders):
        share = sum(piece.num_bytes for piece, owner in zip(pieces, owners, strict=True) if owner == sender)
        assert share <= total / num_senders + 2 * limit


def _range(segment: state_transfer.Segment) -> range:
    return range(segment.first, segment.end)


def test_large_tensors_are_cut_for_several_senders():
    pieces = cut([40 << 20], [False])
    assert len(pieces) == 10
    assert set(share_out(pieces, 3)) == {0, 1, 2}


def test_tied_tensors_are_packed_once():
    weight = torch.randn(3, 4)
    packed = pack(State({"model.a": weight, "model.b": weight, "model.t": weight.T}))
    assert len(packed.tensors) == 2


def test_what_cannot_travel_is_named():
    with pytest.raises(InvalidInput, match=r"object\.mine\['f'\] is a function"):
        pack(State(objects={"object.mine": {"f": lambda: 0}}))


def example() -> State:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "model.big": torch.randn(700, 900, generator=generator),
        "model.turned": torch.randn(5, 7, generator=generator).T,
        "model.half": torch.randn(33, generator=generator).to(torch.bfloat16),
        "model.flag": torch.tensor([True, False, True]),
        "model.none": torch.empty(0, 4),
        "optimizer.state.big.step": torch.tensor(17.0),
        "optimizer.state.big.exp_avg": torch.randn(700, 900, generator=generator, dtype=torch.float64),
    }
    objects: dict[str, object] = {
        "object.mine": {"t": torch.arange(3), "pair": (1, b"x")},
        "optimizer.groups": [{"lr": 0.1}],
    }
    return State(tensors, objects, {"rng": ["a", "b"], "n": 3})


def replica(senders: list[int], receivers: list[int], damaged: bool = False) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, wanted = dist.get_rank(), example()
    state_transfer._PIECE_BYTES = 1 << 20
    own = {
        name: torch.zeros_like(tensor)
        for name, tensor in wanted.tensors.items()
        if name.startswith("model.") and name != "model.half"
    }
    if damaged and rank == senders[-1]:
        original = state_transfer._checksum
        state_transfer._checksum = lambda content, before: original(content, before) ^ 1
    packed = pack(wanted) if rank in senders else None
    try:
        state, num_bytes = exchange(packed, senders, receivers, None, own)
    except PolluxError as error:
        return str(error)
    if rank not in receivers:
        return [sorted(state.values), num_bytes, not state.tensors]
    equal = all(torch.equal(state.tensors[name], tensor) for name, tensor in wanted.tensors.items())
    in_place = own["model.big"].data_ptr() == state.tensors["model.big"].data_ptr()
    same = repr(state.objects) == repr(wanted.objects) and state.values == wanted.values
    dist.destroy_process_group()
    return [equal, in_place, same, sorted(state.tensors) == sorted(wanted.tensors)]


@pytest.mark.parametrize(
    ("senders", "receivers"),
    [([0], [1]), ([1], [0]), ([0, 1], [2, 3]), ([0, 2, 3], [1]), ([0], [1, 2, 3]), ([0, 1], [])],
)
def test_receivers_have_the_state_of_the_senders(replica_server, senders, receivers):
    num_replicas = len(senders) + len(receivers)
    answers = replica_server.run(f"{__file__}:replica", num_replicas, {"senders": senders, "receivers": receivers})
    for rank, answer in enumerate(answers):
        if rank in receivers:
            assert answer == [True] * 4
        else:
            assert answer[0] == ["n", "rng"]
            assert (answer[1] > 7_000_000) == bool(receivers)


def test_a_rank_that_neither_sends_nor_receives_takes_part(replica_server):
    answers = replica_server.run(f"{__file__}:replica", 3, {"senders": [0], "receivers": [2]})
    assert answers[1][0] == ["n", "rng"]
    assert answers[2] == [True] * 4


def test_damage_is_seen_on_all_ranks(replica_server):
    answers = replica_server.run(f"{__file__}:replica", 3, {"senders": [0, 1], "receivers": [2], "damaged": True})
    assert answers == ["what replica 1 sent is not what replica 2 received: send it again"] * 3
