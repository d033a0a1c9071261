"""Stopped, killed and resumed at changing numbers of replicas: the loss curve goes on as if nothing had happened."""

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pollux
from pollux.agent.checkpoint.folder import CheckpointFolder
from pollux.testing.waiting import PATIENCE_SECONDS, wait_until

HERE = str(Path(__file__))
BATCH = 6
SIZE = 38
EPOCHS = 4
STEPS_PER_EPOCH = 7


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def parts() -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    data = torch.utils.data.TensorDataset(torch.randn(SIZE, 5, dtype=torch.float64), torch.randint(0, 3, (SIZE,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return model, optimizer, data, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)


def draws() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def train(
    folder: str, log: str, run: int = 0, signal_at: dict[str, int] | None = None, killed_at: int = -1, **options
) -> dict[str, Any]:
    """Train to the end, or until step `killed_at`, or until signals that replicas send themselves at given steps.

    Each replica writes its part of every step's loss into its own log, with the epochs it evaluated.
    """
    model, optimizer, data, scheduler = parts()
    counter = Counter()
    job = pollux.init(
        model,
        optimizer,
        data,
        BATCH,
        checkpoint_dir=folder,
        lr_scheduler=scheduler,
        state={"counter": counter},
        **options,
    )
    mine = signal_at.get(str(job.replica), -1) if signal_at else -1
    path = Path(log) / f"{run}-{job.replica}.jsonl"
    path.parent.mkdir(exist_ok=True)
    first_draws = draws()
    with path.open("a", buffering=1) as file:
        for epoch in job.epochs(EPOCHS):
            part = 0.0
            for x, y in job.batches():
                micro: Any = job._parts.engine._micro
                loss = F.cross_entropy(job.model(x), y)
                part += float(loss.detach()) * micro.samples / micro.total
                step = job.step
                if micro.is_last:
                    if step == killed_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if step == mine:
                        os.kill(os.getpid(), signal.SIGTERM)
                    if step >= mine >= 0:
                        # Steps of a millisecond would be over before the others have heard of the signal.
                        time.sleep(0.03)
                    counter.count += 1
                    file.write(json.dumps({"step": step, "loss": part, "lr": scheduler.get_last_lr()[0]}) + "\n")
                    part = 0.0
                job.backward(loss)
            file.write(json.dumps({"evaluated": epoch, "step": job.step}) + "\n")
    result = {"step": job.step, "epoch": job.epoch, "count": counter.count, "draws": first_draws}
    result["events"] = [event.kind for event in job.receipt.events]
    result["ledger"] = job.receipt.to_json()["ledger"]
    job.close()
    return result


def read(log: Path) -> tuple[dict[int, float], dict[int, float], list[int]]:
    """Loss and learning rate of every step in the last run that took it; and the epochs that replica 0 evaluated."""
    losses: dict[int, dict[int, float]] = {}
    rates: dict[int, float] = {}
    evaluated = []
    for path in sorted(log.iterdir()):
        run, replica = map(int, path.stem.split("-"))
        for entry in map(json.loads, path.read_text().splitlines()):
            if "evaluated" in entry:
                evaluated += [entry["evaluated"]] if replica == 0 else []
                continue
            rates[entry["step"]] = entry["lr"]
            by_run = losses.setdefault(entry["step"], {})
            by_run[run] = by_run.get(run, 0.0) + entry["loss"]
    return {step: by_run[max(by_run)] for step, by_run in losses.items()}, rates, evaluated


@pytest.fixture(scope="module")
def whole(replica_server, tmp_path_factory):
    """An uninterrupted run on one replica."""
    folder = tmp_path_factory.mktemp("whole")
    (result,) = replica_server.run(f"{HERE}:train", 1, {"folder": str(folder / "saved"), "log": str(folder / "log")})
    losses, rates, evaluated = read(folder / "log")
    assert len(losses) == EPOCHS * STEPS_PER_EPOCH
    assert evaluated == list(range(EPOCHS))
    return losses, rates, result


def require_same(log: Path, whole) -> list[int]:
    losses, rates, evaluated = read(log)
    assert losses.keys() == whole[0].keys()
    worst = max(abs(losses[step] - whole[0][step]) / abs(whole[0][step]) for step in losses)
    assert worst <= 1e-12
    assert rates == whole[1]
    return evaluated


STOPS = [
    pytest.param([(1, {"0": 3}), (1, {"0": 10}), (1, None)], id="alone"),
    pytest.param([(2, {"0": 3, "1": 3}), (3, {"2": 11}), (1, {"0": 20}), (4, None)], id="changing"),
    pytest.param([(3, {"1": 5}), (3, None)], id="one-of-three"),
    pytest.param([(4, {"3": 2}), (2, {"1": 9}), (4, None)], id="the-last-of-four"),
]


@pytest.mark.parametrize("plan", STOPS)
def test_stop_and_resume(replica_server, tmp_path, whole, plan):
    arguments = {"folder": str(tmp_path / "saved"), "log": str(tmp_path / "log")}
    for run, (num_replicas, signal_at) in enumerate(plan):
        running = replica_server.start(f"{HERE}:train", num_replicas, {**arguments, "run": run, "signal_at": signal_at})
        results = running.wait(PATIENCE_SECONDS)
        codes = {result.exit_code for result in results}
        assert codes == ({143} if signal_at else {0}), results[0].output
        assert {result.error for result in results} == ({"JobStopped"} if signal_at else {""})
        steps = {path.name for path in (tmp_path / "saved").glob("step-*")}
        assert steps
    require_same(tmp_path / "log", whole)
    last = results[0].value
    assert (last["step"], last["epoch"], last["count"]) == (28, 4, 28)
    assert last["ledger"] == whole[2]["ledger"]
    assert last["events"].count("stopped") == len(plan) - 1
    assert last["events"].count("resumed") == len(plan) - 1


def test_a_stop_at_the_last_step_of_an_epoch_evaluates_on_resume(replica_server, tmp_path, whole):
    arguments = {"folder": str(tmp_path / "saved"), "log": str(tmp_path / "log")}
    (result,) = replica_server.start(f"{HERE}:train", 1, {**arguments, "signal_at": {"0": STEPS_PER_EPOCH - 1}}).wait()
    assert result.exit_code == 143
    losses, _, evaluated = read(tmp_path / "log")
    assert (max(losses), evaluated) == (STEPS_PER_EPOCH - 1, [])
    replica_server.run(f"{HERE}:train", 2, {**arguments, "run": 1})
    assert require_same(tmp_path / "log", whole) == list(range(EPOCHS))


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 3)])
def test_killed_and_resumed_from_the_last_checkpoint(replica_server, tmp_path, whole, before, after):
    arguments = {"folder": str(tmp_path / "saved"), "log": str(tmp_path / "log"), "checkpoint_every": 0.001}
    results = replica_server.start(f"{HERE}:train", before, {**arguments, "killed_at": 17}).wait()
    assert results[0].exit_code == -signal.SIGKILL
    (result, *_) = replica_server.run(f"{HERE}:train", after, {**arguments, "run": 1})
    require_same(tmp_path / "log", whole)
    assert result["count"] == 28


