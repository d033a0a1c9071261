"""Hugging Face: trains, is killed, resumes at another size, and matches plain PyTorch. Run as a script: the job."""

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
from torch.utils.data import Dataset

from pollux.agent import pass_order
from pollux.agent.data.ledger import SampleLedger

SAMPLES, BATCH, EPOCHS, SEED, RATE = 50, 8, 3, 3, 0.01
WORDS, LENGTH = 20, 9


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """A regression, in float64."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(samples, 6, dtype=torch.float64, generator=generator)
        self.y = torch.randn(samples, 1, dtype=torch.float64, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sequences whose first 1 to 7 words are not to be learned, so that replicas have different numbers of tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.words = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)
        self.labels = self.words.clone()
        for row, skipped in enumerate(torch.randint(1, 8, (SAMPLES,), generator=generator).tolist()):
            self.labels[row, :skipped] = -100

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


class Regression(nn.Module):
    """A model in the shape that the trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=8,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def flat(model: nn.Module) -> list[float]:
    return [float(value) for parameter in model.parameters() for value in parameter.detach().reshape(-1)]


def plain(model: nn.Module, dataset: Any, epochs: int = EPOCHS) -> list[float]:
    """The loss of every step, without Trainer and Pollux."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    total = epochs * -(-SAMPLES // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / total))
    losses = []
    for epoch in range(epochs):
        for part in pass_order(SAMPLES, SEED, epoch).split(BATCH):
            samples = [dataset[index] for index in part.tolist()]
            batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
            loss = model(**batch)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


def replayed(steps: list[tuple[int, float]], samples: int) -> list[float]:
    """Final parameters of plain PyTorch over the same samples, a step for each (samples, learning rate)."""
    model, dataset = Regression(), Numbers(samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    order = torch.cat([pass_order(samples, SEED, number) for number in range(10)])
    place = 0
    for total, rate in steps:
        part = order[place : place + total]
        optimizer.param_groups[0]["lr"] = rate
        model(dataset.x[part], dataset.y[part])["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        place += total
    return flat(model)


def furthest(first: list[float], second: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(first, second, strict=True))


def test_killed_and_resumed_at_another_size_matches_plain_pytorch(launch, tmp_path):
    # Two trainings in one process: of the first, a language model weighted by tokens, is left after a checkpoint;
    # the second, a regression, is killed. With 3 replicas the last step of a pass has fewer samples than replicas.
    job = {"folder": str(tmp_path / "checkpoints"), "local": 3, "save_every": 5, "models": ["sentences", "numbers"]}
    _, answers = launch(__file__, [(2, {**job, "kill_at": 12, "stop_at": 10}, "killed"), (3, job)])
    regression = Regression()
    expected = plain(regression, Numbers())
    tokens = plain(language_model(), Sentences())
    for answer in answers:
        numbers, sentences = answer["numbers"], answer["sentences"]
        assert furthest(numbers["parameters"], flat(regression)) < 1e-12
        # The trainer adds losses up in float32.
        assert furthest(numbers["losses"], expected) < 1e-6
        assert furthest(sentences["losses"], tokens) < 2e-6
        for result in (numbers, sentences):
            assert result["samples"] == EPOCHS * SAMPLES
            assert result["ledger"] == [SAMPLES, SampleLedger.of_range(SAMPLES).digest]
            assert result["epochs"][-1] == EPOCHS
            assert result["resumed_at"] == 10


def test_asked_to_stop_it_saves_after_a_step_and_goes_on_at_another_size(launch, tmp_path):
    """As the scheduler moves it: SIGTERM, here to one of two replicas, long before a checkpoint is due."""
    job = {"folder": str(tmp_path / "saved"), "local": 3, "save_every": 10**6, "models": ["numbers"]}
    _, answers = launch(__file__, [(2, {**job, "term_at": 6}, "stopped"), (3, job)])
    regression = Regression()
    plain(regression, Numbers())
    for answer in answers:
        assert furthest(answer["numbers"]["parameters"], flat(regression)) < 1e-12
        assert answer["numbers"]["samples"] == EPOCHS * SAMPLES
        assert answer["numbers"]["resumed_at"] >= 6, "no step that was trained is trained again"


def test_noise_is_reported_and_accumulation_adapted_through_a_kill_and_a_resize(launch, tmp_path):
    samples = 210
    options = {"adapt_accumulation": True, "max_batch_size": 64}
    job = {"local": 4, "save_every": 5, "models": ["numbers"], "samples": samples, "options": options, "scripted": True}
    whole, cut = {**job, "folder": str(tmp_path / "whole")}, {**job, "folder": str(tmp_path / "cut")}
    measured = {"folder": str(tmp_path / "measured"), "local": 8, "save_every": 100, "models": ["numbers"]}
    runs = [
        (1, whole),
        (2, {**cut, "kill_at": 17}, "killed"),
        (3, cut),
        (1, {**measured, "options": {"measure_noise": True}, "epochs": 5}),
    ]
    ((first,), _, again, (alone,)) = launch(__file__, runs)
    regression = Regression()
    plain(regression, Numbers(), 5)
    assert set(alone["numbers"]["repeats"]) == {1, 2}, "measured steps are split"
    assert furthest(alone["numbers"]["parameters"], flat(regression)) < 1e-12, "halves of a batch are the batch"
    first, again = first["numbers"], [answer["numbers"] for answer in again]
    factors = [(max(total, BATCH) / BATCH) ** 0.5 for total in first["totals"]]
    rates = [rate * factor for rate, factor in zip(first["rates"], factors, strict=True)]
    assert {8, 24, 48} < set(first["totals"]), "and what was left of a pass at its end"
    steps = list(zip(first["totals"], rates, strict=True))
    assert furthest(first["parameters"], replayed(steps, samples)) < 1e-12
    for answer in again:
        assert furthest(answer["parameters"], first["parameters"]) < 1e-12
        for name in ("samples", "progress", "pass", "cursor", "ledger", "schedule"):
            assert answer[name] == first[name], name
    used = pass_order(samples, SEED, first["pass"])[: first["cursor"]]
    assert first["ledger"] == [first["cursor"], SampleLedger.of(used.numpy()).digest]
    assert EPOCHS * samples <= first["progress"] < EPOCHS * samples + 48
    assert first["schedule"] == int(first["progress"] / samples * -(-samples // BATCH)), "schedules follow progress"
    before_last = int((first["progress"] - 0.8 * first["totals"][-1]) / samples * -(-samples // BATCH))
    assert first["rates"][-1] == pytest.approx(RATE * (1.0 - before_last / (EPOCHS * -(-samples // BATCH))))
    assert first["measured"] > 0
    assert first["batches"][-1] == 48


def test_incomplete_checkpoint_is_passed_over(tmp_path):
    from pollux.agent.huggingface import STATE_NAME, newest_whole

    for step, state in ((5, "{}"), (10, "{}"), (15, '{"global_st'), (20, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / STATE_NAME).touch()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert newest_whole(tmp_path) == tmp_path / "checkpoint-10"
    assert newest_whole(tmp_path / "nowhere") is None


def train(name: str, model: nn.Module, dataset: Any, settings: dict[str, Any]) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from pollux.agent.huggingface import PolluxTrainerMixin

    class PolluxTrainer(PolluxTrainerMixin, Trainer):
        pass

    class Interrupt(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.used = trainer.hosted.progress.samples
            seen["resumed_at"] = state.global_step

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            used = trainer.hosted.progress.samples
            totals.append(used - self.used)
            repeats.append(trainer.current_gradient_accumulation_steps)
            self.used = used
            seen["measured"] = trainer.hosted.noise.num_measured
            if state.global_step == settings.get("kill_at") and name == "numbers":
                os.kill(os.getpid(), signal.SIGKILL)
            if state.global_step == settings.get("term_at") and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if state.global_step >= settings.get("term_at", 10**9):
                time.sleep(0.2)  # the others look for requests as often as this

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == settings.get("stop_at") and name == "sentences":
                control.should_training_stop = True

    totals: list[int] = []
    repeats: list[int] = []
    seen: dict[str, int] = {}
    arguments = TrainingArguments(
        output_dir=str(Path(settings["folder"]) / name),
        use_cpu=True,
        per_device_train_batch_size=settings["local"],
        num_train_epochs=settings.get("epochs", EPOCHS),
        learning_rate=RATE,
        seed=SEED,
        save_steps=settings["save_every"],
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    options = settings.get("options", {})
    trainer = PolluxTrainer(
        model=model, args=arguments, train_dataset=dataset, callbacks=[Interrupt()], batch_size=BATCH, **options
    )
    trainer.train(resume_from_checkpoint=True)
    state = trainer.hosted.state_dict()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        **seen,
        "totals": totals,
        "repeats": repeats,
        "parameters": flat(model),
        "losses": [entry["loss"] for entry in history],
        "rates": [entry["learning_rate"] for entry in history],
        "batches": [entry["batch_size"] for entry in history],
        "epochs": [entry["epoch"] for entry in history],
        "samples": state["progress"]["samples"],
        "progress": state["progress"]["progress"],
        "pass": state["data"]["pass"],
        "cursor": state["data"]["cursor"],
        "schedule": state["schedule"],
        "ledger": [trainer.hosted.loader.ledger.count, trainer.hosted.loader.ledger.digest],
    }


def main(settings: dict[str, Any], answer: Path) -> None:
    result = {}
    if settings.get("scripted"):
        scripted_changes(BATCH)
    if "sentences" in settings["models"]:
        result["sentences"] = train("sentences", language_model(), Sentences(), settings)
    if "numbers" in settings["models"]:
        result["numbers"] = train("numbers", Regression(), Numbers(settings.get("samples", SAMPLES)), settings)
    answer.write_text(json.dumps(result))


if __name__ == "__main__":
    importlib.import_module("forked").serve(main, ["transformers.trainer", "transformers.models.gpt2.modeling_gpt2"])
