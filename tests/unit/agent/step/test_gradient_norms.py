"""The meter against separate autograd runs: same lengths, same gradients, nothing left behind."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from pollux.agent.step import gradient_norms as meter_module
from pollux.agent.step import preconditioner as preconditioner_module
from pollux.agent.step.gradient_norms import WARM_STEPS, GradientNormMeter
from pollux.core.errors import MisusedJob


def network(dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


class Tied(nn.Module):
    """One weight used twice, one frozen, one never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(6, dtype=torch.float64), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(6, dtype=torch.float64))

    def forward(self, x):
        return torch.tanh(x @ self.weight + self.frozen) @ self.weight.T


def batch(samples, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 6, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model, x):
    return model(x).square().mean(dim=1).mean()


def two_groups(model, kind=torch.optim.SGD, **options):
    parameters = list(model.parameters())
    return kind([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}], lr=0.01, **options)


def run_step(model, optimizer, meter, parts, *, scale=None, replicas=1):
    """One measured step of these parts, as a job does it; parts of several replicas come one after another."""
    total = sum(len(part) for part in parts)
    optimizer.zero_grad()
    for part in parts:
        meter.start_measuring(total / (len(part) * replicas**2))
        loss = loss_of(model, part) * (len(part) * replicas / total)
        (loss if scale is None else loss * scale).backward()
        meter.stop_measuring()
    meter.close_row(len(parts), total, 1.0 / replicas**2, scale)


def separate(model, optimizer, parts, denominators=None):
    """L and T by group, from one autograd run for each part and one for all."""
    total = sum(len(part) for part in parts)
    group_of = [i for i, group in enumerate(optimizer.param_groups) for _ in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    below = denominators or [torch.ones_like(p) for p in parameters]

    def lengths(x):
        found = torch.autograd.grad(loss_of(model, x), [p for p in parameters if p.requires_grad], allow_unused=True)
        gradients = iter(found)
        by_group = torch.zeros(len(optimizer.param_groups), dtype=torch.float64)
        for parameter, group, scale in zip(parameters, group_of, below, strict=True):
            gradient = next(gradients) if parameter.requires_grad else None
            if gradient is not None:
                by_group[group] += (gradient.double() / scale.double()).square().sum()
        return by_group

    return sum(len(part) / total * lengths(part) for part in parts), lengths(torch.cat(parts))


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("replicas", [1, 4])
def test_uneven_parts_are_those_of_separate_runs(replicas):
    model = network()
    optimizer = two_groups(model)
    meter = GradientNormMeter(optimizer, "cpu")
    parts = batch(37).split([10, 9, 9, 9])
    run_step(model, optimizer, meter, parts, replicas=replicas)
    rows = meter.drain()
    expected = separate(model, optimizer, parts)
    close(rows.parts[0], expected[0])
    close(rows.whole[0], expected[1])
    assert rows.counts.tolist() == [4]
    assert rows.totals.tolist() == [37]
    assert rows.parts.dtype == rows.whole.dtype == torch.float64


def test_rows_wait_in_order_and_the_oldest_gives_way():
    model = network()
    optimizer = two_groups(model)
    meter = GradientNormMeter(optimizer, "cpu", capacity=3)
    expected = []
    for step in range(5):
        parts = batch(8 + step, seed=step).split(4 + step)
        run_step(model, optimizer, meter, parts)
        expected.append(separate(model, optimizer, parts)[0])
    rows = meter.drain()
    assert rows.totals.tolist() == [10, 11, 12]
    close(rows.parts, torch.stack(expected[2:]))
    assert meter.drain().parts.shape == (0, 2)


@pytest.mark.parametrize("set_aside", [False, True])
def test_measuring_changes_no_bit_and_leaves_no_hook(set_aside):
    plain, measured = network(torch.float32), network(torch.float32)
    x = batch(16, torch.float32)
    first = loss_of(plain, x)
    first.backward()
    meter = GradientNormMeter(two_groups(measured), "cpu", set_aside=set_aside)
    meter.start_measuring(1.0)
    assert meter.is_measuring
    second = loss_of(measured, x)
    second.backward()
    meter.stop_measuring()
    meter.close_row(2, 16)
    assert torch.equal(first, second)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), measured.parameters(), strict=True))
    assert not any(p._backward_hooks for p in measured.parameters())
    assert not meter.is_measuring
    meter.drain()
    loss_of(measured, x).backward()
    assert meter.drain().parts.shape == (0, 2)


