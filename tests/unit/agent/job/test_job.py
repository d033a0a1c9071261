"""The object that a training script holds: its loop, how it may not be used, and what it says about itself."""

import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pollux
from pollux.agent import pass_order
from pollux.core.errors import InvalidInput, MisusedJob, NonFiniteValue, UnknownName


def parts(size: int = 20) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = TensorDataset(torch.randn(size, 3), torch.randint(0, 2, (size,)))
    return model, torch.optim.SGD(model.parameters(), 0.1), data


def loss_of(job, batch) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(job.model(x), y)


def first_batch(job):
    next(iter(job.epochs(1)))
    return next(iter(job.batches()))


def test_one_epoch_is_one_pass_over_the_data_in_the_promised_order():
    model, optimizer, data = parts()
    seen = []
    with pollux.init(model, optimizer, data, 6, seed=4) as job:
        for epoch in job.epochs(2):
            assert job.epoch == epoch
            for x, y in job.batches():
                seen.append(x)
                job.backward(F.cross_entropy(job.model(x), y))
            assert job.ledger().is_complete
            assert job.ledger().samples == 20
        assert (job.step, job.samples, job.progress, job.epoch) == (8, 40, 40.0, 2)
    order = torch.cat([pass_order(20, 4, number) for number in range(2)])
    assert torch.equal(torch.cat(seen), data.tensors[0][order])


def test_backward_twice_for_one_batch_is_refused():
    with pollux.init(*parts(), 5) as job:
        batch = first_batch(job)
        job.backward(loss_of(job, batch))
        with pytest.raises(MisusedJob, match="twice"):
            job.backward(loss_of(job, batch))


def test_backward_outside_of_batches_is_refused():
    model, optimizer, data = parts()
    with pollux.init(model, optimizer, data, 5) as job, pytest.raises(MisusedJob, match=r"outside of job.batches\(\)"):
        job.backward(loss_of(job, data[:5]))


def test_a_batch_without_backward_is_refused():
    with pollux.init(*parts(), 5) as job:
        next(iter(job.epochs(1)))
        batches = iter(job.batches())
        next(batches)
        with pytest.raises(MisusedJob, match=r"never passed to job.backward"):
            next(batches)


def test_batches_outside_of_an_epoch_are_refused():
    with pollux.init(*parts(), 5) as job, pytest.raises(MisusedJob, match=r"job.epochs\(n\)"):
        next(iter(job.batches()))


def test_a_closed_job_is_refused():
    job = pollux.init(*parts(), 5)
    job.close()
    job.close()
    with pytest.raises(MisusedJob, match="closed"):
        next(iter(job.epochs(1)))


@pytest.mark.parametrize("count", [0, -1, 1.5, "3", None, True])
def test_epochs_takes_a_whole_number(count):
    with pollux.init(*parts(), 5) as job, pytest.raises(InvalidInput, match="epochs is"):
        next(iter(job.epochs(count)))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda job, batch: 1.5, "loss is 1.5"),
        (lambda job, batch: job.model(batch[0]), r"shape \[5, 2\]"),
        (lambda job, batch: loss_of(job, batch).detach(), "no gradient"),
        (lambda job, batch: None, "loss is None"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss, words):
    with pollux.init(*parts(), 5) as job:
        batch = first_batch(job)
        with pytest.raises(InvalidInput, match=words):
            job.backward(loss(job, batch))


def test_an_unknown_reduction_is_refused():
    with pollux.init(*parts(), 5) as job:
        batch = first_batch(job)
        with pytest.raises(UnknownName, match="did you mean 'mean'"):
            job.backward(loss_of(job, batch), reduction="mena")


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_none_is_refused(weight):
    with pollux.init(*parts(), 5) as job:
        batch = first_batch(job)
        with pytest.raises(InvalidInput, match="weight is"):
            job.backward(loss_of(job, batch), weight=weight)


