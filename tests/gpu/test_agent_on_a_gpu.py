"""What only a GPU can show: real out-of-memory, mixed precision, no waiting. Run with `pytest -m gpu tests/gpu`."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pollux
from pollux.agent.adaptation.batch_tuner import BatchChange
from pollux.agent.step.optimizer_step import StepRunner
from pollux.goodput import BatchChoice

pytestmark = [pytest.mark.gpu]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))


def data(size: int = 640) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 32, generator=generator)
    return TensorDataset(x, (x[:, :4] * 2 + torch.randn(size, 4, generator=generator)).argmax(1))


def test_the_script_moves_itself_to_the_gpu_and_equals_plain_pytorch():
    model = network()
    plain = copy.deepcopy(model).cuda()
    samples = data()
    job = pollux.init(model, torch.optim.SGD(model.parameters(), lr=0.1), samples, 64, shuffle=False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    seen = 0
    with job:
        for _ in job.epochs(2):
            for x, y in job.batches():
                assert x.is_cuda
                loss = F.cross_entropy(job.model(x), y)
                job.backward(loss)
                first = seen * 64 % 640
                mine = F.cross_entropy(plain(samples.tensors[0][first : first + 64].cuda()), y)
                optimizer.zero_grad()
                mine.backward()
                optimizer.step()
                assert torch.equal(loss, mine)
                seen += 1
    assert seen == 20


class Hungry(nn.Module):
    """Needs a gigabyte of activations for every 16 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = next(self.inner.parameters()).mean()
        wide = x.new_ones(x.shape[0], 16 * 2**20) * scale
        output: torch.Tensor = self.inner(x)
        return output + wide.sin().mean(dim=1, keepdim=True) * 0.0


def test_real_out_of_memory_at_a_new_size_is_survived(monkeypatch):
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 6 * 2**30 / total))
    monkeypatch.setattr(StepRunner, "predicted_local_batch", lambda self, local_batch: None)
    model = Hungry()
    job = pollux.init(model, torch.optim.SGD(model.parameters(), lr=0.01), data(), 8, max_batch_size=256)
    try:
        with job:
            asked = False
            for _ in job.epochs(2):
                for x, y in job.batches():
                    job.backward(F.cross_entropy(job.model(x), y))
                    if job.step == 5 and not asked:
                        asked = True
                        job._parts.adaptation.change_batch(
                            BatchChange(BatchChoice(64, 0, 1), 1.5, 1.0, 0.9, "for the test")
                        )
                        job._parts.loader.rewind()
                        job._run.feed.forget()
            kinds = [event.kind for event in job.receipt.events]
            assert "out-of-memory" in kinds
            assert job.local_batch <= 8
            assert all(entry["samples"] == 640 for entry in job.receipt.to_json()["ledger"])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_noise_in_mixed_precision_agrees_with_float32(precision):
    estimates = []
    for kind in ("fp32", precision):
        model = network()
        scaler = torch.amp.GradScaler("cuda") if kind == "fp16" else None
        dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[kind]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        with pollux.init(model, optimizer, data(6400), 64, max_batch_size=64, scaler=scaler, clip_norm=0.01) as job:
            for _ in job.epochs(6):
                for x, y in job.batches():
                    with torch.autocast("cuda", dtype=dtype, enabled=kind != "fp32"):
                        loss = F.cross_entropy(job.model(x), y)
                    job.backward(loss)
            estimates.append(job.noise)
    plain, mixed = estimates
    assert plain.is_known
    assert mixed.is_known
    assert math.isclose(plain.noise_scale, mixed.noise_scale, rel_tol=0.15)


# PyTorch warns that this mode does not see every operation that waits.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_does_not_wait_for_the_device():
    model = network()
    with pollux.init(model, torch.optim.AdamW(model.parameters(), fused=True), data(), 64, max_batch_size=64) as job:
        steps = 0
        for _ in job.epochs(6):
            for x, y in job.batches():
                torch.cuda.set_sync_debug_mode("error" if steps == 30 else "default")
                try:
                    job.backward(F.cross_entropy(job.model(x), y))
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                steps += 1
        assert steps > 30
        assert job.noise.num_measured > 0


def test_checkpoint_and_resume_on_the_gpu(tmp_path):
    curves = []
    for stops in (False, True):
        folder = tmp_path / str(stops)
        losses: list[float] = []
        for _ in range(2 if stops else 1):
            model = network()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            with pollux.init(model, optimizer, data(), 64, checkpoint_dir=folder) as job:
                for _ in job.epochs(3):
                    for x, y in job.batches():
                        loss = F.cross_entropy(job.model(x), y)
                        losses.append(loss.item())
                        job.backward(loss)
                        if stops and job.step == 13 and len(losses) == 13:
                            break
                    if stops and job.step == 13 and len(losses) == 13:
                        job.checkpoint()
                        break
        curves.append(losses)
    assert curves[0] == curves[1]