def test_tied_frozen_unused_and_foreign_parameters():
    model = Tied()
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.frozen, model.unused]}], lr=0.1)
    meter = GradientNormMeter(optimizer, "cpu")
    outside = nn.Parameter(torch.ones(6, dtype=torch.float64))
    parts = batch(12).split(6)
    optimizer.zero_grad()
    for part in parts:
        meter.start_measuring(2.0)
        (loss_of(model, part * outside) / 2).backward()
        meter.stop_measuring()
    meter.close_row(2, 12)
    rows = meter.drain()
    expected = separate(model, optimizer, parts)
    close(rows.parts[0, :1], expected[0][:1])
    close(rows.whole[0, :1], expected[1][:1])
    assert rows.parts[0, 1] == rows.whole[0, 1] == 0.0


def adam_like(state, group):
    moment = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    return (moment / (1 - group["betas"][1] ** int(state["step"]))).sqrt() + group["eps"]


def rms(state, group):
    moment = state["square_avg"]
    if group["centered"]:
        moment = moment - state["grad_avg"] ** 2
    return moment.sqrt() + group["eps"]


OPTIMIZERS: dict[str, Any] = {
    "adam": (torch.optim.Adam, {}, adam_like),
    "adam, other betas": (torch.optim.Adam, {"betas": (0.9, 0.95), "eps": 1e-3}, adam_like),
    "adamw": (torch.optim.AdamW, {}, adam_like),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}, adam_like),
    "nadam": (torch.optim.NAdam, {}, adam_like),
    "radam": (torch.optim.RAdam, {}, adam_like),
    "adagrad": (torch.optim.Adagrad, {}, lambda s, g: s["sum"].sqrt() + g["eps"]),
    "rmsprop": (torch.optim.RMSprop, {}, rms),
    "rmsprop centred": (torch.optim.RMSprop, {"centered": True}, rms),
    "adadelta": (
        torch.optim.Adadelta,
        {},
        lambda s, g: ((s["square_avg"] + g["eps"]) / (s["acc_delta"] + g["eps"])).sqrt(),
    ),
    "adamax": (torch.optim.Adamax, {}, lambda s, g: s["exp_inf"]),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, lambda s, g: torch.ones(())),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_preconditioned_by_the_state_before_the_step(name):
    kind, options, denominator = OPTIMIZERS[name]
    model = network()
    optimizer = two_groups(model, kind, **options)
    meter = GradientNormMeter(optimizer, "cpu")
    for step in range(25):
        optimizer.zero_grad()
        loss_of(model, batch(8, seed=step)).backward()
        optimizer.step()
    assert meter.is_warm
    below = [denominator(optimizer.state[p], g) for g in optimizer.param_groups for p in g["params"]]
    below = [copy.deepcopy(d).expand_as(p) for d, p in zip(below, model.parameters(), strict=True)]
    parts = batch(20, seed=99).split([7, 13])
    # Before and after `drain` has seen that no moment is zero: with and without the mask.
    for _ in range(2):
        run_step(model, optimizer, meter, parts)
        rows = meter.drain()
        expected = separate(model, optimizer, parts, below)
        close(rows.parts[0], expected[0], 1e-9)
        close(rows.whole[0], expected[1], 1e-9)


