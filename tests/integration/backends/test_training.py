"""Real training scripts on the local backend: process groups through the hosted store, workers, the agent's own job."""

import json

import pytest

from pollux.backends.local import LocalBackend
from pollux.testing.conformance.backends import Bench


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    bench = Bench(tmp_path_factory.mktemp("training"), lambda home: LocalBackend(home, slots=3))
    bench.wait("warm backend", lambda: bench.backend.is_warm)
    yield bench
    for each in bench.backend.running():
        bench.backend.stop(each.job_id, each.generation, 0.0)
        bench.backend.forget(each.job_id)
    bench.wait("empty backend", lambda: not bench.backend.running())
    bench.backend.close()


def succeeded(bench, job, generation=1):
    ended = bench.end(job, generation)
    assert ended.outcome == "succeeded", (ended, bench.log(job))
    # Where the loopback has no name to be looked up, as without a network, PyTorch remarks on it.
    return "".join(line for line in bench.log(job).splitlines(keepends=True) if "socket.cpp:" not in line)


def test_several_process_groups_meet_through_the_hosted_store(bench):
    text = """
        import os
        from datetime import timedelta
        import torch
        import torch.distributed as dist
        assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
        total = torch.ones(1)
        dist.all_reduce(total)
        for _ in range(2):
            other = dist.new_group(backend="gloo", timeout=timedelta(seconds=300))
            dist.all_reduce(total, group=other)
        dist.barrier()
        dist.destroy_process_group()
        print(total.item())
    """
    bench.submit("groups", text, gpus=2)
    assert succeeded(bench, "groups") == "8.0\n"


def test_a_script_alone_may_make_a_group_too(bench):
    text = """
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        print(dist.get_world_size())
        dist.destroy_process_group()
    """
    bench.submit("single", text)
    assert succeeded(bench, "single") == "1\n"


ELASTIC = """
    import json, os
    import torch
    from torch import nn
    import pollux

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(512, 4), torch.randn(512, 1))
    model = nn.Linear(4, 1)
    with pollux.init(model, torch.optim.Adam(model.parameters()), data, 16) as job:
        for epoch in job.epochs(int(os.environ["EPOCHS"])):
            for x, y in job.batches():
                job.backward(nn.functional.mse_loss(job.model(x), y))
                if os.environ["RANK"] == "0" and epoch == 1:
                    open("elastic.up", "w").write("yes\\n")
    if os.environ["RANK"] == "0":
        print(json.dumps({"world": os.environ["WORLD_SIZE"], "threads": torch.get_num_threads()}))
"""


def test_an_elastic_job_goes_on_with_more_replicas(bench):
    """Stopped by SIGTERM at a step's end, saved, and resumed by the next generation on another number of replicas."""
    checkpoints = str(bench.folder / "checkpoints")
    env = {"POLLUX_JOB": "elastic", "POLLUX_CHECKPOINT_DIR": checkpoints, "EPOCHS": "100000"}
    bench.submit("elastic", ELASTIC, gpus=1, env=env)
    bench.file("elastic.up")
    bench.backend.stop("elastic", 1, 60.0)
    bench.submit("elastic", ELASTIC, generation=2, gpus=2, env={**env, "EPOCHS": "3"})
    first = bench.end("elastic", 1)
    assert (first.outcome, first.exits[0].code) == ("stopped", 143)
    log = succeeded(bench, "elastic", 2)
    assert json.loads(log.splitlines()[-1]) == {"world": "2", "threads": 1}


def test_a_forked_script_is_like_a_fresh_one(bench):
    """Data loaders, spawned processes, files left open, exit handlers and threads work as in any interpreter."""
    text = """
        import atexit, multiprocessing, os, sys, threading, time, pickle
        import torch

        class Squares(torch.utils.data.Dataset):
            def __len__(self):
                return 6
            def __getitem__(self, index):
                return index * index

        def twice(number):
            return 2 * number

        def late():
            time.sleep(0.2)
            print("thread")

        if __name__ == "__main__":
            assert pickle.loads(pickle.dumps(twice)) is twice
            loader = torch.utils.data.DataLoader(Squares(), batch_size=3, num_workers=1)
            print([batch.tolist() for batch in loader])
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(twice, [1, 2]))
            atexit.register(print, "handler")
            threading.Thread(target=late).start()
            left_open = open("left-open.txt", "w")
            left_open.write("flushed")
            print(sys.argv, __file__ == os.path.abspath(sys.argv[0]), "torch" in sys.modules)
    """
    bench.submit("fresh", text, arguments=("one",))
    lines = succeeded(bench, "fresh").splitlines()
    assert lines == [
        "[[0, 1, 4], [9, 16, 25]]",
        "[2, 4]",
        "['fresh_script.py', 'one'] True True",
        "thread",
        "handler",
    ]
    assert (bench.folder / "left-open.txt").read_text() == "flushed"


def test_a_module_runs_as_with_minus_m(bench):
    bench.script("a_module", "import sys; print(__name__, sys.argv[1:], __spec__.name)")
    launch = bench.launch("module", "")
    command = ("python", "-m", "a_module", "x")
    bench.backend.submit(type(launch)("module", 1, launch.placement, command, launch.workdir))
    assert succeeded(bench, "module") == "__main__ ['x'] a_module\n"


@pytest.mark.parametrize("warm", [True, False], ids=["fork", "exec"])
def test_a_traceback_begins_with_the_script(bench, warm):
    """With a variable that is read only at an interpreter's start the script gets a fresh one: the log is the same."""
    text = """
        def inner():
            raise RuntimeError("deep")
        inner()
    """
    job = f"traceback-{warm}"
    bench.submit(job, text, env={} if warm else {"PYTHONHASHSEED": "1"})
    assert bench.end(job).exits[0].code == 1
    lines = bench.log(job).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].strip().startswith('File "')
    assert f"{job}_script.py" in lines[1]
    assert lines[1].endswith(", line 4, in <module>")
    assert lines[-1] == "RuntimeError: deep"
    assert not any("pollux" in line for line in lines)


def test_random_numbers_differ_between_replicas(bench):
    text = """
        import random
        import numpy
        print(random.random(), numpy.random.rand())
    """
    bench.submit("random", text, gpus=2)
    succeeded(bench, "random")
    first, second = (bench.log("random", replica).split() for replica in range(2))
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_module_beside_the_script_is_not_taken_for_an_imported_one(bench):
    """The script's own `colorsys`, or whatever name, counts, also where that name is imported already."""
    folder = bench.folder / "shadow"
    folder.mkdir()
    (folder / "textwrap.py").write_text("mine = True\n")
    (folder / "main.py").write_text("import textwrap; print(textwrap.mine)\n")
    launch = bench.launch("shadow", "")
    bench.backend.submit(type(launch)("shadow", 1, launch.placement, ("python", "main.py"), str(folder)))
    assert succeeded(bench, "shadow") == "True\n"


def test_a_forked_script_has_nothing_of_the_shims_open(bench):
    """Neither its lock nor its sockets nor the other replicas' output; the fourth file is the listing itself."""
    bench.submit("files", "import os; print(sorted(os.listdir('/proc/self/fd')))", gpus=2)
    succeeded(bench, "files")
    assert [bench.log("files", replica) for replica in range(2)] == ["['0', '1', '2', '3']\n"] * 2
