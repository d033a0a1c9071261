"""Host buffers and DCP files: the copy is a copy, memory is used again, digests are of what lies on disk."""

import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pollux.agent.checkpoint.host_buffers import Abandoned, HostBuffers, pickled, write_files
from pollux.agent.checkpoint.manifest import digest_file


def example():
    return {"model.weight": torch.arange(12.0).reshape(3, 4), "optimizer.step": torch.tensor(5.0)}


def test_a_copy_keeps_the_values_of_its_moment():
    tensors = example()
    state = HostBuffers().stage(tensors)
    tensors["model.weight"].zero_()
    assert torch.equal(state.tensors["model.weight"].host, torch.arange(12.0).reshape(3, 4))
    assert sum(staged.host.nbytes for staged in state.tensors.values()) == 13 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex128])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_large_tensors_are_copied_too(dtype, num_threads):
    before = torch.get_num_threads()
    source = (torch.arange(600_000) % 1000).reshape(600, 1000).to(dtype)
    torch.set_num_threads(num_threads)
    try:
        state = HostBuffers().stage({"a": source, "b": source.t(), "c": torch.nn.Parameter(torch.ones(300_000))})
    finally:
        torch.set_num_threads(before)
    assert torch.equal(state.tensors["a"].host, source)
    assert torch.equal(state.tensors["b"].host, source.t())
    assert (state.tensors["c"].host == 1).all()


def test_memory_is_used_again():
    buffers = HostBuffers()
    first = buffers.stage(example()).tensors["model.weight"].host.data_ptr()
    assert buffers.stage(example()).tensors["model.weight"].host.data_ptr() == first


def test_prepared_memory_is_what_the_first_copy_uses():
    buffers = HostBuffers()
    buffers.prepare({"model.weight": torch.empty(3, 4, device="meta"), "later": torch.empty(2, device="meta")})
    held = buffers._buffers["model.weight"].data_ptr()
    assert sum(buffer.nbytes for buffer in buffers._buffers.values()) == 14 * 4
    state = buffers.stage(example())
    assert state.tensors["model.weight"].host.data_ptr() == held
    assert sum(buffer.nbytes for buffer in buffers._buffers.values()) == 13 * 4, "what is no longer there is let go"


@pytest.mark.parametrize("other", [torch.zeros(4, 3), torch.zeros(3, 4, dtype=torch.float64)])
def test_another_shape_or_type_gets_new_memory(other):
    buffers = HostBuffers()
    buffers.stage(example())
    staged = buffers.stage({"model.weight": other}).tensors["model.weight"]
    assert (staged.host.shape, staged.host.dtype) == (other.shape, other.dtype)


def test_shared_tensors_are_copied_once():
    weight = torch.nn.Parameter(torch.ones(3, 4))
    state = HostBuffers().stage({"model.a": weight, "model.b": weight, "model.c": weight.detach()})
    assert list(state.tensors) == ["model.a"]
    assert state.tied == {"model.b": "model.a", "model.c": "model.a"}


def test_views_that_differ_are_copied_each():
    base = torch.arange(12.0)
    state = HostBuffers().stage({"whole": base, "part": base[:6], "square": base[:9].reshape(3, 3).t()})
    assert state.tied == {}
    assert torch.equal(state.tensors["square"].host, base[:9].reshape(3, 3).t())
    assert state.tensors["square"].host.is_contiguous()


def test_empty_tensors_are_never_tied():
    assert HostBuffers().stage({"a": torch.zeros(0), "b": torch.zeros(0)}).tied == {}


def test_digests_are_those_of_the_files(tmp_path):
    state = HostBuffers().stage(example(), {"object": pickled({"a": [1]})})
    digests = write_files(tmp_path, state)
    assert set(digests) == {path.name for path in tmp_path.iterdir()} == {".metadata", "__0_0.distcp"}
    assert digests == {name: digest_file(tmp_path / name) for name in digests}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
)
def test_plain_dcp_reads_every_type(tmp_path, dtype):
    values = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    write_files(tmp_path, HostBuffers().stage({"model.x": values, "model.empty": torch.zeros(0, 3)}))
    found = {"model": {"x": torch.empty(2, 2, dtype=dtype), "empty": torch.ones(0, 3)}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, checkpoint_id=tmp_path)
    assert torch.equal(found["model"]["x"], values)


def test_shared_tensors_are_on_disk_once(tmp_path):
    weight = torch.randn(1000)
    digests = write_files(tmp_path, HostBuffers().stage({"model.a": weight, "model.b": weight}))
    assert digests["__0_0.distcp"].size < 2 * weight.nbytes
    found = {"model": {"a": torch.empty(1000), "b": torch.empty(1000)}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, checkpoint_id=tmp_path)
    assert torch.equal(found["model"]["a"], weight)
    assert torch.equal(found["model"]["b"], weight)


def test_abandoned_writing_stops(tmp_path):
    abandoned = threading.Event()
    abandoned.set()
    with pytest.raises(Abandoned):
        write_files(tmp_path, HostBuffers().stage(example()), abandoned=abandoned)


def test_nothing_is_written_over(tmp_path):
    write_files(tmp_path, HostBuffers().stage(example()))
    with pytest.raises(RuntimeError, match="already exists"):
        write_files(tmp_path, HostBuffers().stage(example()))


@pytest.mark.gpu
def test_copies_from_a_gpu_wait_in_page_locked_memory(tmp_path):
    buffers = HostBuffers()
    buffers.prepare({"model.weight": torch.empty(1000, 1000, device="meta")})
    assert buffers._buffers["model.weight"].is_pinned()
    held = buffers._buffers["model.weight"].data_ptr()
    tensors = {"model.weight": torch.ones(1000, 1000, device="cuda"), "optimizer.step": torch.tensor(1.0)}
    state = buffers.stage(tensors)
    tensors["model.weight"].zero_()
    assert state.tensors["model.weight"].host.data_ptr() == held
    assert (state.tensors["model.weight"].host == 1).all()
    digests = write_files(tmp_path, state)
    assert digests == {name: digest_file(tmp_path / name) for name in digests}
