"""Lightning: trains, is killed, resumes at another size, and matches plain PyTorch. Run as a script, this is the job."""

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pollux.agent import pass_order

SAMPLES, BATCH, EPOCHS, SEED = 50, 8, 3, 3


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, dtype=torch.float64, generator=generator)
    y = torch.randn(samples, 1, dtype=torch.float64, generator=generator)
    return TensorDataset(x, y)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)).double()


def optimiser(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)


def flat(model: nn.Module) -> list[float]:
    return [float(value) for parameter in model.parameters() for value in parameter.detach().reshape(-1)]


def plain() -> tuple[list[float], list[float]]:
    """Final parameters and the loss of every step, without Lightning and Pollux."""
    model = network()
    optimizer, schedule = optimiser(model)
    x, y = data().tensors
    losses = []
    for epoch in range(EPOCHS):
        for part in pass_order(SAMPLES, SEED, epoch).split(BATCH):
            loss = nn.functional.mse_loss(model(x[part]), y[part])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(float(loss.detach()))
    return flat(model), losses


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
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append([trainer.global_step, callback.batch_size, trainer.optimizers[0].param_groups[0]["lr"]])
            if trainer.global_step == settings.get("kill_at"):
                os.kill(os.getpid(), signal.SIGKILL)

    seen: list[list[float]] = []
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
    found = sorted(Path(settings["folder"]).glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    module = Module()
    trainer.fit(module, loader, ckpt_path=str(found[-1]) if found else None)
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
                "measured": callback.noise.num_measured,
            }
        )
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
