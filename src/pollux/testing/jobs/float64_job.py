"""A small training job in float64, and the result of plain PyTorch: `python float64_job.py FOLDER PASSES`.

Replicas write down their process numbers and results in the folder. Files and variables control the job:

- after each step it sleeps `LIVE_JOB_PACE` seconds, ten times as long in its second half, until the file `fast` exists:
  it does not end by itself while a test is at work on it, however slow the machine is;
- `POLLUX_FAIL_AT=transfer/0,1/9` sends signal 9 to ranks 0 and 1 when both have reached phase `transfer` of a change;
- after pass `POLLUX_HOLD_AT` (or the last, if it has that number), replicas compute until `go` exists;
- while the file `stall` exists, the replica that was started as rank 1 gets no data.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["BATCH", "SAMPLES", "SLOW", "expected", "living", "main", "results"]

SAMPLES = 98
"""Samples in the dataset."""

BATCH = 12
"""Samples of a step; the last step of a pass has two."""

SLOW = {"LIVE_JOB_PACE": "0.06"}
"""Variables for few steps and long sleeps, which leave the processor to the processes under test."""

_PACE_SECONDS = "0.02"
_SLOWER = 10


def _task() -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(5)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    features = torch.randn(SAMPLES, 6, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(features, torch.randint(0, 3, (SAMPLES,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), data


class _Stalling:
    """A dataset that can stop giving data."""

    def __init__(self, data: Any, folder: Path) -> None:
        self._data, self._stall = data, folder / "stall"

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        while os.environ.get("RANK") == "1" and self._stall.exists():
            (self._stall.parent / f"stalled-{os.getpid()}").touch()
            # A sleep uses no processor, like waiting for a disk.
            time.sleep(0.5)
        return self._data[index]


def _numbers(model: Any) -> list[float]:
    return [float(value) for parameter in model.parameters() for value in parameter.detach().reshape(-1)]


def expected(epochs: int) -> list[float]:
    """The parameters after that many passes in plain PyTorch, in one process."""
    import torch.nn.functional as F

    from pollux.agent.data.permutation import pass_order

    model, optimizer, data = _task()
    for number in range(epochs):
        order = pass_order(SAMPLES, 0, number)
        for first in range(0, SAMPLES, BATCH):
            x, y = data[order[first : first + BATCH]]
            optimizer.zero_grad()
            loss: Any = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    return _numbers(model)


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    except (OSError, IndexError):
        return []


def living(folder: Path, stepped: bool = False) -> list[int]:
    """Process numbers of the replicas that live; with `stepped`, only of those that have taken a step."""
    found = []
    for path in folder.glob("replica-*"):
        _, pid, began = path.name.split("-")
        stat = _stat(int(pid))
        if stat and stat[19] == began and stat[0] not in "ZX" and (not stepped or (folder / f"stepped-{pid}").exists()):
            found.append(int(pid))
    return sorted(found)


def results(folder: Path) -> list[dict[str, Any]]:
    """The results of the replicas that reached the end."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("result-*.json"))]


def _fail_at(folder: Path, text: str) -> None:
    from pollux.agent.elastic import generation_move

    phase, ranks, number = text.split("/") if text else ("", "", "0")

    def fail(now: str, rank: int) -> None:
        if now == phase and str(rank) in ranks.split(","):
            # Each rank fails once, even over several processes.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(folder / f"failed-{rank}", os.O_CREAT | os.O_EXCL))
                # Together: who is still on the way when another is gone goes on under another rank.
                while not all((folder / f"failed-{each}").exists() for each in ranks.split(",")):
                    time.sleep(0.01)
                os.kill(os.getpid(), int(number))

    generation_move.at_phase = fail


def _wait(folder: Path, word: str) -> None:
    """Write the file `word`-PID, and compute until the file `go` exists."""
    (folder / f"{word}-{os.getpid()}").touch()
    while not (folder / "go").exists():
        sum(range(10_000))


def main(folder: Path, epochs: int) -> None:
    """Train as one replica."""
    pid = os.getpid()
    (folder / f"replica-{pid}-{_stat(pid)[19]}").touch()
    import torch.nn.functional as F

    import pollux

    _fail_at(folder, os.environ.get("POLLUX_FAIL_AT", ""))
    model, optimizer, data = _task()
    data = _Stalling(data, folder)
    store = os.environ.get("LIVE_JOB_STORE")
    if store:
        # Caches apart, as on machines of their own.
        os.environ["XDG_CACHE_HOME"] = str(folder / f"cache-{pid}")
    job = pollux.init(
        model, optimizer, data, BATCH, checkpoint_dir=store or folder / "checkpoints", checkpoint_every=0.3
    )
    began = job.step
    pace = float(os.environ.get("LIVE_JOB_PACE", _PACE_SECONDS))
    paces = (pace, pace * _SLOWER)
    hold = int(os.environ.get("POLLUX_HOLD_AT", "-1"))
    for epoch in job.epochs(epochs):
        for x, y in job.batches():
            job.backward(F.cross_entropy(job.model(x), y))
            if job.step == began + 2:
                (folder / f"stepped-{pid}").touch()
            if not (folder / "fast").exists():
                time.sleep(paces[2 * epoch >= epochs])
        if hold == epoch and not (folder / "go").exists():
            _wait(folder, "held")
    passes = [[each["pass"], each["samples"]] for each in job.receipt.to_json()["ledger"]]
    exact = job.is_exact
    job.close()
    if hold == epochs:
        _wait(folder, "through")
    beside = folder / f"result-{pid}.tmp"
    beside.write_text(json.dumps({"parameters": _numbers(model), "passes": passes, "exact": exact}))
    beside.rename(folder / f"result-{pid}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
