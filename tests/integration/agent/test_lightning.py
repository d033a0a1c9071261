"""Lightning: trains, is killed, resumes at another size, and matches plain PyTorch. Run as a script: the job."""

import importlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.scripted_changes import scripted_changes
from torch import nn
from torch.utils.data import TensorDataset

from pollux.agent import pass_order
from pollux.agent.data.ledger import SampleLedger

SAMPLES, BATCH, EPOCHS, SEED = 50, 8, 3, 3
RATE = 0.02


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, dtype=torch.float64, generator=generator)
    y = torch.randn(samples, 1, dtype=torch.float64, generator=generator)
    return TensorDataset(x, y)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)).double()


def optimiser(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)


def flat(model: nn.Module) -> list[float]:
    return [float(value) for parameter in model.parameters() for value in parameter.detach().reshape(-1)]


def plain() -> list[float]:
    """Final parameters, without Lightning and Pollux."""
    model = network()
    optimizer, schedule = optimiser(model)
    x, y = data().tensors
    for epoch in range(EPOCHS):
        for part in pass_order(SAMPLES, SEED, epoch).split(BATCH):
            loss = nn.functional.mse_loss(model(x[part]), y[part])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return flat(model)


def replayed(steps: list[tuple[int, float]], samples: int) -> list[float]:
    """Final parameters of plain PyTorch over the same samples, a step for each (samples, learning rate)."""
    model = network()
    optimizer, _ = optimiser(model)
    x, y = data(samples).tensors
    order = torch.cat([pass_order(samples, SEED, number) for number in range(10)])
    place = 0
    for total, rate in steps:
        part = order[place : place + total]
        optimizer.param_groups[0]["lr"] = rate
        nn.functional.mse_loss(model(x[part]), y[part]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        place += total
    return flat(model)


def furthest(first: list[float], second: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(first, second, strict=True))


def test_killed_and_resumed_at_another_size_matches_plain_pytorch(launch, tmp_path):
    # 50 samples in batches of 8: the last of a pass has 2, fewer than replicas; two micro-steps each with 2 replicas.
    inside = {"folder": str(tmp_path / "inside"), "save_every": 4, "options": {"max_local_batch": 2}}
    at_end = {"folder": str(tmp_path / "at-end"), "save_every": 7}
    runs = [
        (2, {**inside, "kill_at": 10}, "killed"),
        (3, inside),
        (1, {**at_end, "kill_at": 9}, "killed"),
        (2, at_end),
    ]
    _, from_inside, _, from_end = launch(__file__, runs)
    expected = plain()
    for answer in [*from_inside, *from_end]:
        assert furthest(answer["parameters"], expected) < 1e-12
        assert (answer["steps"], answer["epoch"], answer["samples"]) == (21, EPOCHS, EPOCHS * SAMPLES)
        assert answer["ledger"] == [SAMPLES, SampleLedger.of_range(SAMPLES).digest]
    assert {answer["seen"][0][0] for answer in from_inside} == {9}, "went on from the checkpoint of step 8"
    assert {answer["seen"][0][0] for answer in from_end} == {8}, "an epoch saved at its very end is not repeated"


def test_asked_to_stop_it_saves_after_a_step_and_goes_on_at_another_size(launch, tmp_path):
    """As the scheduler moves it: SIGTERM, here to one of two replicas, long before a checkpoint is due."""
    job = {"folder": str(tmp_path / "saved"), "save_every": 10**6}
    _, resumed = launch(__file__, [(2, {**job, "stop_at": 6}, "stopped"), (3, job)])
    for answer in resumed:
        assert furthest(answer["parameters"], plain()) < 1e-12
        assert (answer["steps"], answer["samples"]) == (21, EPOCHS * SAMPLES)
        assert answer["ledger"] == [SAMPLES, SampleLedger.of_range(SAMPLES).digest]
    (first,) = {answer["seen"][0][0] for answer in resumed}
    assert 7 <= first <= 21, "no step that was trained is trained again"


def test_adaptive_run_is_the_same_through_a_kill_and_a_resize(launch, tmp_path):
    samples = 210
    options = {"max_batch_size": 64, "max_local_batch": 4}
    settings = {"save_every": 5, "samples": samples, "options": options, "scripted": True}
    whole = {**settings, "folder": str(tmp_path / "whole")}
    cut = {**settings, "folder": str(tmp_path / "cut")}
    (first,), _, again = launch(__file__, [(1, whole), (2, {**cut, "kill_at": 17}, "killed"), (3, cut)])
    totals = [entry[2] for entry in first["seen"]]
    rates = [RATE, *(entry[1] for entry in first["seen"])]
    steps = [(total, rate * (max(total, BATCH) / BATCH) ** 0.5) for total, rate in zip(totals, rates, strict=False)]
    assert {8, 24, 48} < set(totals), "and what was left of a pass at its end"
    assert furthest(first["parameters"], replayed(steps, samples)) < 1e-12
    for answer in again:
        assert furthest(answer["parameters"], first["parameters"]) < 1e-12
        for name in ("samples", "progress", "pass", "cursor", "ledger", "schedule"):
            assert answer[name] == first[name], name
    used = pass_order(samples, SEED, first["pass"])[: first["cursor"]]
    assert first["ledger"] == [first["cursor"], SampleLedger.of(used.numpy()).digest]
    assert EPOCHS * samples <= first["progress"] < EPOCHS * samples + 48
    assert first["schedule"] == int(first["progress"] / samples * -(-samples // BATCH)), "schedules follow progress"
    assert rates[-1] == pytest.approx(RATE * 0.9 ** (first["schedule"] // 4), rel=1e-12)
    assert first["samples"] > EPOCHS * samples, "a larger batch learns less from a sample"
    assert first["measured"] > 0


def main(settings: dict[str, Any], answer: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from pollux.agent.lightning import PolluxCallback, PolluxDataLoader

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> Any:
            optimizer, schedule = optimiser(self.net)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Killer(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            self.used = loader.training.progress.samples

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            used = loader.training.progress.samples
            if used > self.used:
                seen.append([trainer.global_step, rate, used - self.used, callback.noise.num_measured])
            self.used = used
            if trainer.global_step == settings.get("kill_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            if trainer.global_step == settings.get("stop_at") and trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if trainer.global_step >= settings.get("stop_at", 10**9):
                time.sleep(0.2)  # the others look for requests as often as this

    seen: list[list[Any]] = []
    if settings.get("scripted"):
        scripted_changes(BATCH)
    world = int(os.environ["WORLD_SIZE"])
    loader = PolluxDataLoader(data(settings.get("samples", SAMPLES)), BATCH, seed=SEED, **settings.get("options", {}))
    callback = PolluxCallback(loader)
    keep = ModelCheckpoint(settings["folder"], "{step}", every_n_train_steps=settings["save_every"], save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=settings.get("epochs", EPOCHS),
        precision="64-true",
        gradient_clip_val=0.5,
        callbacks=[callback, keep, Killer()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    last = "last" if settings["save_every"] > 1000 else None
    found = (
        []
        if last
        else sorted(Path(settings["folder"]).glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    )
    module = Module()
    trainer.fit(module, loader, ckpt_path=str(found[-1]) if found else last)
    state = loader.state_dict()
    ledger = loader.training.loader.ledger
    answer.write_text(
        json.dumps(
            {
                "parameters": flat(module.net),
                "steps": trainer.global_step,
                "epoch": trainer.current_epoch,
                "seen": seen,
                "samples": state["progress"]["samples"],
                "progress": state["progress"]["progress"],
                "pass": state["data"]["pass"],
                "cursor": state["data"]["cursor"],
                "schedule": state["schedule"],
                "ledger": [ledger.count, ledger.digest],
                "measured": max(entry[3] for entry in seen),
            }
        )
    )


if __name__ == "__main__":
    importlib.import_module("forked").serve(main, ["lightning.pytorch"])