def test_one_step_keeps_to_one_kind_of_loss():
    with pollux.init(*parts(), 6, accumulation=1) as job:
        next(iter(job.epochs(1)))
        batches = iter(job.batches())
        job.backward(loss_of(job, next(batches)))
        with pytest.raises(MisusedJob, match="began with a loss by 'mean' and goes on by 'sum'"):
            job.backward(loss_of(job, next(batches)), reduction="sum")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_training_and_touches_nothing(value, tmp_path):
    model, optimizer, data = parts()
    with pollux.init(model, optimizer, data, 5, checkpoint_dir=tmp_path) as job:
        next(iter(job.epochs(1)))
        batches = iter(job.batches())
        job.backward(loss_of(job, next(batches)))
        job.checkpoint()
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(NonFiniteValue, match=rf"loss is {value} at step 1.*clip_norm"):
            job.backward(loss_of(job, next(batches)) * value)
        assert all(map(torch.equal, before, model.parameters()))
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000001"]


class _Infinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


def test_a_gradient_that_is_not_finite_ends_training_before_the_optimiser():
    model, optimizer, data = parts()
    with pollux.init(model, optimizer, data, 5) as job:
        batch = first_batch(job)
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(NonFiniteValue, match="a gradient is not finite at step 0"):
            job.backward(F.cross_entropy(_Infinite.apply(job.model(batch[0])), batch[1]))
        assert all(map(torch.equal, before, model.parameters()))


def test_a_scaler_skips_what_is_not_finite():
    model, optimizer, data = parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pollux.init(model, optimizer, data, 5, scaler=scaler, clip_norm=1.0) as job:
        next(iter(job.epochs(1)))
        batches = iter(job.batches())
        before = [parameter.clone() for parameter in model.parameters()]
        job.backward(loss_of(job, next(batches)) * math.inf)
        assert all(map(torch.equal, before, model.parameters()))
        assert scaler.get_scale() == 4.0
        job.backward(loss_of(job, next(batches)))
        assert not all(map(torch.equal, before, model.parameters()))


def losses_of(job) -> list[float]:
    losses = []
    for _ in job.epochs(2):
        for batch in job.batches():
            loss = loss_of(job, batch)
            losses.append(float(loss.detach()))
            job.backward(loss)
    return losses


def test_a_scaler_changes_nothing_where_all_is_finite():
    with pollux.init(*parts(), 5) as job:
        plain = losses_of(job)
    with pollux.init(*parts(), 5, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)) as job:
        assert losses_of(job) == plain


def test_before_step_sees_the_averaged_gradient_and_may_change_it():
    model, optimizer, data = parts()
    seen = []

    def halve() -> None:
        seen.append(model[0].weight.grad.clone())
        model[0].weight.grad.zero_()

    before = model[0].weight.detach().clone()
    with pollux.init(model, optimizer, data, 20, accumulation=3, before_step=halve, shuffle=False) as job:
        for _ in job.epochs(1):
            for batch in job.batches():
                job.backward(loss_of(job, batch))
    assert torch.equal(before, model[0].weight)
    fresh, _, _ = parts()
    F.cross_entropy(fresh(data.tensors[0]), data.tensors[1]).backward()
    torch.testing.assert_close(seen[0], fresh[0].weight.grad)