def stop_alone(folder: str, ready: str) -> None:
    """A step takes 50 ms, so that the signal comes in the middle of one."""
    model, optimizer, data, _ = parts()
    job = pollux.init(model, optimizer, data, BATCH, checkpoint_dir=folder)
    for _ in job.epochs(1000):
        for x, y in job.batches():
            time.sleep(0.05)
            job.backward(F.cross_entropy(job.model(x), y))
            if job.step == 1:
                Path(ready, str(job.replica)).touch()


def wait_for(paths: list[Path], seconds: float = PATIENCE_SECONDS) -> None:
    wait_until("files of all", lambda: all(path.exists() for path in paths), seconds)


def test_a_signal_from_outside_to_one_replica_stops_all_at_one_step(replica_server, tmp_path):
    running = replica_server.start(f"{HERE}:stop_alone", 3, {"folder": str(tmp_path / "saved"), "ready": str(tmp_path)})
    wait_for([tmp_path / str(replica) for replica in range(3)])
    running.signal(signal.SIGTERM, 1)
    results = running.wait(PATIENCE_SECONDS)
    assert [result.exit_code for result in results] == [143, 143, 143], results[0].output
    assert len(list((tmp_path / "saved").glob("step-*"))) == 1


def random_state(folder: str, stop: bool) -> list[Any]:
    model, optimizer, data, _ = parts()
    job = pollux.init(model, optimizer, data, BATCH, checkpoint_dir=folder)
    seen = []
    with contextlib.suppress(SystemExit):
        for _ in job.epochs(2):
            for x, y in job.batches():
                seen.append([job.step, draws()])
                if stop and job.step == 4:
                    os.kill(os.getpid(), signal.SIGTERM)
                job.backward(F.cross_entropy(job.model(x), y))
    return seen


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_random_numbers_go_on_where_they_were(replica_server, tmp_path, num_replicas):
    arguments = {"folder": str(tmp_path / "whole"), "stop": False}
    expected = replica_server.run(f"{HERE}:random_state", num_replicas, arguments)
    arguments = {"folder": str(tmp_path / "split"), "stop": True}
    first = replica_server.run(f"{HERE}:random_state", num_replicas, arguments)
    second = replica_server.run(f"{HERE}:random_state", num_replicas, {**arguments, "stop": False})
    for replica in range(num_replicas):
        assert first[replica][-1][0] < expected[replica][-1][0]
        # Python and numpy were not seeded by the script, so only what follows the checkpoint must agree.
        merged = [*first[replica], *second[replica]]
        assert [step for step, _ in merged] == [step for step, _ in expected[replica]]
        assert [values[2] for _, values in merged] == [values[2] for _, values in expected[replica]]
    if num_replicas > 1:
        assert expected[0][0][1] != expected[1][0][1], "replicas draw numbers of their own"


