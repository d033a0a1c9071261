"""Jobs that cannot change while they run, launched as if they could: each is restarted, and says why."""

import textwrap

import pytest

from pollux.backends.local import LocalBackend
from pollux.testing.conformance.backends import Bench

PLAIN = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(143))
    dist.init_process_group("gloo")
    print("world", dist.get_world_size(), flush=True)
    while True:
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
"""

SHARDED = """
    import os, time
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    import pollux

    dist.init_process_group("gloo")
    model = torch.nn.Linear(6, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randn(64, 4))
    job = pollux.init(model, optimizer, data, 8, checkpoint_dir="sharded-checkpoints")
    print("world", dist.get_world_size(), "from", "0" if job.step == 0 else "later", flush=True)
    for _ in job.epochs(1000):
        for x, y in job.batches():
            job.backward(torch.nn.functional.mse_loss(job.model(x), y))
            time.sleep(0.02)
"""

OWN_GROUP = """
    import time
    import torch, torch.distributed as dist
    import pollux

    dist.init_process_group("gloo")
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randn(64, 4))
    job = pollux.init(model, optimizer, data, 8, checkpoint_dir="own-checkpoints")
    print("world", dist.get_world_size(), "from", "0" if job.step == 0 else "later", flush=True)
    for _ in job.epochs(1000):
        for x, y in job.batches():
            job.backward(torch.nn.functional.mse_loss(job.model(x), y))
            time.sleep(0.02)
"""

LIGHTNING = """
    import os, time
    import torch
    import lightning.pytorch as pl
    from pollux.agent.lightning import PolluxCallback, PolluxDataLoader

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(6, 4)
        def on_train_start(self):
            print("world", self.trainer.world_size, flush=True)
        def training_step(self, batch, batch_idx):
            time.sleep(0.02)
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    world = int(os.environ["WORLD_SIZE"])
    loader = PolluxDataLoader(torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randn(64, 4)), 8)
    trainer = pl.Trainer(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", max_epochs=1000,
                         callbacks=[PolluxCallback(loader)], logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False)
    trainer.fit(Module(), loader)
"""

TRAINER = """
    import os, time
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from pollux.agent.huggingface import PolluxTrainerMixin

    class PolluxTrainer(PolluxTrainerMixin, Trainer):
        pass

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            return {"x": torch.ones(6), "labels": torch.ones(4)}

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(6, 4)
        def forward(self, x, labels):
            time.sleep(0.02)
            return {"loss": torch.nn.functional.mse_loss(self.net(x), labels)}

    class Tell(TrainerCallback):
        def on_train_begin(self, args, state, control, **more):
            print("world", args.world_size, flush=True)

    arguments = TrainingArguments(output_dir="trainer", use_cpu=True, per_device_train_batch_size=4,
                                  num_train_epochs=1000, save_strategy="no", report_to=[], disable_tqdm=True)
    PolluxTrainer(model=Model(), args=arguments, train_dataset=Numbers(), callbacks=[Tell()], batch_size=8).train()
"""

FRAMEWORK = "a framework owns the loop and its process group"


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    made = Bench(tmp_path_factory.mktemp("fallback"), lambda home: LocalBackend(home, slots=3, hang_seconds=5.0))
    made.wait("warm backend", lambda: isinstance(made.backend, LocalBackend) and made.backend.is_warm)
    yield made
    made.backend.close()


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("plain", PLAIN, "no agent in its replicas sends heartbeats"),
        ("sharded", SHARDED, "sharded by fully_shard"),
        ("own", OWN_GROUP, "the script made the process group itself"),
        ("lightning", LIGHTNING, FRAMEWORK),
        ("trainer", TRAINER, FRAMEWORK),
    ],
)
def test_it_is_restarted_and_says_why(bench, name, text, why):
    def launch(generation, gpus):
        env = {"POLLUX_JOB": name, "POLLUX_GENERATION": str(generation), "HF_HUB_OFFLINE": "1"}
        return bench.launch(name, textwrap.dedent(text), generation, gpus, env=env, live=True, grace_seconds=10.0)

    bench.backend.submit(launch(1, 2))
    bench.wait("training", lambda: "world 2" in bench.log(name))
    bench.backend.resize(launch(2, 3))
    ended = bench.end(name, 2)
    assert ended.outcome == "lost"
    assert why in ended.detail
    if why == FRAMEWORK:
        return
    # As a service does with a change that did not come about.
    bench.backend.submit(launch(3, 1))
    try:
        bench.wait("training", lambda: "world 1" in bench.log(name))
        assert name == "plain" or "world 1 from later" in bench.log(name)
    finally:
        bench.backend.stop(name, 3, 5.0)
        assert bench.end(name, 3).outcome == "stopped"
