"""The agent's parts in a loop that is not ours: order of calls, epochs by progress, weights, noise, state."""

import json
import os
import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pollux.agent import pass_order
from pollux.agent.adaptation.adaptation import Adaptation
from pollux.agent.adaptation.batch_tuner import BatchChange, fitting_choice
from pollux.agent.data.ledger import SampleLedger
from pollux.agent.data.loader import LoaderOptions
from pollux.agent.data.step_shape import MicroBatch
from pollux.agent.distributed.environment import Environment
from pollux.agent.frameworks.framework_loop import FrameworkTraining
from pollux.agent.frameworks.huggingface import PolluxTrainerMixin
from pollux.agent.frameworks.lightning import PolluxCallback, PolluxDataLoader
from pollux.agent.frameworks.options import FrameworkOptions
from pollux.agent.job.job import JobStopped
from pollux.agent.reporting import report_client
from pollux.core.errors import CheckpointMismatch, InvalidInput, MisusedJob

SAMPLES = 22


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 3, dtype=torch.float64, generator=generator)
    return TensorDataset(torch.arange(samples), x, x.sum(1, keepdim=True) + 1.0)


class Host:
    """A training loop like a framework's, which may ask for batches ahead of running them."""

    def __init__(self, options: FrameworkOptions, ahead: int = 0, **loading: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.training = FrameworkTraining(data(), options, LoaderOptions(seed=5, **loading))
        self.training.attach(self.optimizer, Environment(), torch.device("cpu"))
        self.ahead = ahead
        self.used: list[list[int]] = []
        self.step_samples: list[int] = []
        self.loss_scale: torch.Tensor | None = None
        self.unscales = False
        self.weigh: Callable[[torch.Tensor], float] | None = None
        self.gradient: list[float] = []

    def epoch(self, steps: int | None = None) -> None:
        source = self.training.epoch()
        waiting: list[Any] = []
        while steps is None or steps > 0:
            while len(waiting) <= self.ahead and (batch := next(source, None)) is not None:
                waiting.append(batch)
            if not waiting:
                return
            stepped = self.run(waiting.pop(0))
            steps = None if steps is None else steps - stepped

    def run(self, batch: Any) -> bool:
        training = self.training
        micro = training.begin_micro_batch()
        index, x, y = batch
        self.step_samples += index.tolist()
        loss = nn.functional.mse_loss(self.model(x), y)
        training.steps.note_loss(loss)
        weight = None if self.weigh is None else self.weigh(index)
        scaled = loss * training.steps.weight(loss, weight) * (1.0 if self.loss_scale is None else self.loss_scale)
        training.steps.begin_backward(weight)
        scaled.backward()
        training.steps.end_backward()
        if micro.is_last:
            if self.loss_scale is not None and self.unscales:
                for parameter in self.model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= self.loss_scale
            training.steps.before_step(self.loss_scale, unscaled=self.unscales)
            gradients = [p.grad.reshape(-1) for p in self.model.parameters() if p.grad is not None]
            self.gradient = torch.cat(gradients).tolist()
            self.optimizer.step()
            self.optimizer.zero_grad()
            training.after_step()
            self.used.append(self.step_samples)
            self.step_samples = []
        return micro.is_last


def change(host: Host, total: int) -> None:
    assert host.training._attached is not None
    choice = fitting_choice(total, 1, host.training.options.max_local_batch)
    host.training._attached.adaptation.change_batch(BatchChange(choice, 1.0, 1.0, 1.0, "test"))


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_exact_epochs_are_passes(ahead):
    host = Host(FrameworkOptions(4, max_local_batch=3), ahead)
    for _ in range(2):
        host.epoch()
    expected = [part.tolist() for number in range(2) for part in pass_order(SAMPLES, 5, number).split(4)]
    assert host.used == expected
    assert host.training.epochs_done == 2


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_epochs_by_progress_go_over_the_end_of_a_pass(ahead, monkeypatch):
    host = Host(FrameworkOptions(4, max_batch_size=8), ahead)
    monkeypatch.setattr(
        "pollux.agent.adaptation.adaptation.Adaptation.efficiency", lambda self, total: 0.5 if total > 4 else 1.0
    )
    change(host, 8)
    for _ in range(2):
        host.epoch()
    flat = [index for step in host.used for index in step]
    order = torch.cat([pass_order(SAMPLES, 5, number) for number in range(10)]).tolist()
    assert flat == order[: len(flat)], "every sample once per pass, in its order"
    assert len(flat) > 3 * SAMPLES, "half an efficiency, twice the samples"
    assert 2 * SAMPLES <= host.training.progress.progress < 2 * SAMPLES + 8
    assert host.training.epochs_done == 2
    loader = host.training.loader
    assert (
        loader.ledger.digest
        == SampleLedger.of(pass_order(SAMPLES, 5, loader.pass_index)[: loader.cursor].numpy()).digest
    )


@pytest.mark.parametrize("steps", range(1, 12))
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("loading", [{}, {"drop_last": True}], ids=["all", "drop_last"])
def test_resumed_anywhere_it_goes_on_as_if_nothing_had_happened(steps, ahead, loading):
    whole = Host(FrameworkOptions(4), 1, **loading)
    first = Host(FrameworkOptions(4), ahead, **loading)
    for _ in range(3):
        whole.epoch()
    per_epoch = 5 if loading else 6
    while len(first.used) < steps:
        first.epoch(min(per_epoch, steps - len(first.used)))
    second = Host(FrameworkOptions(4), 0, **loading)
    second.training.load_state_dict(first.training.state_dict())
    assert second.training.epochs_done == steps // per_epoch
    while second.training.epochs_done < 3:
        second.epoch()
    assert first.used + second.used == whole.used


def test_an_epoch_that_was_issued_whole_is_over_though_a_little_progress_is_missing(monkeypatch):
    host = Host(FrameworkOptions(4, max_batch_size=8), 1)
    efficiency = {"now": 0.5}
    monkeypatch.setattr(
        "pollux.agent.adaptation.adaptation.Adaptation.efficiency", lambda self, total: efficiency["now"]
    )
    change(host, 8)
    source = host.training.epoch()
    batches = list(source)
    efficiency["now"] = 0.45
    for batch in batches:
        host.run(batch)
    assert host.training.progress.progress < SAMPLES
    again = Host(FrameworkOptions(4, max_batch_size=8))
    again.training.load_state_dict(host.training.state_dict())
    assert again.training.epochs_done == 1


def gradient(model: nn.Linear, part: torch.Tensor) -> torch.Tensor:
    _, x, y = data().tensors
    loss = nn.functional.mse_loss(model(x[part]), y[part])
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, tuple(model.parameters()))])