def evaluate_only(folder: str) -> dict[str, Any]:
    model, optimizer, data, scheduler = parts()
    job = pollux.init(
        model, optimizer, data, BATCH, checkpoint_dir=folder, lr_scheduler=scheduler, state={"counter": Counter()}
    )
    epochs = list(job.epochs(EPOCHS))
    job.close()
    return {"epochs": epochs, "step": job.step}


def test_a_finished_job_does_nothing_more(replica_server, tmp_path):
    arguments = {"folder": str(tmp_path / "saved"), "log": str(tmp_path / "log")}
    replica_server.run(f"{HERE}:train", 1, arguments)
    before = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert replica_server.run(f"{HERE}:evaluate_only", 2, {"folder": str(tmp_path / "saved")}) == [
        {"epochs": [], "step": 28},
        {"epochs": [], "step": 28},
    ]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == before


def test_a_stop_without_a_folder_says_that_the_work_is_lost(replica_server):
    (result,) = replica_server.start(f"{HERE}:stop_without_folder").wait()
    assert result.exit_code == 143
    assert "stopped without a checkpoint: pass checkpoint_dir=" in result.output


def stop_without_folder() -> None:
    model, optimizer, data, _ = parts()
    job = pollux.init(model, optimizer, data, BATCH)
    for _ in job.epochs(1):
        for x, y in job.batches():
            os.kill(os.getpid(), signal.SIGTERM)
            job.backward(F.cross_entropy(job.model(x), y))


def leave(folder: str, at: dict[str, int]) -> int:
    """Leave the loop over epochs by break, each replica after its own number of epochs."""
    model, optimizer, data, _ = parts()
    with pollux.init(model, optimizer, data, BATCH, checkpoint_dir=folder) as job:
        for epoch in job.epochs(EPOCHS):
            for x, y in job.batches():
                job.backward(F.cross_entropy(job.model(x), y))
            if epoch + 1 == at[str(job.replica)]:
                break
        return int(job.step)


def test_what_was_done_before_all_left_the_loop_is_saved(replica_server, tmp_path):
    results = replica_server.start(f"{HERE}:leave", 2, {"folder": str(tmp_path), "at": {"0": 2, "1": 2}}).wait(
        PATIENCE_SECONDS
    )
    assert [result.value for result in results] == [2 * STEPS_PER_EPOCH] * 2, results
    assert [path.name for path in tmp_path.glob("step-*")] == [f"step-{2 * STEPS_PER_EPOCH:010d}"]


def saved_when_told_to_stop(folder: str) -> list[str]:
    """Stop at once, with a save that takes a while; what is there when this replica may go."""
    model, optimizer, data, _ = parts()
    job = pollux.init(model, optimizer, data, BATCH, checkpoint_dir=folder)
    publish = CheckpointFolder.publish

    def slowly(*given: Any) -> str:
        time.sleep(1.0)
        return publish(*given)

    CheckpointFolder.publish = slowly  # type: ignore[method-assign, assignment]
    try:
        for _ in job.epochs(EPOCHS):
            for x, y in job.batches():
                os.kill(os.getpid(), signal.SIGTERM)
                job.backward(F.cross_entropy(job.model(x), y))
    except SystemExit:
        return [path.name for path in Path(folder).glob("step-*")]
    return []


def test_no_replica_goes_before_the_first_has_saved(replica_server, tmp_path):
    """Launchers end the others as soon as one has gone."""
    results = replica_server.start(f"{HERE}:saved_when_told_to_stop", 3, {"folder": str(tmp_path)}).wait(
        PATIENCE_SECONDS
    )
    assert [len(result.value) for result in results] == [1, 1, 1], results
