"""Changes of batch: gradients, moments, schedules and samples stay right; what memory or the loss refuses is undone."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pollux
from pollux.agent.adaptation.adaptation import Adaptation
from pollux.agent.adaptation.batch_tuner import BatchChange, fitting_choice
from pollux.testing.waiting import PATIENCE_SECONDS

HERE = str(Path(__file__))
SIZE = 330
INITIAL = 8


class Numbered(torch.utils.data.Dataset[Any]):
    def __init__(self, noise: float = 1.0):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(SIZE, 6, generator=generator, dtype=torch.float64)
        self.y = self.x @ torch.randn(6, generator=generator, dtype=torch.float64)
        self.y += noise * torch.randn(SIZE, generator=generator, dtype=torch.float64)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index, self.x[index], self.y[index]


class Hungry(nn.Module):
    """Runs out of memory, forward or backward, beyond so many samples at once, on the replicas named."""

    def __init__(self, limit: int | None = None, where: str = "forward", replicas: tuple[int, ...] = (0, 1, 2, 3)):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        self.limit = limit if int(os.environ.get("RANK", "0")) in replicas else None
        self.where = where

    def forward(self, x):
        too_many = self.limit is not None and len(x) > self.limit
        if too_many and self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
        return Failing.apply(self.layers(x), too_many and torch.is_grad_enabled()).squeeze(1)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
        return gradient, None


def parts(optimizer: str, **hungry) -> Any:
    torch.manual_seed(0)
    model = Hungry(**hungry).double()
    if optimizer == "adamw":
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def force(changes: list[int | None]) -> None:
    """At the end of each round, in turn, go over to this batch."""
    left = list(changes)

    def next_change(self: Adaptation, progress: float) -> BatchChange | None:
        total = left.pop(0) if left else None
        if total is None or self.guard.is_frozen(progress):
            return None
        choice = fitting_choice(total, self._replicas.num_replicas, self.local_max, self.allowed.accumulation)
        return BatchChange(choice, 1.5, 1.0, 0.9, "as told")

    Adaptation.next_change = next_change  # type: ignore[method-assign]


def train(
    optimizer: str = "sgd",
    changes: tuple[int | None, ...] = (),
    epochs: int = 3,
    folder: str | None = None,
    stop_at: int = -1,
    save_at: int = -1,
    schedule: bool = False,
    hungry: dict[str, Any] | None = None,
    **options,
) -> dict[str, Any]:
    """A job whose batch changes as told; returns what every step took, and how it went."""
    force(list(changes))
    model, chosen = parts(optimizer, **(hungry or {}))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(chosen, 0.99) if schedule else None
    job = pollux.init(
        model, chosen, Numbered(), INITIAL, checkpoint_dir=folder, lr_scheduler=scheduler, shuffle=True, **options
    )
    steps: list[dict[str, Any]] = []
    saved: list[list[str]] = []
    with contextlib.suppress(SystemExit):
        for _ in job.epochs(epochs):
            parts_of_step: dict[str, Any] = {"ids": [], "loss": 0.0}
            for ids, x, y in job.batches():
                micro: Any = job._parts.engine._micro
                if micro.index == 0:
                    parts_of_step = {"ids": [], "loss": 0.0}
                loss = F.mse_loss(job.model(x), y)
                if micro.samples:
                    parts_of_step["ids"] += ids.tolist()
                    parts_of_step["loss"] += float(loss.detach()) * micro.samples / micro.total
                factor, rate = (
                    job._parts.adaptation.factors(micro.total, job._parts.progress.epochs)[0],
                    chosen.param_groups[0]["lr"],
                )
                before, place = job.step, job._parts.loader.pass_index
                if stop_at == before and micro.is_last:
                    os.kill(os.getpid(), signal.SIGTERM)
                job.backward(loss)
                if micro.is_last and job.step > before:
                    steps.append({**parts_of_step, "rate": rate * factor, "pass": place, "step": before})
                elif micro.is_last and job.step < before:
                    # Rolled back: what came after does not count.
                    steps = [step for step in steps if step["step"] < job.step]
                    saved.append(sorted(path.name for path in Path(folder).glob("step-*")) if folder else [])
                if micro.is_last and job.step == save_at:
                    job.checkpoint()
                    saved.append(sorted(path.name for path in Path(folder).glob("step-*")) if folder else [])
    receipt = job.receipt.to_json()
    events = [{"kind": event["kind"], "text": event["text"], **event["numbers"]} for event in receipt["events"]]
    result = {
        "steps": steps,
        "events": events,
        "passes": receipt["ledger"],
        "saved": saved,
        "batch": job.batch_size,
        "local_batch": job.local_batch,
        "accumulation": job.accumulation,
        "progress": job.progress,
        "samples": job.samples,
        "epoch": job.epoch,
        "rates": [group["lr"] for group in chosen.param_groups],
        "frozen": job._parts.adaptation.guard.frozen_until,
        "held": job._parts.adaptation.memory.largest_run,
        "measured": job.noise.num_measured,
    }
    job.close()
    return result


def steps_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps of all replicas together."""
    merged = []
    for same in zip(*(result["steps"] for result in results), strict=True):
        assert len({(step["step"], step["rate"], step["pass"]) for step in same}) == 1
        ids = [number for step in same for number in step["ids"]]
        merged.append({**same[0], "ids": ids, "loss": sum(step["loss"] for step in same)})
    return merged


