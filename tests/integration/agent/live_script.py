"""The job that tests of live resize train, what plain PyTorch makes of it, and how the two are compared. Not a test."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pollux
from pollux.agent.checkpoint import checkpointer
from pollux.agent.data.permutation import pass_order
from pollux.agent.distributed.authenticated_store import AuthenticatedStore
from pollux.agent.elastic import generation_move

SIZE, BATCH = 98, 12
EPOCHS = 20


class Counter:
    """A user's own state: how many batches were seen, as a tensor and in a tuple."""

    def __init__(self):
        self.seen = torch.zeros(1, dtype=torch.int64)
        self.kept: Any = ("x", b"y")

    def state_dict(self):
        return {"seen": self.seen, "kept": self.kept}

    def load_state_dict(self, state):
        self.seen, self.kept = state["seen"], state["kept"]


class Unsendable(Counter):
    """State that only pickle could carry."""

    def state_dict(self):
        return {**super().state_dict(), "kept": Path("x")}


def task(batchnorm: bool = False, optimizer: str = "adamw", halves: bool = False) -> tuple[Any, Any, TensorDataset]:
    torch.manual_seed(5)
    torch.set_num_threads(1)
    norm = nn.BatchNorm1d(16) if batchnorm else nn.Identity()
    model = nn.Sequential(nn.Linear(6, 16), norm, nn.Tanh(), nn.Linear(16, 3)).double()
    data = TensorDataset(torch.randn(SIZE, 6, dtype=torch.float64), torch.randint(0, 3, (SIZE,)))
    if halves:
        # Mixed precision is for models of float32.
        model, data = model.float(), TensorDataset(data.tensors[0].float(), data.tensors[1])
    kinds = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    }
    return model, kinds[optimizer](), data


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor, halves: bool) -> torch.Tensor:
    """In bfloat16 where `halves` says so."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=halves):
        return F.cross_entropy(model(x), y)


def plain(epochs: int, batchnorm: bool = False, optimizer: str = "adamw", halves: bool = False) -> list[float]:
    """The parameters after training with plain PyTorch."""
    model, kind, data = task(batchnorm, optimizer, halves)
    scheduler = torch.optim.lr_scheduler.StepLR(kind, 50, 0.9)
    for number in range(epochs):
        for indices in pass_order(SIZE, 0, number).split(BATCH):
            x, y = data[indices]
            kind.zero_grad()
            loss_of(model, x, y, halves).backward()
            kind.step()
            scheduler.step()
    return numbers(model)


def numbers(model: nn.Module) -> list[float]:
    tensors = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    return [float(value) for value in torch.cat([tensor.reshape(-1) for tensor in tensors])]


def distance(one: list[float], other: list[float]) -> float:
    difference = torch.tensor(one, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)
    return float(difference.abs().max() / torch.tensor(other, dtype=torch.float64).abs().max())


def train(folder: str, epochs: int = EPOCHS, batchnorm: bool = False, **options: Any) -> dict[str, Any]:
    """One replica; slow until the file `fast` is there."""
    return train_with(Path(folder), epochs, batchnorm, Counter(), **options)


def train_unsendable(folder: str, epochs: int = EPOCHS) -> dict[str, Any]:
    return train_with(Path(folder), epochs, False, Unsendable())


def train_with(
    folder: Path,
    epochs: int,
    batchnorm: bool,
    counter: Counter,
    pace: float = 0.01,
    kept: bool = False,
    hold: int | None = None,
    scaled: bool = False,
    halves: bool = False,
    projects: bool = False,
    meets: str = "",
    fails: tuple[str, list[int], int] | None = None,
    parts_at: int | None = None,
    hangs_at: int | None = None,
    saves_at: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    if fails is not None:
        fail_at(folder, *fails)
    if saves_at is not None:
        write_slowly(folder)
    model, optimizer, data = task(batchnorm, options.pop("optimizer", "adamw"), halves)
    if projects:
        # Of each process's own, and in no state_dict; the second one comes to its shape in the loop.
        own = torch.Generator().manual_seed(os.getpid())
        model.register_buffer("projection", torch.rand(3, generator=own), persistent=False)
        model.register_buffer("cache", None, persistent=False)
    jobs: list[Any] = []
    if parts_at is not None:
        options["before_step"] = lambda: part_at(jobs[0], parts_at)
    if hangs_at is not None:
        options["before_step"] = lambda: hang_at(folder, jobs[0], hangs_at)
    if scaled:
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=40)
    job = pollux.init(
        model,
        optimizer,
        data,
        BATCH,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9),
        state={"counter": counter},
        checkpoint_dir=folder / "checkpoints",
        checkpoint_every=options.pop("checkpoint_every", 1000.0),
        name="live",
        **{"seed": 0, **options},
    )
    jobs.append(job)
    if meets == "barrier":
        dist.barrier()
    elif meets == "broadcast":
        dist.broadcast(torch.zeros(8, dtype=torch.float64), 0)
    began, first = job.step, job.model
    for epoch in job.epochs(epochs):
        for x, y in job.batches():
            job.backward(loss_of(first if kept else job.model, x, y, halves))
            counter.seen += 1
            if projects and began == 0 and job.step == 2:
                model.cache = torch.full((4,), 7.0)
            if job.step == saves_at:
                job.checkpoint(wait=False)
            if not (folder / "fast").exists():
                # Slower in the second half: the end must not come before what the test does has happened.
                time.sleep(pace if epoch < epochs // 2 else 8 * pace)
        if job.is_first:
            job.log(epoch=epoch)
        if epoch == hold and began == 0:
            (folder / "held").touch()
            while not (folder / "go").exists():
                time.sleep(0.005)
    passes = [[each["pass"], each["samples"]] for each in job.receipt.to_json()["ledger"]]
    events = [event["kind"] for event in job.receipt.to_json()["events"]]
    job.close()
    return {
        "began": began,
        "steps": job.step,
        "parameters": numbers(model),
        "passes": passes,
        "events": events,
        "seen": int(counter.seen),
        "logged": job.receipt.to_json()["metrics"].get("epoch", {}).get("value", []),
        "batch": job.batch_size,
        "exact": job.is_exact,
        "projected": [model.projection.tolist(), model.cache.tolist()] if projects else [],
        "fds": len(os.listdir("/proc/self/fd")),
    }


def part_at(job: Any, step: int) -> None:
    """Of three replicas with the same gradients the last dies, the second sees it, and the first takes the step."""
    if job.num_replicas == 3 and job.step == step and job.replica == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if job.num_replicas == 3 and job.step == step and job.replica == 1:
        raise RuntimeError("/gloo/ as if a connection was closed by a peer")


def hang_at(folder: Path, job: Any, step: int) -> None:
    """Of several replicas the second comes to a dead lock in the script's own code, while all its threads live."""
    if job.num_replicas > 1 and job.step == step and job.replica == 1:
        (folder / f"hangs-{os.getpid()}").touch()
        threading.Event().wait()


