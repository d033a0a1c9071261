"""Hugging Face: a mixin that makes `transformers.Trainer` exact at any number of replicas, which change by a restart.

`framework_loop` does the work; transformers is imported when a trainer is made.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from pollux.agent.adaptation.batch_tuner import fitting_choice
from pollux.agent.adaptation.lr_rules import OwnRule
from pollux.agent.adaptation.noise_scale import NoiseEstimate
from pollux.agent.data.loader import LoaderOptions
from pollux.agent.data.step_shape import MicroBatch
from pollux.agent.distributed.environment import read_environment
from pollux.agent.frameworks.framework_loop import FrameworkTraining
from pollux.agent.frameworks.options import FrameworkOptions
from pollux.core.errors import CheckpointMismatch, InvalidInput, MisusedJob

if TYPE_CHECKING:
    from transformers import Trainer
else:
    # The user's class inherits from Trainer itself; transformers is not needed before a trainer is made.
    Trainer = object

__all__ = ["STATE_NAME", "PolluxTrainerMixin", "newest_whole"]

STATE_NAME = "pollux_state.pt"
_TRAINER_STATE = "trainer_state.json"
# Where steps vary in their number of micro-batches, the trainer's own count must not end an epoch.
_MANY = 1 << 20
_log = logging.getLogger("pollux")


class PolluxTrainerMixin(Trainer):
    """Use as `class MyTrainer(PolluxTrainerMixin, Trainer)`; your own `compute_loss` goes into a class after it.

    `batch_size` counts the samples of one optimiser step over all replicas, and is the same at any number of them;
    `per_device_train_batch_size` is the largest local batch, and more samples are accumulated. No sample is padded or
    repeated. `measure_noise` reports the gradient noise scale in the logs. `adapt_accumulation` lets the batch grow up
    to `max_batch_size` by accumulation; epochs and schedules then follow progress.
    """

    def __init__(
        self,
        *args: Any,
        batch_size: int,
        adapt_accumulation: bool = False,
        max_batch_size: int | None = None,
        lr_rule: str | OwnRule | None = None,
        warmup_epochs: float = 0.0,
        measure_noise: bool | None = None,
        **kwargs: Any,
    ) -> None:
        _require_transformers()
        super().__init__(*args, **kwargs)
        if adapt_accumulation != (max_batch_size is not None):
            raise InvalidInput(
                f"adapt_accumulation is {adapt_accumulation} with max_batch_size {max_batch_size}: give both for a "
                "batch that grows, neither for one that stays"
            )
        _check_trainer(self, adapt_accumulation)
        asked = FrameworkOptions(
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            max_local_batch=self.args.per_device_train_batch_size,
            lr_rule=lr_rule,
            warmup_epochs=warmup_epochs,
            measure_noise=measure_noise,
        )
        self._pollux_options = asked.within(read_environment(), may_grow=adapt_accumulation)
        self._pollux_stopping = False
        self._pollux: FrameworkTraining | None = None
        self._pollux_checkpoint: Path | None = None
        self._pollux_weighed = False
        self._micros_begun = 0
        # Our loader resumes at its place by itself; the trainer must not skip batches to find it.
        self.args.ignore_data_skip = True
        self.args.average_tokens_across_devices = True
        self.add_callback(_step_callback(self))

    @property
    def noise(self) -> NoiseEstimate | None:
        """The gradient noise scale with its interval, which may say "unknown, at least x"; None before training."""
        return None if self._pollux is None else self._pollux.noise

    @property
    def hosted(self) -> FrameworkTraining:
        """Pollux's part of this training: batch, progress, place in the data."""
        if self._pollux is None:
            raise MisusedJob("this trainer has not started to train: call train() first")
        return self._pollux

    # What the trainer calls

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`; `True` resumes from the newest whole checkpoint, or starts at the beginning without one."""
        found: Path | None = None
        if resume_from_checkpoint is True:
            found = newest_whole(Path(self.args.output_dir or "."))
        elif resume_from_checkpoint:
            found = Path(str(resume_from_checkpoint))
            if not (found / STATE_NAME).is_file():
                raise CheckpointMismatch(f"{found} has no {STATE_NAME}: it was not written by a trainer with Pollux")
        self._pollux_checkpoint = found
        return super().train(None if found is None else str(found), *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Our loader over the trainer's dataset and collator."""
        source = super().get_train_dataloader()
        dataset = self.train_dataset if isinstance(self.train_dataset, IterableDataset) else source.dataset
        arguments = self.args
        loading = LoaderOptions(
            shuffle=not isinstance(dataset, IterableDataset) and _is_shuffled(arguments),
            seed=arguments.data_seed if arguments.data_seed is not None else arguments.seed,
            collate_fn=source.collate_fn,
            num_workers=arguments.dataloader_num_workers,
            pin_memory=arguments.dataloader_pin_memory and torch.accelerator.is_available(),
            drop_last=arguments.dataloader_drop_last,
            prefetch_factor=arguments.dataloader_prefetch_factor,
            persistent_workers=arguments.dataloader_persistent_workers,
        )
        self._pollux = FrameworkTraining(dataset, self._pollux_options, loading)
        if self._pollux_checkpoint is not None:
            state = torch.load(self._pollux_checkpoint / STATE_NAME, weights_only=True)
            self._pollux.load_state_dict(state)
        options = self._pollux_options
        choice = fitting_choice(options.batch_size, arguments.world_size, options.max_local_batch)
        repeats = choice.accumulation + 1
        varies = options.max_batch_size is not None or (options.measure_noise and arguments.world_size * repeats == 1)
        arguments.gradient_accumulation_steps = _MANY if varies else repeats
        return _TrainingBatches(self, self._pollux, arguments.gradient_accumulation_steps)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of one optimiser step at the start."""
        return self._pollux_options.batch_size

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """The epochs done by our loader's count; the trainer would divide its own count of steps."""
        epochs, steps = super()._init_training_state(*args, **kwargs)
        return (epochs, steps) if self._pollux_checkpoint is None else (self.hosted.epochs_done, 0)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """The micro-batches of one step, and the number of tokens in them where the model needs it."""
        batches: list[Any] = []
        counted: list[Any] = []
        for batch in epoch_iterator:
            micro = self.hosted.batches.last_issued
            batches.append(batch)
            counted.append(batch if micro.samples else _without_labels(batch))
            if micro.is_last:
                break
        done, count = self._micros_begun, len(batches)
        if count:
            # The trainer steps where its count of micro-batches is a multiple of this number.
            self.args.gradient_accumulation_steps = count if done % count == 0 else done + count
        return batches, self._get_num_items_in_batch(counted, device)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One micro-batch: forward, backward, and after the last one of a step its measurement."""
        training = self.hosted
        micro = training.begin_micro_batch()
        self._micros_begun += 1
        self._pollux_weighed = False
        training.steps.begin_backward(part=self._noise_part(micro, inputs, num_items_in_batch))
        loss = super().training_step(model, inputs, num_items_in_batch)
        training.steps.end_backward()
        if not self._pollux_weighed:
            raise MisusedJob(
                f"{type(self).__name__}.compute_loss does not call Pollux's: define it in a class of its own, after "
                "the mixin: class MyTrainer(PolluxTrainerMixin, TrainerWithMyLoss)"
            )
        training.steps.note_share(loss.detach() / self.args.world_size)
        if micro.is_last:
            scaler = self.accelerator.scaler
            training.steps.before_step(None if scaler is None else scaler.scale(torch.ones((), device=loss.device)))
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The trainer's own loss, in training times the weight that makes the average right."""
        result: Any = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        micro = None if self._pollux is None else self._pollux.micro
        if micro is None or not model.training:
            return result
        self._pollux_weighed = True
        if not return_outputs:
            return self._weighted(result, micro, num_items_in_batch)
        return (self._weighted(result[0], micro, num_items_in_batch), *result[1:])

    def _weighted(self, loss: Tensor, micro: MicroBatch, num_items: Any) -> Tensor:
        if num_items is not None:
            # A sum over tokens divided by the number of all tokens, times the replicas: right for any split.
            return loss if micro.samples else loss * 0.0
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = self.compute_loss_func is not None
        # The trainer divides by the number of micro-batches, which is part of the weight already.
        return loss * self.hosted.steps.weight(loss) * (1 if scaled else self.current_gradient_accumulation_steps)

    def _noise_part(self, micro: MicroBatch, inputs: Any, num_items: Any) -> float | None:
        """The meter's weight: by tokens g' = g·K·w/W, so (w/W)·|g|² = |g'|²·W/(w·K²); None: by samples."""
        if num_items is None or not micro.measured:
            return None
        labels = inputs.get("shift_labels", inputs["labels"])
        if "shift_labels" not in inputs and getattr(self, "_loss_shifts_labels", False):
            labels = labels[..., 1:]
        tokens = int(labels.ne(-100).sum()) if micro.samples else 0
        return float(num_items) / (tokens * self.args.world_size**2) if tokens else 0.0

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in `Trainer`; a checkpoint gets our state first, since the trainer's state marks it as whole."""
        if _internal_call and output_dir is not None and self._pollux is not None and self._pollux.is_attached:
            state = self._pollux.state_dict()
            if self.args.should_save:
                folder = Path(output_dir)
                folder.mkdir(parents=True, exist_ok=True)
                torch.save(state, folder / f"{STATE_NAME}.new")
                os.replace(folder / f"{STATE_NAME}.new", folder / STATE_NAME)
        super().save_model(output_dir, _internal_call)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in `Trainer`, with batch and gradient noise added."""
        if self._pollux is not None and self._pollux.is_attached and "loss" in logs:
            logs = {**logs, "batch_size": float(self._pollux.batch_size), **_noise_entries(self._pollux.noise)}
        super().log(logs, *args, **kwargs)

    # Called by the callback

    def _pollux_begin(self) -> None:
        environment = replace(read_environment(), replica=self.args.process_index, num_replicas=self.args.world_size)
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        self.hosted.epochs_wanted = None if self.args.max_steps > 0 else float(self.args.num_train_epochs)
        self.hosted.attach(optimizer, environment, self.args.device)
        self.hosted.listen()

    def _pollux_step_end(self, state: Any) -> None:
        training = self.hosted
        if training.progress.epoch_size:
            state.epoch = training.progress.epochs
        if training.adapts and self.lr_scheduler is not None:
            for _ in range(training.schedule_due() - training.schedule_taken):
                self.lr_scheduler.step()
                training.schedule_taken += 1

    def _pollux_saved(self) -> None:
        if self._pollux_stopping:
            self.hosted.stop()

    def _pollux_end(self) -> None:
        self.hosted.finish()
        self.hosted.detach()


class _TrainingBatches:
    """The trainer's training DataLoader."""

    def __init__(self, trainer: PolluxTrainerMixin, training: FrameworkTraining, repeats: int) -> None:
        self.dataset = training.loader.dataset
        self._trainer = trainer
        self._training = training
        self._repeats = repeats

    def __iter__(self) -> Any:
        self._trainer._micros_begun = 0
        return self._training.epoch()

    def __len__(self) -> int:
        steps = self._training.steps_per_epoch()
        if steps is None:
            raise TypeError("the dataset has no length")
        return steps * self._repeats


def _step_callback(trainer: PolluxTrainerMixin) -> Any:
    from transformers import TrainerCallback

    class PolluxSteps(TrainerCallback):
        """Calls the mixin at the events of the trainer's loop."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            trainer._pollux_begin()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            trainer.hosted.after_step()
            trainer.hosted.schedule_taken += 1

        def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
            trainer._pollux_step_end(state)
            if trainer.hosted.wants_stop():
                trainer._pollux_stopping = control.should_save = True

        def on_save(self, *_: Any, **__: Any) -> None:
            trainer._pollux_saved()

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            if trainer._pollux is not None:
                trainer._pollux.pause()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            trainer._pollux_end()

    return PolluxSteps()


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise InvalidInput(
            "PolluxTrainerMixin needs transformers, which is not installed: "
            "pip install 'pollux-scheduler[transformers]'"
        ) from error


def _check_trainer(trainer: Any, adapts: bool) -> None:
    arguments = trainer.args
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or arguments.n_gpu > 1:
        raise InvalidInput(
            "the trainer uses DeepSpeed, FSDP or DataParallel: Pollux supports one process per GPU with plain data "
            "parallelism; keep such a job rigid"
        )
    if arguments.gradient_accumulation_steps != 1 or arguments.auto_find_batch_size:
        raise InvalidInput(
            f"gradient_accumulation_steps is {arguments.gradient_accumulation_steps}, auto_find_batch_size "
            f"{arguments.auto_find_batch_size}: leave both out; Pollux accumulates what per_device_train_batch_size "
            "does not hold"
        )
    if adapts and arguments.max_steps > 0:
        raise InvalidInput(
            f"max_steps is {arguments.max_steps} with adapt_accumulation: steps of a growing batch are worth more and "
            "more, so give num_train_epochs"
        )


def _is_shuffled(arguments: Any) -> bool:
    strategy = str(getattr(arguments, "train_sampling_strategy", "random"))
    if strategy not in ("random", "sequential"):
        raise InvalidInput(f"train_sampling_strategy is '{strategy}': Pollux orders samples 'random' or 'sequential'")
    return strategy == "random"


def _without_labels(batch: Any) -> dict[str, Any]:
    """A batch whose labels do not count, for a filler, whose samples belong to another replica."""
    hidden = {name: torch.full_like(batch[name], -100) for name in ("labels", "shift_labels") if name in batch}
    return {**batch, **hidden}


def _noise_entries(estimate: NoiseEstimate) -> dict[str, float]:
    if estimate.is_known:
        return {"noise_scale": estimate.noise_scale, "noise_low": estimate.low, "noise_high": estimate.high}
    return {"noise_low": estimate.low} if estimate.low > 0.0 else {}


def newest_whole(folder: Path) -> Path | None:
    """The newest whole checkpoint; skips others with a warning."""
    numbered = [(path.name.rpartition("-")[2], path) for path in folder.glob("checkpoint-*") if path.is_dir()]
    for _, path in sorted(((int(number), path) for number, path in numbered if number.isdigit()), reverse=True):
        try:
            json.loads((path / _TRAINER_STATE).read_text())
        except (OSError, ValueError):
            _log.warning("%s is not whole: using the checkpoint before it", path)
            continue
        if (path / STATE_NAME).is_file():
            return path
        raise CheckpointMismatch(f"{path} has no {STATE_NAME}: it was not written by a trainer with Pollux")
    return None