def require_plain(results: list[dict[str, Any]], optimizer: str) -> list[dict[str, Any]]:
    steps = steps_of(results)
    require_losses(steps, optimizer)
    return steps


def require_losses(steps: list[dict[str, Any]], optimizer: str) -> None:
    """Plain PyTorch that takes the same samples at the same learning rates has the same losses."""
    data = Numbered()
    model, chosen = parts(optimizer)
    for step in steps:
        x, y = data.x[step["ids"]], data.y[step["ids"]]
        chosen.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        chosen.param_groups[0]["lr"] = step["rate"]
        chosen.step()
        assert step["loss"] == pytest.approx(float(loss.detach()), rel=1e-12)


def require_once(steps: list[dict[str, Any]]) -> None:
    """Every pass but the last took every sample once, and the last none twice."""
    last = max(step["pass"] for step in steps)
    for number in range(last + 1):
        ids = [i for step in steps if step["pass"] == number for i in step["ids"]]
        assert len(ids) == len(set(ids))
        assert number == last or len(ids) == SIZE


def totals(steps: list[dict[str, Any]]) -> list[int]:
    return [len(step["ids"]) for step in steps]


@pytest.mark.parametrize(
    ("num_replicas", "optimizer"),
    [(2, "adamw"), (3, "sgd"), (1, "adamw"), pytest.param(1, "sgd", marks=pytest.mark.long)],
)
def test_a_change_keeps_gradients_and_moments(replica_server, num_replicas, optimizer):
    arguments = {"optimizer": optimizer, "changes": [None, 16, None, 32], "max_batch_size": 36, "lr_rule": "sqrt"}
    results = replica_server.run(f"{HERE}:train", num_replicas, arguments)
    steps = require_plain(results, optimizer)
    require_once(steps)
    middle, large = 16 + (-16) % num_replicas, 32 + (-32) % num_replicas
    assert {8, middle, large} <= set(totals(steps))
    changes = [event for event in results[0]["events"] if event["kind"] == "batch-changed"]
    assert [(change["before"], change["after"]) for change in changes] == [(8, middle), (middle, large)]
    rates = {len(step["ids"]): step["rate"] for step in steps}
    assert rates[large] == pytest.approx((large / 8) ** 0.5 * rates[8])


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_with_batches_read_ahead_by_workers(replica_server, num_replicas):
    """What was read ahead still has the old size; what is read after the change has the new one."""
    arguments = {"changes": [None, 16, None, 32], "max_batch_size": 32, "lr_rule": "sqrt", "num_workers": 2}
    results = replica_server.run(f"{HERE}:train", num_replicas, arguments)
    steps = require_plain(results, "sgd")
    require_once(steps)
    assert {8, 16, 32} <= set(totals(steps))


