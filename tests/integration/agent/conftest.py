"""Starting the replicas of a framework's training as torchrun would: one process each, on the loopback interface."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., list[Any]]
KILLED = -9


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(replica: int, num_replicas: int, port: int) -> dict[str, str]:
    place = {"RANK": replica, "LOCAL_RANK": replica, "WORLD_SIZE": num_replicas, "LOCAL_WORLD_SIZE": num_replicas}
    return {
        **os.environ,
        **{name: str(value) for name, value in place.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "WANDB_DISABLED": "true",
    }


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """`launch(script, num_replicas, settings, killed=False)`: run it, and return what each replica wrote as JSON.

    A script gets two arguments: its settings as JSON, and the file for its answer. With `killed`, every replica must
    end by SIGKILL and nothing is returned.
    """

    def run(script: str, num_replicas: int, settings: dict[str, Any], killed: bool = False) -> list[Any]:
        folder = tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}"
        folder.mkdir()
        port = _free_port()
        processes = []
        for replica in range(num_replicas):
            command = [sys.executable, script, json.dumps(settings), str(folder / f"answer-{replica}.json")]
            with (folder / f"output-{replica}.txt").open("w") as output:
                environment = _environment(replica, num_replicas, port)
                processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=folder))
        codes = _wait(processes, timeout=100.0)
        expected = [KILLED if killed else 0] * num_replicas
        said = "".join((folder / f"output-{replica}.txt").read_text()[-3000:] for replica in range(num_replicas))
        assert codes == expected, said
        if killed:
            return []
        return [json.loads((folder / f"answer-{replica}.json").read_text()) for replica in range(num_replicas)]

    return run


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> list[int | None]:
    end = time.monotonic() + timeout
    try:
        for process in processes:
            process.wait(max(end - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [process.returncode for process in processes]