def test_coordinates_never_seen_do_not_count():
    model = nn.EmbeddingBag(10, 4, mode="sum", dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(25):
        optimizer.zero_grad()
        model(torch.tensor([[1, 2, 3]])).square().sum().backward()
        optimizer.step()
    meter = GradientNormMeter(optimizer, "cpu")
    lengths = []
    for tokens in ([[1, 2]], [[1, 2, 7]]):
        optimizer.zero_grad()
        meter.start_measuring(1.0)
        model(torch.tensor(tokens)).sum().backward()
        meter.stop_measuring()
        meter.close_row(2, 2)
        lengths.append(meter.drain().whole.item())
    assert lengths[0] == lengths[1] < 1e6


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_count_by_their_values():
    both = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(10, 4, sparse=sparse, dtype=torch.float64)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
        meter = GradientNormMeter(optimizer, "cpu")
        tokens = torch.tensor([1, 2, 2, 7])
        for _ in range(WARM_STEPS + 1):
            optimizer.zero_grad()
            meter.start_measuring(1.0)
            model(tokens).square().sum().backward()
            meter.stop_measuring()
            meter.close_row(2, 4)
            optimizer.step()
        both.append(meter.drain())
    close(both[0].parts[1:], both[1].parts[1:])
    close(both[0].whole[1:], both[1].whole[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_narrow_parameters_have_wide_lengths(dtype, kind):
    model = nn.Linear(300, 300, bias=False, dtype=dtype)
    optimizer = kind(model.parameters(), lr=1e-3, **({"eps": 1e-4} if kind is torch.optim.Adam else {}))
    if kind is torch.optim.Adam:
        for _ in range(2):
            model.weight.grad = torch.rand(300, 300).to(dtype) + 1
            optimizer.step()
    meter = GradientNormMeter(optimizer, "cpu")
    optimizer.zero_grad()
    gradient = (torch.randn(300, 300) * 30).to(dtype)
    meter.start_measuring(0.5)
    (model.weight * gradient).sum().backward()
    meter.stop_measuring()
    meter.close_row(2, 2)
    below: torch.Tensor | float = 1.0
    if kind is torch.optim.Adam:
        below = (optimizer.state[model.weight]["exp_avg_sq"].double() / (1 - 0.999**2)).sqrt() + 1e-4
    seen = (gradient.double() / below).square().sum()
    rows = meter.drain()
    close(rows.whole[0, 0], seen, 1e-5)
    close(rows.parts[0, 0], seen / 2, 1e-5)


def test_long_sums_in_float32_do_not_drift():
    weight = nn.Parameter(torch.zeros(3_000_001))
    meter = GradientNormMeter(torch.optim.SGD([weight], lr=0.1), "cpu")
    weight.grad = torch.randn(3_000_001, generator=torch.Generator().manual_seed(1))
    meter.close_row(2, 2)
    close(meter.drain().whole[0, 0], weight.grad.double().square().sum(), 1e-6)


def test_autocast_gives_the_gradients_that_the_optimiser_sees():
    model = network(torch.float32)
    optimizer = two_groups(model)
    meter = GradientNormMeter(optimizer, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        run_step(model, optimizer, meter, [batch(16, torch.float32)])
    rows = meter.drain()
    close(rows.parts[0], rows.whole[0], 1e-6)
    by_group = [sum(p.grad.double().square().sum() for p in g["params"]) for g in optimizer.param_groups]
    close(rows.whole[0], torch.stack(by_group), 1e-6)


def test_a_scaler_is_divided_out_and_clipping_comes_after():
    plain, scaled = network(), network()
    rows = []
    parts = batch(20).split([7, 13])
    for model, scaler in ((plain, None), (scaled, torch.amp.GradScaler("cpu", init_scale=2.0**12))):
        optimizer = two_groups(model)
        meter = GradientNormMeter(optimizer, "cpu")
        scale = None if scaler is None else scaler.scale(torch.ones(()))
        run_step(model, optimizer, meter, parts, scale=scale)
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        rows.append(meter.drain())
    close(rows[1].parts, rows[0].parts)
    close(rows[1].whole, rows[0].whole)
    assert rows[0].whole.sum() > 1e-5


def test_a_step_that_overflowed_gives_a_row_that_is_not_finite():
    model = network()
    optimizer = two_groups(model)
    meter = GradientNormMeter(optimizer, "cpu")
    run_step(model, optimizer, meter, [batch(4), batch(4) * torch.inf])
    assert not meter.drain().parts.isfinite().all()


def test_a_gradient_in_pieces_spoils_the_row():
    model = network()
    optimizer = two_groups(model)
    meter = GradientNormMeter(optimizer, "cpu")
    meter.start_measuring(1.0)
    loss_of(model, batch(4)).backward()
    loss_of(model, batch(4)).backward()
    meter.stop_measuring()
    meter.close_row(2, 8)
    run_step(model, optimizer, meter, batch(8).split(4))
    rows = meter.drain()
    assert rows.parts[0].isnan().all()
    assert rows.parts[1].isfinite().all()


def test_an_abandoned_step_leaves_nothing():
    model = network()
    optimizer = two_groups(model)
    meter = GradientNormMeter(optimizer, "cpu")
    meter.start_measuring(1.0)
    loss_of(model, batch(4)).backward()
    meter.drop_row()
    assert not any(p._backward_hooks for p in model.parameters())
    parts = batch(8).split(4)
    run_step(model, optimizer, meter, parts)
    close(meter.drain().parts[0], separate(model, optimizer, parts)[0])


def test_a_group_added_later_and_a_parameter_thawed():
    model = network()
    parameters = list(model.parameters())
    parameters[0].requires_grad_(False)
    optimizer = torch.optim.SGD(parameters[:4], lr=0.1)
    meter = GradientNormMeter(optimizer, "cpu")
    run_step(model, optimizer, meter, batch(8).split(4))
    optimizer.add_param_group({"params": parameters[4:], "lr": 0.2})
    parameters[0].requires_grad_(True)
    parts = batch(8).split(4)
    run_step(model, optimizer, meter, parts)
    rows = meter.drain()
    assert meter.num_groups == 2
    assert rows.parts.shape == (1, 2)
    close(rows.parts[0], separate(model, optimizer, parts)[0])


def test_warm_after_enough_steps_or_with_a_restored_state():
    model = network()
    optimizer = two_groups(model, torch.optim.AdamW)
    meter = GradientNormMeter(optimizer, "cpu")
    assert (meter.kind, meter.is_warm) == ("cold", False)
    for step in range(WARM_STEPS):
        assert not meter.is_warm
        loss_of(model, batch(4, seed=step)).backward()
        optimizer.step()
    assert (meter.kind, meter.is_warm) == ("adam", True)
    other = two_groups(network(), torch.optim.AdamW)
    restored = GradientNormMeter(other, "cpu")
    other.load_state_dict(optimizer.state_dict())
    assert restored.is_warm
    assert GradientNormMeter(two_groups(network()), "cpu").is_warm


def test_an_optimiser_without_a_count_of_its_own_is_counted():
    model = network()
    optimizer = torch.optim.RMSprop(model.parameters())
    meter = GradientNormMeter(optimizer, "cpu")
    for step in range(WARM_STEPS):
        loss_of(model, batch(4, seed=step)).backward()
        optimizer.step()
        for state in optimizer.state.values():
            state.pop("step", None)
        assert meter.is_warm == (step == WARM_STEPS - 1)
        for state in optimizer.state.values():
            state["step"] = torch.tensor(float(step + 1))
    meter.close()
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_nothing_is_read_back_in_a_step(kind):
    """On the meta device there is no data: whatever would wait for a device's answer raises there."""
    model = network().to("meta")
    optimizer = two_groups(model, kind)
    optimizer.state.clear()
    meter = GradientNormMeter(optimizer, "meta")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moment = {torch.optim.Adam: "exp_avg_sq", torch.optim.Adagrad: "sum"}.get(kind)
            state = {moment: torch.ones_like(parameter), "step": torch.ones((), device="meta")} if moment else {}
            optimizer.state[parameter] = state
    assert meter.kind == {torch.optim.SGD: "plain", torch.optim.Adam: "adam"}.get(kind, "adagrad")
    assert meter.is_warm == (kind is torch.optim.SGD)
    x = torch.zeros(4, 6, dtype=torch.float64, device="meta")
    for _ in range(2):
        run_step(model, optimizer, meter, [x, x], scale=torch.ones((), device="meta"))
    with pytest.raises((NotImplementedError, RuntimeError)):
        meter.drain()


def test_calls_out_of_order_are_refused():
    meter = GradientNormMeter(two_groups(network()), "cpu")
    meter.start_measuring(1.0)
    with pytest.raises(MisusedJob, match="before the one before it ended"):
        meter.start_measuring(1.0)
    with pytest.raises(MisusedJob, match="had not ended"):
        meter.close_row(2, 4)


@pytest.mark.parametrize(("chunk", "large", "tensors"), [(64, 32, 2), (2**20, 2**20, 1), (128, 2**20, 64)])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_chunks_change_nothing(monkeypatch, kind, chunk, large, tensors):
    results = []
    for small in (False, True):
        if small:
            for name, value in (("_CHUNK_BYTES", chunk), ("_LARGE_BYTES", large), ("_CHUNK_TENSORS", tensors)):
                monkeypatch.setattr(meter_module, name, value)
        model = network()
        optimizer = two_groups(model, kind)
        meter = GradientNormMeter(optimizer, "cpu")
        for step in range(4):
            run_step(model, optimizer, meter, batch(9, seed=step).split([4, 5]))
            optimizer.step()
        results.append(meter.drain())
    close(results[0].parts, results[1].parts)
    close(results[0].whole, results[1].whole)


def test_no_chunk_holds_more_than_its_bound(monkeypatch):
    monkeypatch.setattr(preconditioner_module, "_PIECE_BYTES", 128)
    weight = torch.ones(100, dtype=torch.float64)
    entries = [[weight, weight], *[[weight[:10], weight[:10]] for _ in range(7)]]
    pieces = list(preconditioner_module._pieces(entries))
    assert [sum(tensors[0].numel() for tensors in piece) for piece in pieces] == [32, 32, 32, 4, 30, 30, 10]
    assert sum(len(piece) for piece in pieces) == 4 + 7


def test_several_parameters_fire_in_one_backward_only_once():
    model = network()
    meter = GradientNormMeter(two_groups(model), "cpu")
    for _ in itertools.repeat(None, 3):
        meter.start_measuring(1.0)
        loss_of(model, batch(4)).backward()
        meter.stop_measuring()
    meter.close_row(3, 12)
    assert meter.drain().parts.isfinite().all()


@pytest.mark.parametrize("repeats", [1, 2, 5])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_set_aside_gives_the_same_rows_and_gradients_as_hooks(optimizer_class, repeats):
    outcomes = []
    for set_aside in (False, True):
        model = network(torch.float32)
        optimizer = optimizer_class(model.parameters(), lr=0.01)
        for step in range(WARM_STEPS):
            loss_of(model, batch(8, torch.float32, seed=step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        meter = GradientNormMeter(optimizer, "cpu", set_aside=set_aside)
        for part in batch(20, torch.float32, seed=99).chunk(repeats):
            meter.start_measuring(1.0)
            (loss_of(model, part) / repeats).backward()
            meter.stop_measuring()
        meter.close_row(max(repeats, 2), 20, parts_factor=0.5)
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        outcomes.append((meter.collect(), gradients))
    (hooked, first), (aside, second) = outcomes
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.testing.assert_close(hooked.parts, aside.parts, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(hooked.whole, aside.whole, rtol=1e-6, atol=0.0)


def test_set_aside_keeps_a_gradient_that_the_backward_pass_does_not_touch():
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    meter = GradientNormMeter(torch.optim.SGD([weight, other], lr=0.1), "cpu", set_aside=True)
    meter.start_measuring(1.0)
    (weight.sum() + 2 * other.sum()).backward()
    meter.stop_measuring()
    meter.start_measuring(1.0)
    weight.sum().backward()
    meter.stop_measuring()
    assert weight.grad is not None
    assert other.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]
    assert other.grad.tolist() == [2.0, 2.0]


def test_what_was_laid_aside_is_forgotten_with_the_step():
    weight = nn.Parameter(torch.ones(3))
    meter = GradientNormMeter(torch.optim.SGD([weight], lr=0.1), "cpu", set_aside=True)
    weight.sum().backward()
    meter.start_measuring(1.0)
    meter.drop_row()
    assert not meter.is_measuring
    assert weight.grad is None


def test_a_part_without_weight_does_not_count_as_one():
    model = network()
    meter = GradientNormMeter(two_groups(model), "cpu")
    for weight in (1.0, 0.0, 2.0):
        meter.start_measuring(weight)
        loss_of(model, batch(4)).backward()
        meter.stop_measuring()
    meter.close_row(None, 8)
    meter.start_measuring(1.0)
    loss_of(model, batch(4)).backward()
    meter.stop_measuring()
    meter.close_row(None, 8)
    assert meter.drain().counts.tolist() == [2, 1]
    meter.start_measuring(1.0)
    meter.drop_row()
    meter.close_row(None, 8)
    assert meter.drain().counts.tolist() == [0]