def test_out_of_memory_with_batches_read_ahead(replica_server):
    hungry = {"limit": 9}
    arguments = {"changes": [None, 16], "max_batch_size": 64, "lr_rule": "sqrt", "hungry": hungry, "num_workers": 2}
    results = replica_server.run(f"{HERE}:train", 1, arguments)
    require_once(require_plain(results, "sgd"))
    assert [event["kind"] for event in results[0]["events"]].count("out-of-memory") == 1


def test_by_accumulation_too(replica_server):
    arguments = {"changes": [16, 32], "max_batch_size": 32, "lr_rule": "linear", "max_local_batch": 5}
    results = replica_server.run(f"{HERE}:train", 2, arguments)
    steps = require_plain(results, "sgd")
    require_once(steps)
    assert results[0]["accumulation"] == 3
    assert results[0]["batch"] == 32


def test_epochs_end_by_progress_and_schedules_follow_it(replica_server):
    """Without an estimate of the noise the efficiency is taken as 1, so progress is samples."""
    arguments = {"changes": [16, 32], "max_batch_size": 32, "lr_rule": "none", "schedule": True, "measure_noise": False}
    (result,) = replica_server.run(f"{HERE}:train", 1, arguments)
    assert result["epoch"] == 3
    assert 3 * SIZE <= result["progress"] < 3 * SIZE + 32
    steps_at_initial = -(-SIZE // INITIAL)
    expected = int(result["progress"] / SIZE * steps_at_initial + 1e-9)
    assert result["rates"][0] == pytest.approx(0.02 * 0.99**expected)


@pytest.mark.parametrize(
    ("num_replicas", "hungry"),
    [
        (1, {"limit": 5}),
        (1, {"limit": 5, "where": "backward"}),
        (2, {"limit": 2, "replicas": [1]}),
        (2, {"limit": 2, "where": "backward", "replicas": [0]}),
        (3, {"limit": 1}),
    ],
)
def test_out_of_memory_at_the_first_step_of_an_exact_job(replica_server, num_replicas, hungry):
    """Accumulation takes the place of what does not fit, and the curve is that of plain PyTorch."""
    results = replica_server.run(f"{HERE}:train", num_replicas, {"hungry": hungry, "epochs": 1})
    steps = require_plain(results, "sgd")
    require_once(steps)
    assert set(totals(steps)) == {8, 2}
    for result in results:
        assert result["local_batch"] <= hungry["limit"]
        assert [event["kind"] for event in result["events"]].count("out-of-memory") >= 1
        assert result["passes"][0]["samples"] == SIZE
        assert result["samples"] == SIZE


@pytest.mark.parametrize(
    ("num_replicas", "replicas", "where"),
    [
        (1, [0], "backward"),
        (2, [0, 1], "forward"),
        (2, [1], "backward"),
        pytest.param(1, [0], "forward", marks=pytest.mark.long),
        pytest.param(2, [0, 1], "backward", marks=pytest.mark.long),
        pytest.param(2, [1], "forward", marks=pytest.mark.long),
    ],
)
def test_out_of_memory_at_a_new_size(replica_server, num_replicas, replicas, where):
    """The step's samples are taken again at the size that worked, and the limit is remembered."""
    limit = 8 // num_replicas + 1
    hungry = {"limit": limit, "where": where, "replicas": replicas}
    arguments = {"changes": [None, 16, None, 16], "max_batch_size": 64, "lr_rule": "sqrt", "hungry": hungry}
    results = replica_server.run(f"{HERE}:train", num_replicas, arguments)
    steps = require_plain(results, "sgd")
    require_once(steps)
    kinds = [event["kind"] for event in results[0]["events"]]
    assert kinds.count("out-of-memory") == 1, "learned the first time"
    assert kinds.index("batch-changed") < kinds.index("out-of-memory")
    assert results[0]["held"] <= limit
    assert {result["batch"] for result in results} == {results[0]["batch"]}


def test_what_memory_refused_is_remembered_across_a_resume(replica_server, tmp_path):
    hungry = {"limit": 9}
    arguments = {"max_batch_size": 64, "lr_rule": "sqrt", "hungry": hungry, "folder": str(tmp_path / "saved")}
    (first,) = replica_server.run(f"{HERE}:train", 1, {**arguments, "changes": [16], "stop_at": 50})
    (second,) = replica_server.run(f"{HERE}:train", 1, {**arguments, "changes": [16]})
    for result in (first, second):
        kinds = [event["kind"] for event in result["events"]]
        assert kinds.count("out-of-memory") == 1
    assert second["events"][-1]["kind"] == "finished"


def test_a_model_that_never_fits_is_refused(replica_server):
    (result,) = replica_server.start(f"{HERE}:train", 1, {"hungry": {"limit": 0}}).wait()
    assert result.error == "InvalidInput"
    assert "memory does not hold 1 sample" in result.message


def test_other_errors_are_not_taken_for_a_lack_of_memory(replica_server):
    (result,) = replica_server.start(f"{HERE}:broken_model").wait()
    assert result.error == "RuntimeError"
    assert result.message == "shapes do not fit"


def broken_model() -> None:
    class Broken(nn.Linear):
        def forward(self, x):
            raise RuntimeError("shapes do not fit")

    model = Broken(6, 1).double()
    job = pollux.init(model, torch.optim.SGD(model.parameters(), 0.1), Numbered(), 8)
    for _ in job.epochs(1):
        for _, x, y in job.batches():
            job.backward(F.mse_loss(job.model(x).squeeze(1), y))


def spike(factor: float = 200.0, **options) -> dict[str, Any]:
    """A rule of one's own that ruins the run at a larger batch."""
    return train(lr_rule=lambda scale, gain, group: factor if scale > 1.0 else 1.0, **options)


@pytest.mark.parametrize(
    ("num_replicas", "factor"),
    [
        (2, 60.0),
        (1, 1e6),
        (1, 1e200),
        pytest.param(1, 60.0, marks=pytest.mark.long),
        pytest.param(2, 1e6, marks=pytest.mark.long),
    ],
)
def test_a_loss_spike_after_a_change_is_rolled_back(replica_server, num_replicas, factor):
    changes = [None] * 7 + [16, 16]
    arguments = {"factor": factor, "changes": changes, "max_batch_size": 64, "epochs": 8}
    results = replica_server.run(f"{HERE}:spike", num_replicas, arguments)
    steps = require_plain(results, "sgd")
    require_once(steps)
    assert set(totals(steps)) == {8, 2}, "no step at the bad batch counts"
    for result in results:
        kinds = [event["kind"] for event in result["events"] if event["kind"] != "resumed"]
        assert kinds == ["started", "batch-changed", "rolled-back", "frozen", "finished"]
        back = result["events"][2]
        assert (back["before"], back["after"]) == (16, 8)
        assert result["batch"] == 8
        assert result["frozen"] > 0
        assert result["samples"] == 8 * SIZE
        assert all(entry["samples"] == SIZE for entry in result["passes"])


def test_without_a_spike_nothing_is_rolled_back(replica_server):
    arguments = {"factor": 1.2, "changes": [None] * 7 + [16], "max_batch_size": 64, "epochs": 10}
    (result,) = replica_server.run(f"{HERE}:spike", 1, arguments)
    assert "rolled-back" not in [event["kind"] for event in result["events"]]
    assert result["batch"] == 16


def test_a_checkpoint_from_after_the_change_is_not_resumed_once_it_was_undone(replica_server, tmp_path):
    """The change is at step 150, the spike is seen at step 170."""
    arguments = {"max_batch_size": 64, "epochs": 8, "folder": str(tmp_path / "saved"), "factor": 60.0}
    told = {**arguments, "changes": [None] * 7 + [16], "save_at": 155}
    (result,) = replica_server.run(f"{HERE}:spike", 1, told)
    assert [event["kind"] for event in result["events"]].count("rolled-back") == 1
    assert result["saved"][:2] == [["step-0000000155"], ["step-0000000150"]]
    (after,) = replica_server.run(f"{HERE}:spike", 1, arguments)
    assert after["samples"] == result["samples"] == 8 * SIZE
    assert after["frozen"] == result["frozen"]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (1, 3)])
