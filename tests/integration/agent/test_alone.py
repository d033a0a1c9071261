"""One replica without a scheduler: it trains, adapts, saves and resumes, and no socket is ever there."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import pollux

HERE = str(Path(__file__))
# What a Python socket begins with. PyTorch's own sockets are seen among the open files.
NETWORK = ("socket.__new__", "socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendto")


def sockets() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


def train(folder: str, wrong: bool) -> list[Any]:
    before, events, seen = sockets(), [], set()
    sys.addaudithook(lambda event, _: events.append(event) if event in NETWORK else None)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randint(0, 2, (64,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if wrong:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = pollux.init(model, optimizer, data, 8, max_batch_size=32, checkpoint_dir=folder, checkpoint_every=0.1)
    began = job.step
    for _ in job.epochs(6 if began else 3):
        for x, y in job.batches():
            job.backward(F.cross_entropy(job.model(x), y))
            seen |= sockets() - before
        job.log(epoch=job.epoch)
    job.close()
    if wrong:
        del store
    return [began, job.step, events, sorted(seen)]


def test_there_is_no_network(replica_server, tmp_path):
    for resumed in (False, True):
        ((began, ended, events, seen),) = replica_server.run(
            f"{HERE}:train", 1, {"folder": str(tmp_path / "saved"), "wrong": False}
        )
        assert (began > 0) == resumed
        assert ended > began
        assert events == []
        assert seen == []


def test_a_socket_would_be_seen(replica_server, tmp_path):
    ((_, _, _, seen),) = replica_server.run(f"{HERE}:train", 1, {"folder": str(tmp_path / "saved"), "wrong": True})
    assert seen
