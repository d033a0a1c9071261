"""Mistakes that only several replicas can make: each ends soon, with one clear error where it was made."""

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import pollux
from pollux.testing.waiting import PATIENCE_SECONDS

HERE = str(Path(__file__))


def parts(size: int = 24, width: int = 4) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))
    data = torch.utils.data.TensorDataset(torch.randn(size, 3), torch.randint(0, 2, (size,)))
    return model, torch.optim.SGD(model.parameters(), 0.1), data


def failures(replica_server, function: str, num_replicas: int = 2, seconds: float = PATIENCE_SECONDS, **arguments):
    began = time.monotonic()
    results = replica_server.start(f"{HERE}:{function}", num_replicas, arguments).wait(seconds)
    assert time.monotonic() - began < seconds, "a replica waited for another in vain"
    return results


def wrong_model() -> None:
    model, optimizer, data = parts()
    job = pollux.init(model, optimizer, data, 6)
    for _ in job.epochs(1):
        for x, y in job.batches():
            job.backward(F.cross_entropy(model(x), y))


def test_the_model_itself_instead_of_the_jobs(replica_server):
    for result in failures(replica_server, "wrong_model"):
        assert result.error == "MisusedJob"
        assert "call job.model(x) instead of model(x)" in result.message


def not_finite(replica: int, where: str) -> None:
    model, optimizer, data = parts()
    job = pollux.init(model, optimizer, data, 6)
    for _ in job.epochs(1):
        for x, y in job.batches():
            loss = F.cross_entropy(job.model(x), y)
            if job.step == 2 and job.replica == replica:
                if where == "loss":
                    loss = loss * math.nan
                else:
                    loss.register_hook(lambda gradient: gradient * math.inf)
            job.backward(loss)


def test_a_loss_that_is_not_finite_on_one_replica_ends_all(replica_server):
    first, second = failures(replica_server, "not_finite", replica=1, where="loss")
    assert second.error == "NonFiniteValue"
    assert "the loss is nan at step 2" in second.message
    assert first.exit_code == 1


def test_a_gradient_that_is_not_finite_on_one_replica_is_the_same_error_on_all(replica_server):
    for result in failures(replica_server, "not_finite", replica=1, where="gradient"):
        assert result.error == "NonFiniteValue"
        assert "a gradient is not finite at step 2" in result.message


DIFFERENT: dict[str, tuple[list[Any], str]] = {
    "batch_size": ([6, 7], "batch_size (6, 7)"),
    "max_batch_size": ([None, 12], "max_batch_size (None, 12)"),
    "max_local_batch": ([2, None], "max_local_batch (2, None)"),
    "accumulation": ([0, 1], "accumulation (0, 1)"),
    "seed": ([1, 2**63 - 1], f"seed (1, {2**63 - 1})"),
    "shuffle": ([True, False], "shuffle (True, False)"),
    "drop_last": ([False, True], "drop_last (False, True)"),
    "num_workers": ([0, 1], "num_workers (0, 1)"),
    "epoch_size": ([24, 23], "epoch_size (24, 23)"),
    "measure_noise": ([True, False], "measure_noise (True, False)"),
    "sync_batchnorm": ([True, False], "sync_batchnorm (True, False)"),
    "lr_rule": (["sqrt", "none"], "lr_rule ('sqrt', 'none')"),
    "clip_norm": ([1.0, None], "clip_norm (1.0, None)"),
    "ddp_options": ([{"static_graph": True}, None], "ddp_options (['static_graph'], [])"),
    "sampler": ([list(range(24)), None], "the kind of sampler ('list', 'NoneType')"),
    "sampler's order": ([list(range(12)), list(range(12, 24))], "the order that the sampler gives ("),
    "size": ([24, 25], "the size of the dataset (24, 25)"),
    "width": ([4, 5], "the model ('4 parameters, 26 values, "),
    "lr": ([0.1, 0.2], "the learning rates ([0.1], [0.2])"),
}


def different() -> list[str]:
    """In one process group, one mistake after another: the message of each, after which the next job starts anew."""
    dist.init_process_group("gloo")
    said = []
    for name, (values, _) in DIFFERENT.items():
        value = values[dist.get_rank()]
        made = {name: value} if name in ("size", "width") else {}
        model, optimizer, data = parts(**made)
        if name == "lr":
            optimizer.param_groups[0]["lr"] = value
        given = {} if made or name == "lr" else {name.removesuffix("'s order"): value}
        with pytest.raises(pollux.PolluxError) as caught:
            pollux.init(model, optimizer, data, **{"batch_size": 6, **given})
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    dist.destroy_process_group()
    return said


def test_replicas_that_disagree(replica_server):
    first, second = replica_server.run(f"{HERE}:different", 2)
    assert first == second
    for message, (name, (_, words)) in zip(first, DIFFERENT.items(), strict=True):
        assert message.startswith(f"InvalidInput: replicas disagree on {words}"), name
    assert "Pollux shares the samples out" in first[list(DIFFERENT).index("sampler's order")]


