"""FSDP2: a model sharded by the user trains, is killed, resumes at another size, and matches plain PyTorch.

Run as a script, this is the job.
"""

import importlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.s3 import make_bucket, s3_server
from torch import nn
from torch.utils.data import TensorDataset

import pollux
from pollux.agent import pass_order
from pollux.agent.adaptation.adaptation import Adaptation
from pollux.agent.data.ledger import SampleLedger
from pollux.core.errors import InvalidInput

SAMPLES, BATCH, EPOCHS, SEED = 50, 8, 3, 3


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator)
    y = torch.randn(SAMPLES, 1, dtype=torch.float64, generator=generator)
    return TensorDataset(x, y)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 1))
    return nn.Sequential(*layers).double()


def whole(model: nn.Module) -> list[float]:
    """All parameters; a collective where they are sharded."""
    tensors = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [float(value) for tensor in tensors for value in tensor.detach().reshape(-1)]


def plain() -> list[float]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = data().tensors
    for epoch in range(EPOCHS):
        for part in pass_order(SAMPLES, SEED, epoch).split(BATCH):
            nn.functional.mse_loss(model(x[part]), y[part]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


def test_killed_and_resumed_at_another_size_matches_plain_pytorch(launch, tmp_path):
    first, second = ({"folder": str(tmp_path / name), "sharded": True, "max_local_batch": 3} for name in "ab")
    runs = [
        (2, {**first, "kill_at": 12}, "killed"),
        (3, first),
        (2, {**second, "kill_at": 12}, "killed"),
        (1, {**second, "sharded": False}),
    ]
    _, at_three, _, alone = launch(__file__, runs)
    expected = plain()
    for answer in [*at_three, *alone]:
        assert answer["resumed_at"] == 10
        assert answer["steps"] == EPOCHS * -(-SAMPLES // BATCH)
        assert answer["ledgers"][-1] == [SAMPLES, SampleLedger.of_range(SAMPLES).digest]
        assert max(abs(one - other) for one, other in zip(answer["parameters"], expected, strict=True)) < 1e-12


@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.long), True])
def test_so_it_does_from_a_store_with_replicas_that_share_no_folder(launch, tmp_path, sharded):
    """The one that is killed was replica 0 of other machines than those that go on."""
    with s3_server() as variables:
        settings = {"folder": "s3://bucket/run", "sharded": sharded, "max_local_batch": 3}
        before, after = (
            {
                **settings,
                "machines": str(tmp_path / name),
                "variables": {**variables, "POLLUX_RUN_ID": "run", "POLLUX_GENERATION": generation},
            }
            for name, generation in (("before", "1"), ("after", "2"))
        )
        runs = [(2, {**before, "kill_at": 12, "bucket": "bucket"}, "killed"), (3, after)]
        _, answers = launch(__file__, runs)
    expected = plain()
    copies = (tmp_path / "after").glob("*/pollux/checkpoints/*/step-0000000010")
    assert {path.relative_to(tmp_path / "after").parts[0] for path in copies} >= {"1", "2"}
    for answer in answers:
        assert answer["resumed_at"] == 10
        assert answer["ledgers"][-1] == [SAMPLES, SampleLedger.of_range(SAMPLES).digest]
        assert max(abs(one - other) for one, other in zip(answer["parameters"], expected, strict=True)) < 1e-12


def test_saving_in_the_background_does_not_disturb_the_replicas_talk(launch, tmp_path):
    settings = {"folder": str(tmp_path / "c"), "sharded": True, "background": True}
    (answers,) = launch(__file__, [(3, settings)])
    expected = plain()
    for answer in answers:
        assert max(abs(one - other) for one, other in zip(answer["parameters"], expected, strict=True)) < 1e-12


def test_a_batch_that_grows_is_refused(launch, tmp_path):
    ((answer,),) = launch(__file__, [(1, {"folder": str(tmp_path), "sharded": True, "max_batch_size": 64})])
    assert "leave max_batch_size out" in answer["refused"]


def shard(model: nn.Sequential) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main(settings: dict[str, Any], answer: Path) -> None:
    os.environ.update(settings.get("variables", {}))
    if "bucket" in settings and os.environ["RANK"] == "0":
        make_bucket(settings["bucket"])
    model = network()
    background = settings.get("background", False)
    if background:
        # Replicas exchange numbers after every step.
        patched: Any = Adaptation
        patched.is_round = lambda self, step: True
    if settings["sharded"]:
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {name: settings[name] for name in ("max_local_batch", "max_batch_size") if name in settings}
    folder = settings["folder"]
    if "machines" in settings:
        # Each replica is on a machine of its own, as far as copies of checkpoints go.
        os.environ["XDG_CACHE_HOME"] = os.path.join(settings["machines"], os.environ["RANK"])
    try:
        job = pollux.init(model, optimizer, data(), BATCH, seed=SEED, clip_norm=0.5, checkpoint_dir=folder, **options)
    except InvalidInput as error:
        answer.write_text(json.dumps({"refused": str(error)}))
        return
    ledgers, resumed_at = [], job.step
    for _ in job.epochs(EPOCHS):
        for x, y in job.batches():
            before = job.step
            job.backward(nn.functional.mse_loss(job.model(x), y))
            if job.step > before and job.step % (1 if background else 5) == 0:
                job.checkpoint(wait=not background)
            if job.step == settings.get("kill_at"):
                os.kill(os.getpid(), signal.SIGKILL)
        ledger = job.ledger()
        ledgers.append([ledger.samples, ledger.hash])
    result = {"parameters": whole(model), "steps": job.step, "resumed_at": resumed_at, "ledgers": ledgers}
    answer.write_text(json.dumps(result))
    job.close()


if __name__ == "__main__":
    importlib.import_module("forked").serve(main, ["torch._dynamo", "torch.distributed.fsdp"])
