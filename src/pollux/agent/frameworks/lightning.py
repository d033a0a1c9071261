"""Lightning: a loader and a callback that make its `Trainer` exact at any number of replicas, or adaptive.

`framework_loop` does the work; Lightning is imported when a callback is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from pollux.agent.adaptation.lr_rules import OwnRule
from pollux.agent.adaptation.noise_scale import NoiseEstimate
from pollux.agent.data.loader import LoaderOptions
from pollux.agent.data.step_shape import MicroBatch
from pollux.agent.distributed.environment import read_environment
from pollux.agent.frameworks.framework_loop import FrameworkTraining
from pollux.agent.frameworks.options import FrameworkOptions
from pollux.core.errors import InvalidInput, MisusedJob

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    # Importing Lightning takes seconds; a callback gets its base class when it is made.
    Callback = object

__all__ = ["PolluxCallback", "PolluxDataLoader"]

_LAST = "last.ckpt"
_log = logging.getLogger("pollux")
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")


class PolluxDataLoader:
    """Training data for `trainer.fit(module, loader)` or a data module's `train_dataloader`; use with `PolluxCallback`.

    `batch_size` counts the samples of one optimiser step over all replicas; without `max_batch_size` it is the same at
    any number of them. The other options are those of `pollux.init`. The loader has no length, since the batch may
    change inside an epoch. Lightning's checkpoints save and restore its state.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        max_batch_size: int | None = None,
        max_local_batch: int | None = None,
        accumulation: int = 0,
        lr_rule: str | OwnRule | None = None,
        warmup_epochs: float = 0.0,
        measure_noise: bool | None = None,
        epoch_size: int | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        sampler: Iterable[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
    ) -> None:
        asked = FrameworkOptions(
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            max_local_batch=max_local_batch,
            accumulation=accumulation,
            lr_rule=lr_rule,
            warmup_epochs=warmup_epochs,
            measure_noise=measure_noise,
            epoch_size=epoch_size,
        )
        loading = LoaderOptions(
            shuffle=shuffle if shuffle is not None else not isinstance(dataset, IterableDataset),
            seed=seed,
            sampler=sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            drop_last=drop_last,
        )
        self.training = FrameworkTraining(dataset, asked.within(read_environment()), loading)

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.training.loader.dataset

    def __iter__(self) -> Iterator[Any]:
        return self.training.epoch()

    def state_dict(self) -> dict[str, Any]:
        """Data position, progress and what was learned of noise and speed; called by Lightning, on all replicas."""
        return self.training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state, at any number of replicas."""
        self.training.load_state_dict(state_dict)


class PolluxCallback(Callback):
    """Weights, accumulation, gradient noise and learning rates for a `Trainer` that trains on a `PolluxDataLoader`.

    The module stays as it is: `training_step` returns the mean loss over its batch. Where that is a mean over something
    other than samples, such as tokens, `training_step` passes their number to `weigh`.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """An instance that is also a Lightning callback; `InvalidInput` where Lightning is not installed."""
        try:
            from lightning.pytorch import Callback as Base
        except ImportError as error:
            raise InvalidInput(
                "PolluxCallback needs Lightning, which is not installed: pip install 'pollux-scheduler[lightning]'"
            ) from error
        kind: Any = cls if issubclass(cls, Base) else type(cls.__name__, (cls, Base), {"__module__": cls.__module__})
        made: Self = object.__new__(kind)
        return made

    def __init__(self, loader: PolluxDataLoader) -> None:
        if not isinstance(loader, PolluxDataLoader):
            raise InvalidInput(f"loader is a {type(loader).__name__}: give the PolluxDataLoader that is trained on")
        self._training = loader.training
        self._micro: MicroBatch | None = None
        self._weight: float | Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Samples of one optimiser step over all replicas, at present."""
        return self._training.batch_size

    @property
    def accumulation(self) -> int:
        """Extra micro-steps of one optimiser step, at present."""
        return self._training.accumulation

    @property
    def lr_factors(self) -> tuple[float, ...]:
        """The factor of each parameter group's learning rate for the present batch."""
        return self._training.lr_factors

    @property
    def noise(self) -> NoiseEstimate:
        """The gradient noise scale with its interval; it may say "unknown, at least x"."""
        return self._training.noise

    @property
    def progress(self) -> float:
        """Samples × efficiency, in samples at the initial batch."""
        return self._training.progress.progress

    def weigh(self, weight: float | Tensor) -> None:
        """Set, inside `training_step`, how many tokens (or other units) its loss is the mean of."""
        self._weight = weight

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the trainer's replicas and its optimiser."""
        _check_trainer(trainer, pl_module)
        environment = replace(
            read_environment(),
            replica=trainer.global_rank,
            num_replicas=trainer.world_size,
            local_replica=trainer.local_rank,
            num_nodes=trainer.num_nodes,
        )
        bounded = trainer.max_epochs is not None and trainer.max_epochs > 0 and trainer.max_steps == -1
        self._training.epochs_wanted = trainer.max_epochs if bounded else None
        self._training.attach(trainer.optimizers[0], environment, trainer.strategy.root_device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the restored optimiser, handle SIGTERM, and do not time what came before."""
        self._training.listen()
        self._training.steps.refresh()
        self._training.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do not time the validation."""
        self._training.pause()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the micro-batch, and tell the trainer whether to accumulate it."""
        micro = self._training.begin_micro_batch()
        self._micro, self._weight = micro, None
        if micro.index == 0:
            trainer.optimizers[0].zero_grad(set_to_none=True)
        # The trainer steps where batch_idx + 1 is a multiple of this number, and clears gradients where batch_idx is.
        if micro.is_last:
            trainer.accumulate_grad_batches = 1 if micro.repeats == 1 else batch_idx + 1
        else:
            trainer.accumulate_grad_batches = batch_idx + 2

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Weigh the gradient; the trainer has divided the loss by its own number of batches."""
        divided = trainer.accumulate_grad_batches
        factor = self._training.steps.weight(loss, self._weight) * divided
        scale = _loss_scale(trainer, loss.device)
        value = loss.detach() * divided
        self._training.steps.note_loss(value if scale is None else value / scale)
        loss.register_hook(lambda gradient: gradient * factor)
        self._training.steps.begin_backward(self._weight)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop measuring this batch."""
        self._training.steps.end_backward()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Measure the averaged gradient, before it is clipped."""
        if self._micro is None or not self._micro.is_last:
            raise MisusedJob(
                "the trainer ended an epoch inside a step: leave limit_train_batches out, and max_steps counts steps"
            )
        self._training.steps.before_step(_loss_scale(trainer, trainer.strategy.root_device), unscaled=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After the last batch of a step count the step; the batch may change."""
        micro, self._micro = self._micro, None
        if micro is None or not micro.is_last:
            return
        self._training.after_step()
        self._training.schedule_taken += 1
        if self._training.adapts:
            self._advance_schedules(trainer)
        if self._training.wants_stop():
            _save_last(trainer)
            self._training.stop()

    def _advance_schedules(self, trainer: Trainer) -> None:
        """Advance per-step schedules by several steps where the larger batch counts as several."""
        due = self._training.schedule_due()
        extra = due - self._training.schedule_taken
        if extra <= 0:
            return
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau:
                for _ in range(extra):
                    config.scheduler.step()  # type: ignore[call-arg]
        self._training.schedule_taken = due

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merge what the replicas know, while all of them are here."""
        self._training.finish()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Detach from the trainer."""
        trainer.accumulate_grad_batches = 1
        self._training.detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Drop the step under way."""
        self._micro = None


def _check_trainer(trainer: Trainer, pl_module: LightningModule) -> None:
    if not pl_module.automatic_optimization:
        raise InvalidInput(
            f"{type(pl_module).__name__} optimises by hand (automatic_optimization is False): use pollux.init and a "
            "plain loop, or let Lightning optimise"
        )
    if len(trainer.optimizers) != 1:
        raise InvalidInput(f"the module has {len(trainer.optimizers)} optimisers: Pollux supports one")
    if trainer.accumulate_grad_batches != 1:
        raise InvalidInput(
            f"accumulate_grad_batches is {trainer.accumulate_grad_batches}: leave it out, and give PolluxDataLoader "
            "accumulation= or max_local_batch="
        )
    strategy = type(trainer.strategy).__name__
    if strategy not in _STRATEGIES:
        raise InvalidInput(f"the trainer's strategy is {strategy}: Pollux supports one device, and 'ddp'")


def _save_last(trainer: Trainer) -> None:
    """Write the file for `ckpt_path="last"` into the folder of every `ModelCheckpoint`; a collective."""
    folders = [str(folder) for each in trainer.checkpoint_callbacks if (folder := getattr(each, "dirpath", None))]
    if not folders:
        _log.warning("asked to stop, and there is no ModelCheckpoint with a folder: the training is not saved")
    for folder in dict.fromkeys(folders):
        path = Path(folder) / _LAST
        if trainer.is_global_zero and path.is_symlink():
            # The link's target is another checkpoint, which must not be overwritten.
            path.unlink()
        trainer.save_checkpoint(path)


def _loss_scale(trainer: Trainer, device: torch.device) -> Tensor | None:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return None if scaler is None else scaler.scale(torch.ones((), device=device))