def write_slowly(folder: Path) -> None:
    """Files of checkpoints are written once `slow` is gone; `writing-PID` says that one would be."""
    write = checkpointer.write_files

    def slowly(*arguments: Any, **options: Any) -> Any:
        (folder / f"writing-{os.getpid()}").touch()
        while (folder / "slow").exists():
            time.sleep(0.005)
        return write(*arguments, **options)

    checkpointer.write_files = slowly


def fail_at(folder: Path, phase: str, ranks: list[int], number: int) -> None:
    """Let the replicas of these ranks get a signal when they first come to a phase; each rank once in all."""

    def fail(now: str, rank: int) -> None:
        if now == phase and rank in ranks:
            try:
                os.close(os.open(folder / f"failed-{rank}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), number)

    generation_move.at_phase = fail


def finish(supervisor: Any, folder: Path) -> list[dict[str, Any]]:
    (folder / "fast").touch()
    results = supervisor.wait()
    assert results, supervisor.outputs()
    assert {result.exit_code for result in results} == {0}, supervisor.outputs()
    return [result.value for result in results]


def check_exact(values: list[dict[str, Any]], epochs: int = EPOCHS, **options: Any) -> None:
    wanted = plain(epochs, **options)
    # Normalising a last batch of two samples makes rounding a hundred times larger, at any number of replicas.
    most = 1e-10 if options.get("batchnorm") else 1e-12
    for value in values:
        assert distance(value["parameters"], wanted) < most
        assert value["passes"] == [[number, SIZE] for number in range(epochs)]
        assert value["exact"]


def profiled(folder: str) -> dict[str, int]:
    """The collectives and waits of six ordinary steps, by name, as PyTorch's profiler sees them."""
    model, optimizer, data = task()
    job = pollux.init(model, optimizer, data, BATCH)
    names: dict[str, int] = {}
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    for _ in job.epochs(2):
        for x, y in job.batches():
            if job.step == 2:
                profiler.start()
            job.backward(F.cross_entropy(job.model(x), y))
            if job.step == 8:
                profiler.stop()
                for event in profiler.key_averages():
                    if event.key.startswith(("c10d::", "gloo:", "nccl:")) or "ynchronize" in event.key:
                        names[event.key] = event.count
    job.close()
    return names


def asking(folder: str) -> int:
    """How often the training thread asks the job's store for something in six ordinary steps."""
    asked, ask = [], AuthenticatedStore._ask

    def noted(*arguments: Any) -> list[bytes]:
        if threading.current_thread() is threading.main_thread():
            asked.append(arguments[1])
        return ask(*arguments)

    model, optimizer, data = task()
    job = pollux.init(model, optimizer, data, BATCH)
    at: dict[int, int] = {}
    for _ in job.epochs(2):
        for x, y in job.batches():
            if job.step == 2:
                AuthenticatedStore._ask = noted  # type: ignore[assignment,method-assign]
            job.backward(F.cross_entropy(job.model(x), y))
            at[job.step] = len(asked)
    return at[8]