@pytest.mark.parametrize(("loss_scale", "unscales"), [(None, False), (1024.0, False), (1024.0, True)])
@pytest.mark.parametrize("by_weight", [False, True])
def test_average_and_noise_of_uneven_parts_are_what_the_formulas_say(loss_scale, unscales, by_weight):
    host = Host(FrameworkOptions(5, max_local_batch=3, measure_noise=True))
    assert host.training._attached is not None
    meter = host.training._attached.steps.meter
    assert meter is not None
    host.loss_scale, host.unscales = None if loss_scale is None else torch.tensor(loss_scale), unscales
    tokens = [7.0, 3.0] if by_weight else [3.0, 2.0]
    if by_weight:
        host.weigh = lambda index: tokens[0] if len(index) == 3 else tokens[1]
    first, second = pass_order(SAMPLES, 5, 0)[:5].split(3)
    parts = [gradient(host.model, part) for part in (first, second)]
    whole = sum(weight / sum(tokens) * part for weight, part in zip(tokens, parts, strict=True))
    assert isinstance(whole, torch.Tensor)
    host.epoch(1)
    rows = meter.drain()
    shares = [weight / sum(tokens) * float(part.square().sum()) for weight, part in zip(tokens, parts, strict=True)]
    kept = 1.0 if unscales or loss_scale is None else loss_scale
    assert host.gradient == pytest.approx((whole * kept).tolist(), rel=1e-12)
    assert float(rows.parts[0, 0]) == pytest.approx(sum(shares), rel=1e-12)
    assert float(rows.whole[0, 0]) == pytest.approx(float(whole.square().sum()), rel=1e-12)
    assert (int(rows.counts[0]), int(rows.totals[0])) == (2, 5)


