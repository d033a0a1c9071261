"""Starting the replicas of a framework's training as torchrun would, on the loopback interface."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pollux.testing.waiting import OutOfTime

_TIMEOUT_SECONDS = 90.0
_ENDS = {"": 0, "killed": -signal.SIGKILL, "stopped": 128 + signal.SIGTERM}
_LATE = -1000 - signal.SIGKILL  # as `forked.py` gives it
_ENVIRONMENT = {
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RUN_ID": "test",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Run:
    """One start of the job: on how many replicas, with what settings, and how all of them must end."""

    num_replicas: int
    settings: dict[str, Any]
    end: str = ""


Launch = Callable[[str, Sequence[tuple[Any, ...]]], list[list[Any]]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """`launch(script, [(num_replicas, settings), (num_replicas, settings, "killed"), ...])`, one run after another.

    Returns what the replicas of each run answered. A run that is "killed" must end by SIGKILL on every replica, a
    "stopped" one with exit code 143.
    """

    def start(script: str, runs: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
        asked = [Run(*run) for run in runs]
        folders = [tmp_path / f"run-{number}" for number in range(len(asked))]
        for folder in folders:
            folder.mkdir()
        _serve(script, asked, folders)
        return [_answers(run, folder) for run, folder in zip(asked, folders, strict=True)]

    return start


def _serve(script: str, runs: list[Run], folders: list[Path]) -> None:
    plan = [
        {
            "num_replicas": run.num_replicas,
            "settings": run.settings,
            "folder": str(folder),
            "port": _free_port(),
            "timeout": _TIMEOUT_SECONDS,
        }
        for run, folder in zip(runs, folders, strict=True)
    ]
    command = [sys.executable, script, json.dumps(plan)]
    environment = {**os.environ, **_ENVIRONMENT}
    # A session of its own, so that nothing of it can outlive this test.
    with subprocess.Popen(command, env=environment, cwd=folders[0], start_new_session=True) as server:
        try:
            code = server.wait(_TIMEOUT_SECONDS * (len(runs) + 1))
        except BaseException:
            os.killpg(server.pid, signal.SIGKILL)
            raise
    assert code == 0, f"{script} ended with {code}"


def _answers(run: Run, folder: Path) -> list[Any]:
    codes = json.loads((folder / "codes.json").read_text())
    said = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("output-*.txt")))
    if _LATE in codes and not {*codes} - {*_ENDS.values(), _LATE}:
        raise OutOfTime(f"replicas were not through after {_TIMEOUT_SECONDS:g} s: {codes}\n{said}")
    assert codes == [_ENDS[run.end]] * run.num_replicas, said
    if run.end:
        return []
    return [json.loads((folder / f"answer-{replica}.json").read_text()) for replica in range(run.num_replicas)]