def sharded_in_part() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, _, data = parts()
    fully_shard(model[0], mesh=mesh)
    with pytest.raises(pollux.PolluxError) as caught:
        pollux.init(model, torch.optim.SGD(model.parameters(), 0.1), data, 6)
    fully_shard(model, mesh=mesh)
    with pollux.init(model, torch.optim.SGD(model.parameters(), 0.1), data, 6) as job:
        for _ in job.epochs(1):
            for x, y in job.batches():
                job.backward(F.cross_entropy(job.model(x), y))
    dist.destroy_process_group()
    return str(caught.value)


def test_a_model_whose_parts_alone_are_sharded(replica_server):
    for message in replica_server.run(f"{HERE}:sharded_in_part", 2):
        assert "call fully_shard(model) last" in message


def too_many(**options) -> None:
    pollux.init(*parts(), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 2}, "batch_size is 2, below the 3 replicas"),
        ({"batch_size": 2, "max_batch_size": 2}, "max_batch_size is 2, below the 3 replicas"),
    ],
)
def test_more_replicas_than_samples_in_a_batch(replica_server, options, words):
    for result in failures(replica_server, "too_many", 3, **options):
        assert result.error == "InvalidInput"
        assert words in result.message


def wrapped() -> None:
    dist.init_process_group("gloo")
    model, _, data = parts()
    model = nn.parallel.DistributedDataParallel(model)
    pollux.init(model, torch.optim.SGD(model.parameters(), 0.1), data, 6)


def test_a_model_that_is_wrapped_already(replica_server):
    for result in failures(replica_server, "wrapped"):
        assert result.error == "InvalidInput"
        assert "wrapped in DistributedDataParallel already" in result.message


def train(folder: str, width: int = 4) -> dict[str, Any]:
    model, optimizer, data = parts(width=width)
    job = pollux.init(model, optimizer, data, 6, checkpoint_dir=folder)
    for _ in job.epochs(1):
        for x, y in job.batches():
            job.backward(F.cross_entropy(job.model(x), y))
    return {"step": job.step}


def test_a_checkpoint_of_another_model_is_refused_on_all_replicas(replica_server, tmp_path):
    replica_server.run(f"{HERE}:train", 2, {"folder": str(tmp_path / "saved")})
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for result in failures(replica_server, "train", 3, folder=str(tmp_path / "saved"), width=5):
        assert result.error == "CheckpointMismatch"
        assert "0.weight" in result.message
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_folder_that_cannot_be_is_refused_on_all_replicas(replica_server, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for result in failures(replica_server, "train", 2, folder=str(tmp_path / "file" / "inside")):
        assert result.error == "InvalidInput"
        assert f"checkpoint_dir is '{tmp_path / 'file' / 'inside'}'" in result.message


def nowhere() -> None:
    os.environ.pop("MASTER_ADDR")
    pollux.init(*parts(), 6)


def test_replicas_that_are_not_told_where_to_meet(replica_server):
    for result in failures(replica_server, "nowhere"):
        assert result.error == "InvalidInput"
        assert "MASTER_ADDR" in result.message


def two_jobs() -> list[int]:
    """In one process group of the user's own, one job after the other; the first is stopped by a signal."""
    dist.init_process_group("gloo")
    steps = []
    for number in range(3):
        job = pollux.init(*parts(240), 6)
        try:
            for _ in job.epochs(1):
                for x, y in job.batches():
                    if number == 0 and job.step == 1:
                        os.kill(os.getpid(), 15)
                    if number == 0:
                        time.sleep(0.01)
                    job.backward(F.cross_entropy(job.model(x), y))
        except pollux.JobStopped:
            pass
        steps.append(job.step)
        job.close()
    assert dist.is_initialized(), "a group that the user made stays"
    dist.destroy_process_group()
    return steps


def test_jobs_one_after_the_other_do_not_hear_each_others_requests(replica_server):
    results = replica_server.run(f"{HERE}:two_jobs", 2)
    assert results[0] == results[1]
    assert results[0][0] < 40
    assert results[0][1:] == [40, 40]


def closed_with_batchnorm() -> float:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    data = parts()[2]
    with pollux.init(model, torch.optim.SGD(model.parameters(), 0.1), data, 6) as job:
        for _ in job.epochs(1):
            for x, y in job.batches():
                job.backward(F.cross_entropy(job.model(x), y))
    assert type(model[1]) is nn.BatchNorm1d
    loss = F.cross_entropy(model(data.tensors[0]), data.tensors[1])
    loss.backward()
    return float(loss.detach())


def test_a_closed_job_gives_the_model_back_as_it_was(replica_server):
    assert len(set(replica_server.run(f"{HERE}:closed_with_batchnorm", 2))) >= 1