def test_learning_rates_are_raised_for_the_step_alone():
    host = Host(FrameworkOptions(4, max_batch_size=8, lr_rule="linear"))
    change(host, 8)
    seen: list[float] = []
    handle = host.optimizer.register_step_pre_hook(lambda *_: seen.append(host.optimizer.param_groups[0]["lr"]))
    host.epoch(2)
    handle.remove()
    assert seen == pytest.approx([0.02, 0.02])
    assert host.optimizer.param_groups[0]["lr"] == 0.01
    host.training.detach()
    host.optimizer.step()
    assert host.optimizer.param_groups[0]["lr"] == 0.01


def test_a_spike_brings_the_old_batch_back(monkeypatch, caplog):
    host = Host(FrameworkOptions(4, max_batch_size=16))
    assert host.training._attached is not None
    adaptation = host.training._attached.adaptation
    monkeypatch.setattr(adaptation, "is_round", lambda step: True)
    bigger = BatchChange(fitting_choice(8, 1, None), 1.5, 1.0, 1.0, "test")
    monkeypatch.setattr(adaptation, "next_change", lambda progress: bigger if adaptation.total == 4 else None)
    host.epoch(1)
    assert host.training.batch_size == 8
    spike = SimpleNamespace(loss=1.0, throughput=None, spike="the loss rose")
    monkeypatch.setattr(adaptation, "round", lambda step: spike)
    host.epoch(1)
    assert host.training.batch_size == 4
    assert "back to batch 4 from 8" in caplog.text
    assert adaptation.guard.is_frozen(host.training.progress.progress)


def test_state_of_another_batch_is_refused():
    state = Host(FrameworkOptions(4)).training.state_dict()
    with pytest.raises(CheckpointMismatch, match="batch_size 4, this run has 8"):
        Host(FrameworkOptions(8)).training.load_state_dict(state)
    with pytest.raises(CheckpointMismatch, match="version 99"):
        Host(FrameworkOptions(4)).training.load_state_dict({**state, "version": 99})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 8, "max_batch_size": 4}, "above max_batch_size 4"),
        ({"batch_size": 8, "accumulation": -1}, "accumulation is -1"),
        ({"batch_size": 8, "max_local_batch": 2.5}, r"max_local_batch is 2\.5"),
        ({"batch_size": 8, "lr_rule": "sqare"}, "unknown learning-rate rule"),
        ({"batch_size": 23}, "22 samples, fewer than batch_size 23"),
        ({"batch_size": 4, "accumulation": 4}, "each micro-step needs a sample"),
    ],
)
def test_bad_options_are_refused_at_once(options, message):
    with pytest.raises(InvalidInput, match=message):
        PolluxDataLoader(data(), **options)


def test_batch_below_the_replicas_is_refused():
    training = FrameworkTraining(data(), FrameworkOptions(4), LoaderOptions())
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(InvalidInput, match="below the 8 replicas"):
        training.attach(optimizer, Environment(num_replicas=8), torch.device("cpu"))


