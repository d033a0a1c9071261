"""A job in float64 that writes down its loss after every pass, and what plain PyTorch makes of it.

`python curve.py FOLDER EPOCHS SEED`. Replicas note who they are in the folder before anything else, as those of
`float64_job`. Until the file `fast` is beside the folder it takes its time, and more so towards its end.
"""

import json
import os
import sys
import time
from pathlib import Path

SAMPLES, BATCH = 98, 24
PACES_SECONDS = (0.05, 0.5)


def task(seed):
    """Model, optimizer, features and labels."""
    import torch

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.randn(SAMPLES, 6, dtype=torch.float64), torch.randint(0, 3, (SAMPLES,))


def loss_of(model, x, y):
    """Over all samples."""
    import torch

    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(x), y).item()


def expected(epochs, seed):
    """The losses of one process that knows nothing of schedulers."""
    import torch.nn.functional as F

    from pollux.agent.data.permutation import pass_order

    model, optimizer, x, y = task(seed)
    losses = []
    for number in range(epochs):
        order = pass_order(SAMPLES, seed, number)
        for first in range(0, SAMPLES, BATCH):
            chosen = order[first : first + BATCH]
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
        losses.append(loss_of(model, x, y))
    return losses


def found(folder):
    """The losses that the job has noted; a pass that was trained anew after a move counts as it was last."""
    losses = dict(json.loads(line) for line in (folder / "curve").read_text().splitlines())
    assert sorted(losses) == [*range(len(losses))]
    return [losses[number] for number in sorted(losses)]


def main(folder, epochs, seed):
    """One replica."""
    pid = os.getpid()
    began = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[19]
    (folder / f"replica-{pid}-{began}").touch()
    import torch
    import torch.nn.functional as F

    import pollux

    model, optimizer, x, y = task(seed)
    job = pollux.init(model, optimizer, torch.utils.data.TensorDataset(x, y), BATCH, seed=seed, checkpoint_every=1.0)
    for epoch in job.epochs(epochs):
        for features, labels in job.batches():
            job.backward(F.cross_entropy(job.model(features), labels))
            if not (folder.parent / "fast").exists():
                time.sleep(PACES_SECONDS[2 * epoch >= epochs])
        loss = loss_of(model, x, y)
        job.log(loss=loss)
        if job.is_first:
            with (folder / "curve").open("a") as file:
                file.write(json.dumps([epoch, loss]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