def test_an_adaptive_job_keeps_what_it_learned(replica_server, tmp_path, before, after):
    """Batch, noise statistics, moments and learning rates, also at another number of replicas."""
    arguments = {
        "optimizer": "adamw",
        "max_batch_size": 32,
        "lr_rule": "sqrt",
        "epochs": 4,
        "folder": str(tmp_path / "saved"),
    }
    first = replica_server.run(f"{HERE}:train", before, {**arguments, "changes": [None, 16], "stop_at": 60})
    assert first[0]["batch"] == 16
    assert first[0]["measured"] > 0
    second = replica_server.run(f"{HERE}:train", after, arguments)
    assert second[0]["batch"] == 16
    assert second[0]["measured"] >= first[0]["measured"]
    steps = [*steps_of(first), *steps_of(second)]
    numbers = [step["step"] for step in steps]
    assert numbers == list(range(len(numbers)))
    require_losses(steps, "adamw")
    require_once(steps)
    assert second[0]["epoch"] == 4
    assert all(entry["samples"] == SIZE for entry in second[0]["passes"])


def natural(seed: int = 0) -> dict[str, Any]:
    """Nothing forced: noise is measured, times are fitted, the batch is chosen."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    # Far from the optimum, the noise scale of a regression is about the number of its inputs.
    x = torch.randn(4000, 60, generator=generator)
    y = x @ torch.randn(60, generator=generator) + torch.randn(4000, generator=generator)
    data = torch.utils.data.TensorDataset(x, y)
    model = nn.Linear(60, 1)
    job = pollux.init(model, torch.optim.SGD(model.parameters(), lr=3e-4), data, 16, max_batch_size=128, seed=seed)
    sizes, known_at_change = [], []
    for _ in job.epochs(4):
        for inputs, targets in job.batches():
            before = job.batch_size
            job.backward(F.mse_loss(job.model(inputs).squeeze(1), targets))
            if job.batch_size != before:
                known_at_change.append(job.noise.relative_width)
            sizes.append(job.batch_size)
    changes = [event.numbers for event in job.receipt.events if event.kind == "batch-changed"]
    result = {"sizes": sizes, "changes": [dict(change) for change in changes], "width": known_at_change}
    result |= {"progress": job.progress, "efficiency": job.efficiency}
    job.close()
    return result


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_left_to_itself_it_grows_step_by_step_and_all_replicas_alike(replica_server, num_replicas):
    results = replica_server.run(f"{HERE}:natural", num_replicas, timeout=PATIENCE_SECONDS)
    changes = results[0]["changes"]
    assert changes, "the noise is four times the batch, and a step costs nearly the same at any size"
    for change in changes:
        assert change["after"] <= 2 * change["before"]
        assert change["after"] <= 128
        assert change["gain"] > 1.05
    assert all(width <= 1.0 for width in results[0]["width"])
    assert all(result["sizes"] == results[0]["sizes"] for result in results)
    assert all(result["changes"] == changes for result in results)
    assert results[0]["progress"] >= 4 * 4000 * (1 - 1e-9)