def test_calls_out_of_order_are_refused():
    training = FrameworkTraining(data(), FrameworkOptions(4), LoaderOptions())
    with pytest.raises(MisusedJob, match="before the training began"):
        next(training.epoch())
    host = Host(FrameworkOptions(4))
    with pytest.raises(MisusedJob, match="not from Pollux's loader"):
        host.training.begin_micro_batch()
    with pytest.raises(MisusedJob, match="without a batch"):
        host.training.after_step()


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_missing_framework_names_the_extra(name, monkeypatch):
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidInput, match=rf"pollux-scheduler\[{name}\]"):
        PolluxCallback(PolluxDataLoader(data(), 4)) if name == "lightning" else PolluxTrainerMixin(batch_size=4)


def test_noise_by_tokens_counts_the_tokens_that_are_learned():
    trainer: Any = SimpleNamespace(args=SimpleNamespace(world_size=2), _loss_shifts_labels=True)
    micro = MicroBatch(0, 0, 1, 2, 4, True, (2, 2))
    inputs = {"labels": torch.tensor([[1, -100, 3, 4], [1, 2, -100, -100]])}
    # After the shift 2 + 1 tokens of 12: W/(w·K²).
    assert PolluxTrainerMixin._noise_part(trainer, micro, inputs, torch.tensor(12)) == pytest.approx(12 / (3 * 4))
    filler = MicroBatch(0, 0, 1, 0, 4, True, (0, 4))
    assert PolluxTrainerMixin._noise_part(trainer, filler, inputs, torch.tensor(12)) == 0.0
    assert PolluxTrainerMixin._noise_part(trainer, micro, inputs, None) is None


def test_the_limits_of_whoever_started_it_hold():
    asked = FrameworkOptions(batch_size=8, max_batch_size=64, max_local_batch=16)
    assert asked.within(Environment()) == asked
    assert asked.within(Environment(max_local_batch=4)).max_local_batch == 4
    assert asked.within(Environment(max_local_batch=32)).max_local_batch == 16
    assert asked.within(Environment(adapts=False)).allowed.is_exact
    assert FrameworkOptions(batch_size=8).within(Environment(max_batch_size=32)).max_batch_size == 32
    assert FrameworkOptions(batch_size=8).within(Environment(max_batch_size=32), may_grow=False).max_batch_size is None


def test_a_loader_of_lightning_takes_them(monkeypatch):
    monkeypatch.setenv("POLLUX_ADAPT", "0")
    monkeypatch.setenv("POLLUX_MAX_LOCAL_BATCH", "4")
    options = PolluxDataLoader(data(), 8, max_batch_size=16).training.options
    assert (options.max_batch_size, options.max_local_batch) == (None, 4)


@pytest.mark.parametrize("ends", ["finish", "stop"])
def test_it_reports_and_stops_as_a_job_does(monkeypatch, ends):
    told: list[dict[str, Any]] = []

    def post(address: Any, body: str) -> dict[str, Any]:
        assert (address.url, address.job_id, address.token) == ("http://scheduler", "job", "token")
        told.append(json.loads(body))
        return {}

    monkeypatch.setattr(report_client, "post_report", post)
    monkeypatch.setattr(Adaptation, "is_round", lambda self, step: step % 2 == 0)
    host = Host(FrameworkOptions(batch_size=4))
    host.training.epochs_wanted = 3.0
    there = Environment(job="job", url="http://scheduler", job_token="token", generation=5)
    host.training.attach(host.optimizer, there, torch.device("cpu"))
    before = signal.getsignal(signal.SIGTERM)
    host.training.listen()
    host.epoch(4)
    assert not host.training.wants_stop()
    if ends == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
        assert host.training.wants_stop()
        with pytest.raises(JobStopped) as stopped:
            host.training.stop()
        assert stopped.value.code == 143
    else:
        host.training.finish()
    host.training.detach()
    assert signal.getsignal(signal.SIGTERM) is before
    last = told[-1]
    assert (last["generation"], last["step"], last["samples"], last["batch_size"]) == (5, 4, 16, 4)
    assert (last["total_progress"], last["final"], last["exact"]) == (3.0 * SAMPLES, ends == "finish", True)
    assert last["loss"] is not None