def test_a_batch_whose_tokens_are_all_masked_counts_nothing():
    """Its mean is a mean over nothing: NaN. By its weight, 0, it has no part in the average."""
    model, optimizer, data = parts()
    mask = torch.ones(20, dtype=torch.bool)
    mask[:5] = False
    data = TensorDataset(*data.tensors, mask)
    with pollux.init(model, optimizer, data, 10, accumulation=1, shuffle=False, clip_norm=1e9) as job:
        for _ in job.epochs(1):
            for x, y, counted in job.batches():
                target = torch.where(counted, y, -100)
                loss = F.cross_entropy(job.model(x), target)
                job.backward(loss, weight=float(counted.sum()))
    fresh, sgd, _ = parts()
    for rows in (slice(5, 10), slice(10, 20)):
        sgd.zero_grad()
        F.cross_entropy(fresh(data.tensors[0][rows]), data.tensors[1][rows]).backward()
        sgd.step()
    for ours, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_masked_mean_over_no_token_leaves_the_gradients_finite(as_tensor):
    """Its own gradient is 0/0, wherever the zero is put in afterwards."""
    model, optimizer, data = parts()
    mask = torch.ones(20)
    mask[:5] = 0.0
    data = TensorDataset(*data.tensors, mask)
    with pollux.init(model, optimizer, data, 10, accumulation=1, shuffle=False) as job:
        for _ in job.epochs(1):
            for x, y, counted in job.batches():
                each = F.cross_entropy(job.model(x), y, reduction="none")
                tokens = counted.sum()
                job.backward((each * counted).sum() / tokens, weight=tokens if as_tensor else float(tokens))
    fresh, sgd, _ = parts()
    for rows in (slice(5, 10), slice(10, 20)):
        sgd.zero_grad()
        F.cross_entropy(fresh(data.tensors[0][rows]), data.tensors[1][rows]).backward()
        sgd.step()
    for ours, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_leaving_an_epoch_early_skips_the_rest_of_the_pass():
    with pollux.init(*parts(), 5) as job:
        for epoch in job.epochs(2):
            for number, batch in enumerate(job.batches()):
                job.backward(loss_of(job, batch))
                if epoch == 0 and number == 1:
                    break
        assert (job.samples, job.epoch) == (30, 2)
        assert job._parts.loader.pass_index == 2


def test_leaving_in_mid_step_forgets_the_half_step():
    with pollux.init(*parts(), 10, accumulation=1) as job:
        for epoch in job.epochs(2):
            for number, batch in enumerate(job.batches()):
                job.backward(loss_of(job, batch))
                if epoch == 0 and number == 2:
                    break
        assert (job.step, job.samples) == (3, 30)


def test_measuring_noise_in_exact_mode_changes_no_loss():
    with pollux.init(*parts(200), 10) as job:
        plain = losses_of(job)
    with pollux.init(*parts(200), 10, measure_noise=True) as job:
        steps, part = [], 0.0
        for _ in job.epochs(2):
            for batch in job.batches():
                micro: Any = job._parts.engine._micro
                loss = loss_of(job, batch)
                part += float(loss.detach()) * micro.samples / micro.total
                job.backward(loss)
                if micro.is_last:
                    steps.append(part)
                    part = 0.0
        assert job.noise.num_measured > 0
    torch.testing.assert_close(torch.tensor(steps), torch.tensor(plain), rtol=1e-5, atol=0)


def test_metrics_and_receipt(tmp_path):
    with pollux.init(*parts(), 5, output_dir=tmp_path, name="mine") as job:
        for _ in job.epochs(2):
            for batch in job.batches():
                job.backward(loss_of(job, batch))
            job.log(accuracy=0.5)
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["job"] == "mine"
    assert receipt["exact"] is True
    assert receipt["metrics"]["accuracy"]["epoch"] == [1.0, 2.0]
    assert [entry["samples"] for entry in receipt["ledger"]] == [20, 20]
    assert receipt["totals"]["samples"] == 40


def test_asking_for_what_was_not_configured():
    with pollux.init(*parts(), 5) as job:
        with pytest.raises(MisusedJob, match="checkpoint_dir="):
            job.checkpoint()
        with pytest.raises(MisusedJob, match="output_dir="):
            job.write_receipt()


def test_drop_last_leaves_out_the_rest_of_each_pass():
    with pollux.init(*parts(23), 5, drop_last=True) as job:
        for _ in job.epochs(2):
            for batch in job.batches():
                job.backward(loss_of(job, batch))
            assert job.ledger().samples == 20
        assert (job.step, job.progress, job.epoch) == (8, 40.0, 2)
